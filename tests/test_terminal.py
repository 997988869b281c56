"""What commands draw on a terminal, and what a log gets instead."""

import io
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.terminal import ProgressLine, Style, progress_text, styled, table


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _usual_environment(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_columns_of_a_table_stand_below_each_other():
    lines = table(["name", "ms", "ratio"], [["nocomm", "1.5", "1"], [], ["a", "100.0", "2.25"]])
    assert lines == ["name       ms  ratio", "nocomm    1.5      1", "", "a       100.0   2.25"]
    assert table(["a", "b"], []) == ["a  b"]


def test_colours_only_where_they_are_shown(monkeypatch):
    assert styled("no", Style.RED, Terminal()) == "\x1b[31mno\x1b[0m"
    assert styled("no", Style.RED, io.StringIO()) == "no"
    monkeypatch.setenv("NO_COLOR", "1")
    assert styled("no", Style.RED, Terminal()) == "no"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert styled("no", Style.RED, Terminal()) == "no"


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(0, 300), st.booleans())
def test_progress_fits(total, width, ascii_only):
    for done in (1, total):
        text = progress_text(done, total, ["loss 2.5", "left"], width, colour=False, ascii_only=ascii_only)
        assert len(text) <= width
        assert text.isascii() or not ascii_only
        assert width < 30 or text.endswith("loss 2.5  left")


def test_colours_take_no_room():
    plain, coloured = (progress_text(7, 20, ["loss"], 100, colour=colour) for colour in (False, True))
    for code in (Style.GREEN.value, Style.DIM.value, "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == plain
    assert plain.startswith("━" * 10 + "─" * 20)


@pytest.fixture
def clock():
    """A clock that goes on by a sixteenth of a second with every look."""
    return lambda ticks=itertools.count(): next(ticks) / 16


def test_a_terminal_has_one_line_drawn_over_and_over(clock):
    terminal = Terminal()
    line = ProgressLine(terminal, clock)
    for step in range(1, 21):
        line.show(step, 20, ["loss 2.5"])
    line.close()
    line.close()
    said = terminal.getvalue()
    assert (said.count("\r"), said.count("\n"), said[-1]) == (6, 1, "\n")
    assert "20/20  loss 2.5" in said


def test_a_log_gets_whole_lines_now_and_then(clock):
    log = io.StringIO()
    line = ProgressLine(log, clock)
    for step in range(1, 201):
        line.show(step, 200, ["loss 2.5", "more"])
    line.close()
    lines = log.getvalue().splitlines()
    assert [text.split()[1] for text in lines] == ["1/200", "161/200", "200/200"]
    assert lines[-1] == "step 200/200  loss 2.5  more"
    assert "\r" not in log.getvalue()


def test_a_line_that_stays_takes_the_place_of_what_is_drawn():
    terminal = Terminal()
    line = ProgressLine(terminal)
    line.draw("half way")
    line.write("found it")
    line.draw("further")
    line.erase()
    line.erase()
    line.close()
    assert terminal.getvalue() == "\r\x1b[2Khalf way\r\x1b[2Kfound it\n\r\x1b[2Kfurther\r\x1b[2K"
