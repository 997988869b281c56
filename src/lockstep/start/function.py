"""One function on every worker of this host: `lockstep.launch`, for scripts and notebooks.

Phases: choose how to start; start; watch and receive; end; return the results or raise the first failure.
"""

import contextlib
import multiprocessing.connection
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from lockstep.errors import LaunchError, UsageError, WorkerFailed, WorkerLost
from lockstep.start import host
from lockstep.start.call import Call
from lockstep.start.failure import Failure, first
from lockstep.start.forked import Forked
from lockstep.start.fresh import Fresh, NotImportable, is_loading
from lockstep.start.meeting import Meeting
from lockstep.start.report import Inbox, Kind, Raised
from lockstep.start.supervisor import Supervisor
from lockstep.start.variables import refuse_nesting, variables
from lockstep.start.warden import Warden
from lockstep.start.worker import Worker

Result = TypeVar("Result")


def launch(
    fn: Callable[..., Result],
    workers: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    threads: int | None = None,
    timeout: timedelta | float | None = None,
) -> list[Result]:
    """Run `fn(*args, **kwargs)` on `workers` workers of this host; returns their results, by rank.

    workers: defaults to one per GPU, or one per core where there is no GPU.
    threads: compute threads per worker; by default the cores are shared out, unless OMP_NUM_THREADS is set.
    timeout: seconds, or a timedelta, after which workers that have not returned are ended and WorkerLost is raised.

    Inside `fn`, `lockstep.join()` gives the world of these workers. If one fails, the others are ended within seconds
    and its exception is raised here as itself, the worker's traceback in a note; WorkerFailed if it cannot be brought
    over; WorkerLost, naming it, if a worker was killed. No worker outlives the call, nor this process.

    A function that can be imported runs in fresh interpreters; if it is defined in the script that calls `launch`,
    that call must stand under `if __name__ == "__main__":`. Any other (notebook, lambda, closure, unpicklable
    arguments) runs in forks of this process, with one compute thread each, and cannot use CUDA if this process has.
    Workers write to this process's stdout. Results travel as pickles: return tensors of the CPU, not of a GPU.
    """
    if is_loading():
        raise LaunchError(
            "lockstep.launch was called while a worker was importing the script that calls it; each worker would start "
            'workers. Put the call under `if __name__ == "__main__":`.'
        )
    refuse_nesting(os.environ)
    size = host.num_workers(workers)
    call = _checked(fn, args, kwargs)
    crew = _Crew(size, _deadline(timeout))
    num_threads = host.num_threads(threads, size, os.environ)
    return crew.run(_starter(call, threads), num_threads)


def _checked(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Call:
    if not callable(fn):
        raise UsageError(f"launch({fn!r}): the first argument must be a function that every worker calls.")
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"launch(args={args!r}): must be a tuple. For a single argument: args=(value,).")
    return Call(fn, tuple(args), dict(kwargs or {}))


def _deadline(timeout: timedelta | float | None) -> float:
    if timeout is None:
        return float("inf")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if seconds <= 0:
        raise UsageError(f"launch(timeout={timeout!r}): a deadline must lie in the future.")
    return time.monotonic() + seconds


def _starter(call: Call, threads: int | None) -> Fresh | Forked:
    try:
        return Fresh(call)
    except NotImportable as reason:
        return Forked(call, threads, str(reason))


