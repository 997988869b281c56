"""The workers' output, line by line, on this process's own.

A thread of its own does it, so that an output that nobody reads (a paused pager) holds up the workers' output and
nothing else: they can still be ended, and on time.

A traceback is held back for a moment, with what follows it: if the worker ends with it, it is not printed here, but
once, at the end, where it can be told which worker was the first to fail. One that was caught comes that much later.
"""

import os
import select
import selectors
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

from lockstep.errors import LaunchError
from lockstep.start.failure import StderrTail

_CHUNK_BYTES = 1 << 16
HOLD_S = 5.0
"""How long a traceback is held back: as long as the others may go on when one has failed, see `supervisor`."""
_MOST_HELD = 1 << 16
"""How many lines are held back; what writes more than that goes on."""
REDRAW_S = 1.0
LONGEST_BYTES = 1 << 20
"""A line longer than this is passed on in pieces, so that output without line ends cannot fill the memory."""


class LineSplitter:
    """Bytes from a pipe, cut into lines. Pure.

    A progress bar redraws its line with carriage returns and may never end it. Shown as they come, N bars would
    overwrite each other; held back until the line ends, nothing would be seen for hours. So one redrawing per second
    becomes a line of its own, and so does the last one.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._redrawn_at = -REDRAW_S

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
        if now - self._redrawn_at < REDRAW_S:
            return []
        self._redrawn_at = now
        return [drawings[-2]]


def _visible(line: bytes) -> bytes:
    """What a terminal would show of a line in the end."""
    return next((text for text in reversed(line.split(b"\r")) if text), b"")


@dataclass(slots=True)
class OutputStream:
    """One pipe from a worker."""

    rank: int
    fd: int
    to_fd: int
    """Where its lines go."""
    tail: StderrTail | None
    """Keeps the end of them, if it is stderr."""
    has_prefix: bool = True
    """Whether the worker's number is put before each of them."""
    holds: bool = True
    """Whether tracebacks are held back."""
    is_shown: bool = True
    """Whether its lines go there at all."""
    log: BinaryIO | None = None
    """Gets every line too, as it comes and without the worker's number."""
    lines: LineSplitter = field(default_factory=LineSplitter)
    held: list[bytes] = field(default_factory=list)
    """The last traceback and what came after it, while they are held back."""
    has_ended: bool = False
    """Whether all of it has been read."""

    def take(self, data: bytes) -> bytes:
        """What is to be written now that `data` has arrived; no data means the end of the stream."""
        now = time.monotonic()
        ready: list[bytes] = []
        lines = self.lines.feed(data, now) if data else self.lines.end()
        self._keep(lines, is_last=not data)
        for line in lines:
            # torch's own mark, which it puts before each line of a traceback once a group is open.
            plain = line.removeprefix(b"[rank%d]: " % self.rank)
            ready += self._sort(plain if self.has_prefix else line, plain, now)
        return self.format(ready)

    def let_go(self, now: float) -> bytes:
        """What is to be written now of what was held back: all of it once that is long enough ago."""
        tail = self.tail
        if not self.held or (tail and tail.traceback_at and now - tail.traceback_at < HOLD_S):
            return b""
        ready = self.held[:]
        self.held.clear()
        return self.format(ready)

    def format(self, lines: list[bytes]) -> bytes:
        """Lines as they are written."""
        if not self.is_shown:
            return b""
        mark = b"[%d] " % self.rank if self.has_prefix else b""
        return b"".join(mark + line + b"\n" for line in lines)

    def _keep(self, lines: list[bytes], *, is_last: bool) -> None:
        """Write lines to the log; one that cannot be written ends it, and the worker does not notice."""
        if self.log is None:
            return
        try:
            self.log.write(b"".join(line + b"\n" for line in lines))
        except OSError as error:
            print(f"lockstep: the log of worker {self.rank} ends here: {error}", file=sys.stderr, flush=True)
            is_last = True
        if is_last:
            self.log.close()
            self.log = None

    def _sort(self, line: bytes, plain: bytes, now: float) -> list[bytes]:
        """Take in one line, and hold it back if it belongs to a traceback; returns the lines that need not wait."""
        tail = self.tail
        if tail is None:
            return [line]
        before = tail.num_tracebacks
        tail.feed(plain, now)
        begins = tail.num_tracebacks > before
        ready: list[bytes] = []
        if begins or len(self.held) > _MOST_HELD:
            ready, self.held[:] = self.held[:], []
        if self.holds and (begins or self.held):
            self.held.append(line)
            return ready
        return [*ready, line]


