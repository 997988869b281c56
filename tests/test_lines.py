"""Bytes into lines."""

import hypothesis.strategies as st
from hypothesis import given

from lockstep.start.lines import LONGEST_BYTES, Lines


def cut(pieces, seconds=0.0):
    lines = Lines()
    out = [line for number, piece in enumerate(pieces) for line in lines.feed(piece, number * seconds)]
    return out + lines.end()


@given(st.lists(st.text("ab\n").map(str.encode)))
def test_lines_without_carriage_returns_come_out_as_they_went_in(pieces):
    expected = b"".join(pieces).split(b"\n")
    assert cut(pieces) == (expected if expected[-1] else expected[:-1])


@given(st.lists(st.sampled_from([b"one", b"two", b""])), st.integers(1, 7))
def test_windows_line_ends_cut_anywhere(lines, size):
    text = b"".join(line + b"\r\n" for line in lines)
    assert cut([text[at : at + size] for at in range(0, len(text), size)], seconds=10) == lines


def test_one_redrawing_per_second_and_the_last():
    bar = [b"\r%d%%" % percent for percent in range(10)]
    assert cut(bar, seconds=0.01) == [b"0%", b"9%"]
    assert cut(bar, seconds=0.51) == [b"0%", b"2%", b"4%", b"6%", b"8%", b"9%"]
    assert cut(bar, seconds=1.01) == [b"%d%%" % percent for percent in range(10)]


def test_a_bar_that_returns_after_drawing():
    assert cut([b"10%\r", b"20%\r", b"30%\r", b"done\n"], seconds=2) == [b"10%", b"20%", b"done"]


def test_memory_is_bounded():
    lines = Lines()
    passed_on = sum(len(line) for _ in range(100) for line in lines.feed(b"x" * 100_000, 0.0))
    assert 10_000_000 - passed_on <= LONGEST_BYTES
    assert passed_on + sum(map(len, lines.end())) == 10_000_000