class _Crew:
    """The workers of one launch and what they have reported."""

    def __init__(self, size: int, deadline: float) -> None:
        self._size = size
        self._deadline = deadline
        self._workers: list[Worker] = []
        self._inboxes: list[Inbox] = []
        self._reported_at: dict[int, float] = {}

    def run(self, starter: Fresh | Forked, num_threads: int | None) -> list[Any]:
        """Start, watch, end; then the results, or the first failure."""
        with contextlib.closing(starter), Meeting() as meeting, Warden() as warden:
            supervisor = Supervisor(
                self._workers, attend=lambda seconds: self._attend(meeting, seconds), is_over=self._is_over
            )
            try:
                for rank in range(self._size):
                    self._start(starter, rank, num_threads, meeting, warden)
                supervisor.watch()
            except BaseException as error:
                supervisor.end(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
                raise
            finally:
                supervisor.kill()
                self._receive()
                for inbox in self._inboxes:
                    inbox.close()
        failure = first(self._failures())
        if failure is not None:
            self._raise(failure)
        return [self._result(inbox) for inbox in self._inboxes]

    def _start(
        self, starter: Fresh | Forked, rank: int, num_threads: int | None, meeting: Meeting, warden: Warden
    ) -> None:
        added = variables(os.environ, rank=rank, size=self._size, port=meeting.port, num_threads=num_threads)
        inbox_fd, outbox_fd = os.pipe()
        self._inboxes.append(Inbox(rank, inbox_fd))
        try:
            self._workers.append(starter.start(rank, added, outbox_fd, meeting, warden))
        finally:
            os.close(outbox_fd)

    def _attend(self, meeting: Meeting, seconds: float) -> None:
        meeting.attend()
        waiting = [inbox.fd for inbox in self._inboxes if inbox.is_open]
        multiprocessing.connection.wait(waiting, seconds)
        self._receive()
        if time.monotonic() > self._deadline:
            self._raise_late()

    def _receive(self) -> None:
        for inbox in self._inboxes:
            inbox.receive()
            if inbox.is_complete:
                self._reported_at.setdefault(inbox.rank, time.monotonic())

    def _is_over(self) -> bool:
        """Whether somebody has failed, or ended without a word, or everybody has reported a result."""
        kinds = [inbox.kind for inbox in self._inboxes]
        is_silent = any(
            worker.code is not None and kind is None for worker, kind in zip(self._workers, kinds, strict=True)
        )
        return is_silent or any(kind not in (None, Kind.RETURNED) for kind in kinds) or None not in kinds

    def _failures(self) -> list[Failure]:
        failures = []
        for worker, inbox in zip(self._workers, self._inboxes, strict=True):
            if inbox.kind in (Kind.RAISED, Kind.NOT_LOADED):
                raised: Raised = inbox.open_report()
                failures.append(Failure(worker.rank, self._reported_at[worker.rank], 1, raised.trace))
            elif inbox.kind is None and worker.code is not None and not worker.was_told_to_end:
                failures.append(Failure(worker.rank, worker.ended_at, worker.code))
        return failures

    def _raise(self, failure: Failure) -> NoReturn:
        rank = failure.rank
        inbox = self._inboxes[rank]
        if inbox.kind is Kind.RAISED:
            raise _original(rank, inbox.open_report()) from None
        if inbox.kind is Kind.NOT_LOADED:
            raise _not_loaded(rank, inbox.open_report()) from None
        if failure.code < 0:
            raise WorkerLost(f"worker {rank} was {failure}. The other workers were ended.", (rank,))
        raise WorkerFailed(
            f"worker {rank} ended with {failure} and without a result: something in it ended the process directly. "
            "Its output says more, if anything does."
        )

    def _raise_late(self) -> NoReturn:
        late = tuple(inbox.rank for inbox in self._inboxes if not inbox.is_complete)
        raise WorkerLost(
            f"launch: the timeout passed and worker(s) {', '.join(map(str, late))} had not returned; all were ended. "
            "Give launch() a longer timeout, or find out what they wait for.",
            late,
        )

    def _result(self, inbox: Inbox) -> Any:
        try:
            return inbox.open_report()
        except Exception as error:
            raise WorkerFailed(
                f"worker {inbox.rank} returned something that cannot be unpickled here: {error!r}. "
                "Return numbers, strings, tensors, or containers of them."
            ) from error


def _original(rank: int, raised: Raised) -> BaseException:
    """The exception that a worker raised, its traceback there as a note."""
    problem = "it cannot be pickled"
    if raised.pickled is not None:
        try:
            error = pickle.loads(raised.pickled)
            if isinstance(error, BaseException):
                error.add_note(f"Raised by worker {rank}:\n\n{raised.trace}")
                return error
            problem = "unpickled, it is no exception"
        except Exception as failed:
            problem = f"it cannot be unpickled: {failed!r}"
    return WorkerFailed(f"worker {rank} raised {raised.summary}\n(not raised as itself: {problem})\n\n{raised.trace}")


def _not_loaded(rank: int, raised: Raised) -> LaunchError:
    """A LaunchError for a function that a fresh interpreter could not load; one that is one already, as itself."""
    original = _original(rank, raised)
    if isinstance(original, LaunchError):
        return original
    error = LaunchError(
        f"worker {rank} could not load the function: {raised.summary}. What workers use must be importable: defined in "
        'a module, or in the script outside of `if __name__ == "__main__":`.'
    )
    error.add_note(f"Raised by worker {rank}:\n\n{raised.trace}")
    return error
