"""What launched workers write, in the cell of a notebook: line by line with the worker's number, and one of progress.

A notebook shows what its own process writes through its own streams, and not what other processes write to the same
file descriptors. So fresh interpreters write into pipes, and the launcher, which waits for them anyway, reads those.
The line of progress (`lockstep.watch`, `Trainer(watch=True)`) stays where it is and is redrawn.
"""

import contextlib
import html
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lockstep.start.relay import LineSplitter

_CHUNK_BYTES = 1 << 16
_PROGRESS = re.compile(r"step \d+  ")
"""How `lockstep.watching.live.describe` begins a line."""


class Progress:
    """The newest line of progress, as a notebook shows it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        facts = "".join(f"<td>{html.escape(fact)}</td>" for fact in self._text.split("  "))
        return f"<table><tr>{facts}</tr></table>"


class CellOutput:
    """The pipes of all workers."""

    def __init__(self, display: Callable[..., Any]) -> None:
        self._display = display
        self._shown: Any = None
        """The progress in the cell, once there is some."""
        self._pipes: dict[int, tuple[int, Any, LineSplitter]] = {}
        """By descriptor: whose it is, where its lines go, and what has not become a line."""

    @property
    def fds(self) -> list[int]:
        """What may be read."""
        return list(self._pipes)

    @contextlib.contextmanager
    def of_worker(self, rank: int) -> Iterator[Mapping[str, int]]:
        """Where the worker that is started in this block is to write."""
        output = {}
        try:
            for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
                ours, output[name] = os.pipe()
                os.set_blocking(ours, False)
                self._pipes[ours] = (rank, stream, LineSplitter())
            yield output
        finally:
            for fd in output.values():
                os.close(fd)

    def receive(self) -> None:
        """Show what has been written, without waiting."""
        for fd, (rank, stream, splitter) in list(self._pipes.items()):
            with contextlib.suppress(BlockingIOError):
                while data := os.read(fd, _CHUNK_BYTES):
                    self._show(rank, stream, splitter.feed(data, time.monotonic()))
                self._end(fd)

    def close(self) -> None:
        """Show what is left. A process that a worker left behind may hold a pipe open: it is not waited for."""
        self.receive()
        for fd in self.fds:
            self._end(fd)

    def _end(self, fd: int) -> None:
        rank, stream, splitter = self._pipes.pop(fd)
        os.close(fd)
        self._show(rank, stream, splitter.end())

    def _show(self, rank: int, stream: Any, lines: list[bytes]) -> None:
        for line in lines:
            text = line.decode(errors="replace")
            if _PROGRESS.match(text):
                self._redraw(Progress(text))
            else:
                print(f"[{rank}] {text}", file=stream, flush=True)

    def _redraw(self, progress: Progress) -> None:
        if self._shown is None:
            self._shown = self._display(progress, display_id=True)
        else:
            self._shown.update(progress)


def open_cell() -> CellOutput | None:
    """The cell that this process writes into; None where it is no notebook's."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython.display import display

    return CellOutput(display)
