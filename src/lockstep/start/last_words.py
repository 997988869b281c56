"""The end of a worker's stderr, kept until it is known who failed first. Pure.

The last traceback is kept whole, from its first line on, together with those it is chained to; of all the rest, the
last lines. Memory is bounded: a run may write to stderr for weeks.
"""

from collections import deque

_TRACEBACK_BYTES = 4 << 20
"""Room for a traceback with its chain. A recursion of depth 1000 that Python does not fold takes 0.2 MB."""
_MESSAGE_BYTES = 1 << 16
"""Room for what follows a traceback's frames: a message of several lines, what is said while the process ends."""
_NUM_RECENT = 50
_RECENT_BYTES = 1 << 12
"""How many other lines are kept, and how much of each."""

_BEGINNINGS = (b"Traceback (most recent call last)", b"  + Exception Group Traceback", b"Fatal Python error")
_CHAINS = (
    b"During handling of the above exception, another exception occurred:",
    b"The above exception was the direct cause of the following exception:",
)


class LastWords:
    """What a worker said last."""

    def __init__(self) -> None:
        self.traceback_at: float | None = None
        """When the traceback that is kept began, on the caller's clock; None if there was none."""
        self._traceback: list[bytes] = []
        self._room_bytes = 0
        self._recent: deque[bytes] = deque(maxlen=_NUM_RECENT)
        self._num_left_out = 0
        self._last_text = b""

    def hear(self, line: bytes, now: float) -> None:
        """Take in the next line of stderr, without its end."""
        if line.startswith(_BEGINNINGS):
            self._begin(self._lines() if self._last_text in _CHAINS else [], now)
        elif line and not line[:1].isspace():  # The exception itself: the frames are over.
            self._room_bytes = min(self._room_bytes, _MESSAGE_BYTES)
        self._keep(line)
        self._last_text = line.strip() or self._last_text

    def text(self) -> str:
        """The last traceback and what came after it, or the last lines."""
        return b"\n".join(self._lines()).decode(errors="replace").strip("\n")

    def _lines(self) -> list[bytes]:
        left_out = [b"... %d lines ..." % self._num_left_out] if self._num_left_out else []
        return [*self._traceback, *left_out, *self._recent]

    def _keep(self, line: bytes) -> None:
        if self._room_bytes > len(line) and not self._recent:
            self._traceback.append(line)
            self._room_bytes -= len(line) + 1
            return
        self._num_left_out += len(self._recent) == _NUM_RECENT
        self._recent.append(line[:_RECENT_BYTES])

    def _begin(self, chain: list[bytes], now: float) -> None:
        """A traceback begins, alone or as the next of a chain; what was kept of earlier ones can go."""
        if not chain:
            self.traceback_at = now
        self._traceback = chain
        self._recent.clear()
        self._num_left_out = 0
        self._room_bytes = _TRACEBACK_BYTES
