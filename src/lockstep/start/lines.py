"""Bytes from a pipe, cut into lines. Pure.

A progress bar redraws its line with carriage returns and may never end it. Shown as they come, N bars would overwrite
each other; held back until the line ends, nothing would be seen for hours. So one redrawing per second becomes a line
of its own, and so does the last one.
"""

REDRAW_SECONDS = 1.0
LONGEST_BYTES = 1 << 20
"""A line longer than this is passed on in pieces, so that output without line ends cannot fill the memory."""


class Lines:
    """One pipe's bytes on their way to whole lines."""

    def __init__(self) -> None:
        self._pending = b""
        self._redrawn_at = -REDRAW_SECONDS

    def feed(self, data: bytes, now: float) -> list[bytes]:
        """The lines that `data` completes, without their ends; `now` is in seconds."""
        *whole, self._pending = (self._pending + data).split(b"\n")
        lines = [_visible(line) for line in whole]
        lines += self._redrawings(now)
        while len(self._pending) > LONGEST_BYTES:
            lines.append(self._pending[:LONGEST_BYTES])
            self._pending = self._pending[LONGEST_BYTES:]
        return lines

    def end(self) -> list[bytes]:
        """The line that was never ended, if there is one."""
        pending, self._pending = self._pending, b""
        return [_visible(pending)] if pending else []

    def _redrawings(self, now: float) -> list[bytes]:
        """What the pending line was before it was redrawn, if a second has passed since the last such."""
        drawings = [text for text in self._pending.split(b"\r") if text]
        if len(drawings) < 2:
            return []
        # A carriage return at the end may be half of a Windows line end: it redraws nothing until text follows.
        self._pending = drawings[-1] + (b"\r" if self._pending.endswith(b"\r") else b"")
        if now - self._redrawn_at < REDRAW_SECONDS:
            return []
        self._redrawn_at = now
        return [drawings[-2]]


def _visible(line: bytes) -> bytes:
    """What a terminal would show of a line in the end."""
    return next((text for text in reversed(line.split(b"\r")) if text), b"")
