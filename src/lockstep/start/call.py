"""A function and its arguments, and what a worker does with them."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    # Whole lines: workers share the launcher's output, and pieces of lines would end up anywhere.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
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
