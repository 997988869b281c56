"""The workers' output, line by line, on this process's own.

A thread of its own does it, so that an output that nobody reads (a paused pager) holds up the workers' output and
nothing else: they can still be ended, and on time.
"""

import os
import select
import selectors
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

from lockstep.start.last_words import LastWords
from lockstep.start.lines import Lines

_CHUNK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Stream:
    """One pipe from a worker."""

    rank: int
    fd: int
    to_fd: int
    """Where its lines go."""
    last_words: LastWords | None
    """What keeps the end of them, if it is stderr."""
    has_prefix: bool = True
    """Whether the worker's number is put before each of them."""
    lines: Lines = field(default_factory=Lines)

    def take(self, data: bytes) -> bytes:
        """What is to be written now that `data` has arrived; no data means the end of the stream."""
        now = time.monotonic()
        lines = self.lines.feed(data, now) if data else self.lines.end()
        # torch's own mark, which it puts before each line of a traceback once a group is open.
        plain = [line.removeprefix(b"[rank%d]: " % self.rank) for line in lines]
        if self.last_words is not None:
            for line in plain:
                self.last_words.hear(line, now)
        if self.has_prefix:
            lines = [b"[%d] %b" % (self.rank, line) for line in plain]
        return b"".join(line + b"\n" for line in lines)


class Relay(threading.Thread):
    """Passes on whole lines from all streams until all have ended. Also what a worker's own children write."""

    def __init__(self, streams: list[Stream]) -> None:
        super().__init__(name="lockstep-relay", daemon=True)
        self._streams = streams
        self._broken: set[int] = set()

    def run(self) -> None:
        """Read, cut, write."""
        with selectors.DefaultSelector() as selector:
            for stream in self._streams:
                selector.register(stream.fd, selectors.EVENT_READ, stream)
            while selector.get_map():
                for key, _ in selector.select():
                    if not self._pass_on(key.data):
                        selector.unregister(key.fd)

    def finish(self, patience: timedelta = timedelta(seconds=2)) -> None:
        """Wait for the rest of the output; not for ever, since a process that got away may hold a pipe open."""
        self.join(patience.total_seconds())

    def _pass_on(self, stream: Stream) -> bool:
        """Read once and pass on what became whole; False at the end of the stream."""
        data = os.read(stream.fd, _CHUNK_BYTES)
        self._write(stream.to_fd, stream.take(data))
        return bool(data)

    def _write(self, fd: int, text: bytes) -> None:
        """Write all of `text`; once the reader is gone, nothing, and the workers do not notice."""
        while text and fd not in self._broken:
            try:
                text = text[os.write(fd, text) :]
            except BlockingIOError:  # Somebody made our terminal non-blocking.
                select.select([], [fd], [])
            except OSError:
                self._broken.add(fd)
