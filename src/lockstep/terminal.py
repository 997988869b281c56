"""What commands draw on a terminal: tables, colours, one progress line. Plain text wherever a stream is no terminal.

Why not a library: docs/decisions.md.
"""

import os
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import Enum
from typing import TextIO

_BAR_WIDTH = 30
_LEAST_BAR = 5
"""Columns below which no bar is drawn."""
_REDRAW_S, LOG_EVERY_S = 0.2, 10.0
"""Between two drawings in a terminal, and between two lines in a log."""
_CLEAR_LINE = "\r\x1b[2K"
_RESET = "\x1b[0m"


class Style(Enum):
    """How a text stands out on a terminal; the value is its escape sequence."""

    BOLD = "\x1b[1m"
    DIM = "\x1b[2m"
    RED = "\x1b[31m"
    GREEN = "\x1b[32m"
    YELLOW = "\x1b[33m"


def is_live(stream: TextIO) -> bool:
    """Whether what is written to `stream` can be drawn over."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def has_colours(stream: TextIO) -> bool:
    """Whether `stream` shows colours, and the user has not forbidden them (https://no-color.org)."""
    return is_live(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, style: Style, stream: TextIO) -> str:
    """`text` as it is to be written to `stream`: in `style` if that shows colours."""
    return _painted(text, style) if has_colours(stream) else text


def num_columns(stream: TextIO) -> int:
    """The columns that can be written to; the last one stays free, since some terminals break the line after it."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        columns = 0
    return (columns or shutil.get_terminal_size().columns) - 1


def table(
    header: Sequence[str], rows: Iterable[Sequence[str]], text: Collection[int] = (0,), gap: int = 2
) -> list[str]:
    """Lines in which the cells of a column stand below each other; an empty row is a blank line.

    text: which columns begin where the column does. The others are numbers, which end where it does.
    """
    cells = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(len(row[column]) for row in cells if row) for column in range(len(header))]
    lines = []
    for row in cells:
        parts = [
            f"{cell:<{width}}" if column in text else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append((" " * gap).join(parts).rstrip())
    return lines


def progress_text(
    done: int, total: int, words: Sequence[str], width: int, *, colour: bool, ascii_only: bool = False
) -> str:
    """How far something is, in at most `width` columns: a bar if there is room for one, and as many words as fit."""
    text, left = f"{done:{len(str(total))}}/{total}", list(words)
    while left and len(text) + 2 + len(left[0]) <= width:
        text += "  " + left.pop(0)
    room = min(_BAR_WIDTH, width - len(text) - 1)
    if left or room < _LEAST_BAR:
        return text[:width]
    full, empty = ("#", ".") if ascii_only else ("━", "─")
    num_full = room * done // total
    bar, rest = full * num_full, empty * (room - num_full)
    if colour:
        bar, rest = _painted(bar, Style.GREEN), _painted(rest, Style.DIM)
    return f"{bar}{rest} {text}"


class ProgressLine:
    """One line of a terminal, drawn over and over, at most five times a second; in a log, a whole line now and then.

    Phases: show, or tell, as often as there is something new; close, or erase, at the end, however it ends. A stream
    that cannot be written to raises what it raises: only the caller knows whether that is to end it.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        log_every_s: float = LOG_EVERY_S,
    ) -> None:
        self._stream, self._clock = stream or sys.stdout, clock
        self.is_live = is_live(self._stream)
        """Whether the line is drawn over; else the stream is a log."""
        self._every_s = _REDRAW_S if self.is_live else log_every_s
        self._due = clock()
        self._untold: Callable[[int | None], str] | None = None
        self._colour = has_colours(self._stream)
        self._ascii_only = not (self._stream.encoding or "").lower().startswith("utf")
        self._is_drawn = False

    def show(self, done: int, total: int, words: Sequence[str]) -> None:
        """How far something is, if it is time for it: a bar and words; in a log, words."""

        def text(width: int | None) -> str:
            if width is None:
                return f"step {done}/{total}  {'  '.join(words)}"
            return progress_text(done, total, words, width, colour=self._colour, ascii_only=self._ascii_only)

        self.tell(text)

    def tell(self, text: Callable[[int | None], str]) -> None:
        """The newest, if it is time for it; `text` makes it for so many columns, or, where that is None, for a log."""
        self._untold = text
        now = self._clock()
        if now >= self._due:
            self._due = now + self._every_s
            self._tell_newest()

    def _tell_newest(self) -> None:
        text, self._untold = self._untold, None
        if text is not None and self.is_live:
            self.draw(text(num_columns(self._stream)))
        elif text is not None:
            self.write(text(None))

    def draw(self, text: str) -> None:
        """Draw `text` over what is there."""
        self._stream.write(_CLEAR_LINE + text)
        self._stream.flush()
        self._is_drawn = True

    def write(self, text: str) -> None:
        """Write a line that stays."""
        self._stream.write((_CLEAR_LINE if self._is_drawn else "") + text + "\n")
        self._stream.flush()
        self._is_drawn = False

    def erase(self) -> None:
        """Leave nothing of what is drawn."""
        self._untold = None
        if self._is_drawn:
            self._is_drawn = False
            self._stream.write(_CLEAR_LINE)
            self._stream.flush()

    def close(self) -> None:
        """Show the newest if it has not been shown, and begin the next line."""
        self._tell_newest()
        if self._is_drawn:
            self._is_drawn = False
            self._stream.write("\n")
            self._stream.flush()


def _painted(text: str, style: Style) -> str:
    return f"{style.value}{text}{_RESET}" if text else text
