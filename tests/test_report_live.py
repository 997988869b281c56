"""What a run shows while it goes on: the line in a terminal, lines in a log, numbers in TensorBoard."""

import fcntl
import io
import json
import math
import os
import pty
import struct
import sys
import termios

import pytest
from report_run import write_run

from lockstep.watching import watcher
from lockstep.watching.live import StatusLine, TensorBoard, Tracked, describe, scalars, status


class Clock:
    """Time that passes when told to."""

    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = write_run(tmp_path_factory.mktemp("run"), steps=60)
    return [json.loads(text) for text in (folder / "steps.jsonl").read_text().splitlines()]


class Terminal:
    """A real terminal of a given width; `read` gives what was written to it."""

    def __init__(self, columns):
        self._other, ours = pty.openpty()
        fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(ours, "w", encoding="utf-8")

    def read(self):
        """What was written until now; the mark tells that all of it has come through."""
        self.stream.write("<mark>")
        self.stream.flush()
        written = b""
        while not written.endswith(b"<mark>"):
            written += os.read(self._other, 1 << 20)
        return written.decode().removesuffix("<mark>")

    def close(self):
        self.stream.close()
        os.close(self._other)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(columns=70)
    yield terminal
    terminal.close()


def test_a_record_in_words(records):
    words = describe(records[50])
    assert words[0] == "step 50" and words[1].startswith("loss ") and words[2].endswith(" samples/s")
    assert words[3].startswith("efficiency ") and words[4].startswith("exposed ")
    assert status(records[50]).startswith("  ".join(words) + "  worker 2 holds everyone up")


def test_what_is_not_known_is_left_out():
    assert describe({"step": 3}) == ["step 3"]
    assert describe({"step": 3, "loss": math.nan, "verdict": "a\x1b[2Jb\n"}) == ["step 3", "loss nan"]
    assert status({"step": 3, "verdict": "a\x1b[2Jb\n"}) == "step 3  a[2Jb"


@pytest.mark.parametrize("width", [1, 10, 20, 40, 79, 120, 300])
def test_a_line_fits(records, width):
    text = status(records[50], width)
    assert len(text) <= width and text.startswith("step 50"[:width])
    assert (" of it in data" in text) == (width == 300)
    assert ("worker 2 holds everyone up" in text) == (width >= 79)


def test_a_terminal_is_redrawn_at_most_five_times_a_second(records, terminal):
    clock = Clock()
    progress = StatusLine(terminal.stream, clock)
    for record in records:
        progress.show(record)
        clock.now += 0.0625
    written = terminal.read()
    assert written.count("\r\x1b[2K") == 15
    assert all(len(part) < 70 for part in written.split("\r\x1b[2K"))
    progress.close()
    assert terminal.read() == "\r\x1b[2K" + status(records[-1], 69) + "\r\n"
    progress.close()


def test_a_log_gets_a_line_every_ten_seconds(records):
    clock, stream = Clock(), io.StringIO()
    progress = StatusLine(stream, clock)
    for record in records:
        progress.show(record)
        clock.now += 1.0
    progress.close()
    lines = stream.getvalue().splitlines()
    assert [text.split()[1] for text in lines] == ["0", "10", "20", "30", "40", "50", "59"]
    assert "\x1b" not in stream.getvalue()


def test_a_closed_stream_ends_nothing(records):
    stream = io.StringIO()
    progress = StatusLine(stream, Clock())
    stream.close()
    progress.show(records[0])
    progress.close()


def test_scalars_of_a_record(records):
    found = dict(scalars({**records[50], "loss": math.nan, "grad_norm": math.inf}))
    assert math.isnan(found["training/loss"]) and "training/grad_norm" not in found
    assert found["speed/efficiency"] == records[50]["efficiency"]
    assert found["straggler/worker"] == 2
    mean = sum(worker["shares_ms"]["waiting"] for worker in records[50]["workers"]) / 4
    assert found["time/waiting_ms"] == pytest.approx(mean)


def test_without_tensorboard_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.warns(UserWarning, match="pip install tensorboard"):
        assert watcher._views(progress=False, tensorboard=tmp_path / "board") == []
    assert not (tmp_path / "board").exists()


def test_tensorboard_gets_the_numbers(records, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = Tracked(TensorBoard(tmp_path))
    for record in records:
        board.show(record)
    board.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    losses = found.Scalars("training/loss")
    assert [event.step for event in losses] == list(range(60))
    assert losses[7].value == pytest.approx(records[7]["loss"])
