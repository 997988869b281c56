"""A watched run in one line: drawn over and over in a terminal, or written now and then to a log.

Worker 0 calls it with what it writes into `steps.jsonl`, so it must be cheap: most records are only remembered.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

_REDRAW_S, _REWRITE_S = 0.2, 10.0
"""Between two drawings in a terminal, and between two lines elsewhere."""
_CLEAR_LINE = "\r\x1b[2K"
_USUAL_WIDTH = 80
_LEAST_VERDICT = 40
"""Columns, with the space before it: "worker 12 holds everyone up by 190 ms"."""

Record = Mapping[str, Any]
"""A line of `steps.jsonl`, as a dict."""


def describe(record: Record) -> list[str]:
    """The record's numbers in words, the most important first; what is not known is left out."""
    words = [f"step {record['step']}"]
    if record.get("loss") is not None:
        words.append(f"loss {record['loss']:.4g}")
    if record.get("samples_per_s") is not None:
        words.append(f"{record['samples_per_s']:.4g} samples/s")
    if record.get("efficiency") is not None:
        words.append(f"efficiency {100 * record['efficiency']:.0f} %")
    exposed = _exposed_ms(record)
    return words if exposed is None else [*words, f"exposed {exposed:.3g} ms"]


def line(record: Record, width: int | None = None) -> str:
    """At most `width` columns; half a verdict still names the worker, so numbers make room for it."""
    words, verdict = describe(record), _verdict(record)
    if width is None:
        return "  ".join([*words, verdict] if verdict else words)
    needed = min(len(verdict) + 2, _LEAST_VERDICT) if verdict else 0
    while len(words) > 1 and len("  ".join(words)) + needed > width:
        words.pop()
    text = "  ".join(words)[:width]
    room = width - len(text) - 2
    if not verdict or room < needed - 2:
        return text
    return f"{text}  {verdict if len(verdict) <= room else verdict[: room - 3] + '...'}"


class Progress:
    """Shows records on a stream: `show` after each step, `close` at the end, however it ends."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._is_live = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._due = clock()
        self._unshown: Record | None = None
        self._is_drawn = False

    def show(self, record: Record) -> None:
        """Take the newest record, and show it if it is time for it."""
        self._unshown = record
        now = self._clock()
        if now >= self._due:
            self._due = now + (_REDRAW_S if self._is_live else _REWRITE_S)
            self._write()

    def close(self) -> None:
        """Show the last record if it has not been shown, and begin a new line."""
        self._write()
        if self._is_drawn:
            self._put("\n")
            self._is_drawn = False

    def _write(self) -> None:
        if self._unshown is None:
            return
        if self._is_live:
            # One column stays free: some terminals break the line when the last one is written.
            self._put(_CLEAR_LINE + line(self._unshown, self._width() - 1))
            self._is_drawn = True
        else:
            self._put(line(self._unshown) + "\n")
        self._unshown = None

    def _put(self, text: str) -> None:
        """Write, unless nobody is there to read: a run does not end because its terminal was closed."""
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._is_drawn = False

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _USUAL_WIDTH
        except (OSError, ValueError):
            return _USUAL_WIDTH


def _exposed_ms(record: Record) -> float | None:
    """The workers' mean communication that nothing hides."""
    times = [worker["shares_ms"].get("exposed", 0.0) for worker in record.get("workers") or ()]
    return sum(times) / len(times) if len(times) > 1 else None


def _verdict(record: Record) -> str:
    return "".join(letter for letter in str(record.get("verdict") or "") if letter.isprintable())
