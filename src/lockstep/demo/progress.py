"""How far the training is: one line that is drawn over and over in a terminal, or a line now and then in a log."""

import os
import shutil
import sys
from dataclasses import dataclass
from typing import TextIO

_NUM_LINES = 20
"""How many lines a run writes where there is no terminal."""
_BAR_WIDTH = 30
_GREEN, _DIM, _RESET = "\x1b[32m", "\x1b[2m", "\x1b[0m"
_CLEAR_LINE = "\r\x1b[2K"


@dataclass(frozen=True, slots=True)
class Moment:
    """Where the training is."""

    step: int
    """Steps taken."""
    steps: int
    """Steps to take in all."""
    loss: float
    samples_per_s: float
    waiting: float | None
    """The part of the time in which the others were waited for, if known."""
    seconds_left: float


def describe(moment: Moment) -> list[str]:
    """The moment in words, the most important first."""
    words = [f"loss {moment.loss:.3f}", f"{moment.samples_per_s:.1f} samples/s"]
    if moment.waiting is not None:
        words.append(f"communication {100 * moment.waiting:.1f} %")
    minutes, seconds = divmod(round(moment.seconds_left), 60)
    return [*words, f"{minutes}:{seconds:02} left"]


def line(moment: Moment, width: int, *, colour: bool, ascii_only: bool = False) -> str:
    """One line of at most `width` columns: a bar if there is room for one, and as many words as fit."""
    count = f"{moment.step:{len(str(moment.steps))}}/{moment.steps}"
    text, words = count, describe(moment)
    while words and len(text) + 2 + len(words[0]) <= width:
        text += "  " + words.pop(0)
    room = min(_BAR_WIDTH, width - len(text) - 1)
    if words or room < 5:
        return text[:width]
    full, empty = ("#", ".") if ascii_only else ("━", "─")
    done = room * moment.step // moment.steps
    parts = full * done, empty * (room - done)
    bar = f"{_GREEN}{parts[0]}{_RESET}{_DIM}{parts[1]}{_RESET}" if colour else "".join(parts)
    return f"{bar} {text}"


class Progress:
    """Shows moments on a stream: `show` after each step, `end` at the end, however it ends."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._is_live = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._colour = not os.environ.get("NO_COLOR")
        self._ascii_only = not (self._stream.encoding or "").lower().startswith("utf")
        self._is_drawn = False

    def show(self, moment: Moment) -> None:
        """Draw the line anew, or write one if it is time for it."""
        if self._is_live:
            # One column stays free: some terminals break the line when the last one is written.
            width = shutil.get_terminal_size().columns - 1
            text = line(moment, width, colour=self._colour, ascii_only=self._ascii_only)
            self._stream.write(_CLEAR_LINE + text)
            self._is_drawn = True
        elif is_due(moment.step, moment.steps):
            self._stream.write(f"step {moment.step}/{moment.steps}  {'  '.join(describe(moment))}\n")
        self._stream.flush()

    def end(self) -> None:
        """Leave the line as it is and begin the next."""
        if self._is_drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._is_drawn = False


def is_due(step: int, steps: int) -> bool:
    """Whether a log gets a line at this step: at the first, the last, and about every twentieth of the way."""
    return step in (1, steps) or step % max(1, steps // _NUM_LINES) == 0