@dataclass(frozen=True, slots=True)
class Output:
    """What becomes of the workers' output."""

    prefix: bool = True
    """Whether each line that is shown begins with the worker's number."""
    only: tuple[int, ...] | None = None
    """The workers whose output is shown; all, if None."""
    log_dir: Path | None = None
    """Where each worker's output is kept, in a file of its own."""

    @property
    def is_plain(self) -> bool:
        """Whether a single worker may have the terminal to itself."""
        return self.only is None and self.log_dir is None

    def open_logs(self) -> None:
        """Make the folder; LaunchError if that cannot be."""
        if self.log_dir is not None:
            try:
                self.log_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LaunchError(f"--log-dir {self.log_dir} cannot be made: {error}.") from error

    def streams(
        self, rank: int, process: subprocess.Popen[bytes], tail: StderrTail, *, holds: bool
    ) -> list[OutputStream]:
        """The two of a worker whose output comes through pipes."""
        is_shown = self.only is None or rank in self.only
        streams = []
        for pipe, to_fd, kept in ((process.stdout, 1, None), (process.stderr, 2, tail)):
            assert pipe is not None
            # Both write to the end of one file, line by line; what an earlier run has left there stays.
            log = None if self.log_dir is None else (self.log_dir / f"worker-{rank}.log").open("ab", buffering=0)
            streams.append(OutputStream(rank, pipe.fileno(), to_fd, kept, self.prefix, holds, is_shown, log))
        return streams


class Relay(threading.Thread):
    """Passes on whole lines from all streams until all have ended. Also what a worker's own children write."""

    def __init__(self, streams: list[OutputStream], *, may_grow: bool = False) -> None:
        """`may_grow`: streams are added later, and `finish` says that no more will come."""
        super().__init__(name="lockstep-relay", daemon=True)
        self.streams = streams
        self._new = list(streams)
        self._may_grow = may_grow
        self._broken: set[int] = set()
        self.is_unread = False
        """Whether somebody has stopped reading this process's output: a closed pipe."""

    def run(self) -> None:
        """Read, cut, write."""
        with selectors.DefaultSelector() as selector:
            while self._new or selector.get_map() or self._may_grow:
                while self._new:
                    stream = self._new.pop()
                    selector.register(stream.fd, selectors.EVENT_READ, stream)
                for key, _ in selector.select(HOLD_S / 10):
                    if not self._pass_on(key.data):
                        selector.unregister(key.fd)
                for key in list(selector.get_map().values()):
                    self._write(key.data.to_fd, key.data.let_go(time.monotonic()))

    def finish(self, patience: timedelta = timedelta(seconds=2)) -> None:
        """Wait for the rest of the output; not for ever, since a process that got away may hold a pipe open."""
        self._may_grow = False
        self.join(patience.total_seconds())

    def add(self, streams: list[OutputStream]) -> None:
        """Pass on these too, soon."""
        self.streams += streams
        self._new += streams

    def write(self, stream: OutputStream, text: str) -> None:
        """Write a text as if it came from `stream`; called when all streams have ended."""
        self._write(stream.to_fd, stream.format(text.encode().splitlines()))

    def _pass_on(self, stream: OutputStream) -> bool:
        """Read once and pass on what became whole; False at the end of the stream."""
        data = os.read(stream.fd, _CHUNK_BYTES)
        self._write(stream.to_fd, stream.take(data))
        stream.has_ended = not data
        return bool(data)

    def _write(self, fd: int, text: bytes) -> None:
        """Write all of `text`; once the reader is gone, nothing, and the workers do not notice."""
        while text and fd not in self._broken:
            try:
                text = text[os.write(fd, text) :]
            except BlockingIOError:  # Somebody made our terminal non-blocking.
                select.select([], [fd], [])
            except OSError as error:
                self._broken.add(fd)
                self.is_unread |= isinstance(error, BrokenPipeError)
