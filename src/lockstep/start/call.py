"""A function and its arguments, and what a worker does with them."""

import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

from lockstep.errors import WorkerFailed
from lockstep.start.report import Kind, Outbox


@dataclass(frozen=True, slots=True)
class Call:
    """What every worker is to run."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return getattr(self.fn, "__qualname__", None) or repr(self.fn)


def work(load: Callable[[], Call], outbox: Outbox, rank: int) -> int:
    """Load the call, run it, send its result or exception; returns this process's exit code. In the worker."""
    sys.stdout, sys.stderr = _in_whole_lines(sys.stdout), _in_whole_lines(sys.stderr)
    try:
        call = load()
    except BaseException as error:
        outbox.raised(error, Kind.NOT_LOADED)
        return 1
    try:
        result = call.fn(*call.args, **call.kwargs)
    except SystemExit as left:
        if left.code:
            outbox.raised(_without_own_frame(_as_failure(left, rank)))
            return 1
        result = None
    except BaseException as error:
        outbox.raised(_without_own_frame(error))
        return 1
    outbox.returned(result)
    return 0


def _as_failure(left: SystemExit, rank: int) -> WorkerFailed:
    """`sys.exit` as a failure: raised as itself in the launcher, it would end the user's script or notebook."""
    return WorkerFailed(f"worker {rank} called sys.exit({left.code!r}).").with_traceback(left.__traceback__)


def _without_own_frame(error: BaseException) -> BaseException:
    """`error` with a traceback that begins in the user's function."""
    return error.with_traceback(error.__traceback__.tb_next) if error.__traceback__ else error


def _in_whole_lines(stream: TextIO) -> TextIO:
    """`stream`, made to pass on whole lines: workers share the launcher's output, and pieces would end up anywhere."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(line_buffering=True)
        return stream
    return _WholeLines(stream)


class _WholeLines(io.StringIO):
    """In front of a stream that passes on each piece as it comes, as a notebook's does, in a fork of it."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def write(self, text: str) -> int:
        super().write(text)
        if "\n" in text:
            self.flush()
        return len(text)

    def flush(self) -> None:
        if self.tell():
            self._stream.write(self.getvalue())
            self.seek(0)
            self.truncate()
        self._stream.flush()
