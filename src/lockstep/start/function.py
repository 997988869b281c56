"""One function on every worker of this host: `lockstep.launch`, for scripts and notebooks.

Phases: choose how to start; start; watch and receive; end; return the results or raise the first failure.
"""

import contextlib
import functools
import multiprocessing.connection
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from lockstep import environment
from lockstep.environment import LOOPBACK, shows_all_frames
from lockstep.errors import LaunchError, UsageError, WorkerFailed, WorkerLost
from lockstep.start import host
from lockstep.start.call import (
    ForkStarter,
    FreshStarter,
    FunctionCall,
    Inbox,
    NotImportable,
    Raised,
    ReportKind,
    is_loading,
)
from lockstep.start.cell import CellOutput, open_cell
from lockstep.start.elastic import LOOK_S, Elastic, ElasticWorkers
from lockstep.start.failure import Failure, first, fold
from lockstep.start.process import Warden, Worker
from lockstep.start.supervisor import NOTICE, Rendezvous, Supervisor

Result = TypeVar("Result")


def launch(
    fn: Callable[..., Result],
    workers: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    threads: int | None = None,
    timeout: timedelta | float | None = None,
    elastic: bool | Elastic = False,
) -> list[Result]:
    """Run `fn(*args, **kwargs)` on `workers` workers of this host; returns their results, by rank.

    workers: defaults to one per GPU, or one per core where there is no GPU.
    threads: compute threads per worker; by default the cores are shared out, unless OMP_NUM_THREADS is set.
    timeout: seconds, or a timedelta, after which workers that have not returned are ended and WorkerLost is raised.
    elastic: True, or `lockstep.Elastic(min=2, max=8)`, for training with `lockstep.Trainer` that outlives its workers.

    Inside `fn`, `lockstep.join()` gives the world of these workers. If one fails, the others are ended within seconds
    and its exception is raised here as itself, the worker's traceback in a note; WorkerFailed if it cannot be brought
    over; WorkerLost, naming it, if a worker was killed. No worker outlives the call, nor this process.

    A function that can be imported runs in fresh interpreters; if it is defined in the script that calls `launch`,
    that call must stand under `if __name__ == "__main__":`. What a notebook defines runs in fresh interpreters too,
    where cloudpickle is installed. Any other (lambda, closure, unpicklable arguments) runs in forks of this process,
    with one compute thread each, and cannot use CUDA if this process has. Workers write to this process's stdout; in a
    notebook, into the cell, by worker. Results travel as pickles: return tensors of the CPU, not of a GPU.

    An elastic run goes on without a worker that fails, is killed or falls silent, from the step in flight, and starts
    another in its place, which calls `fn` from its beginning and is let in at its trainer's next step. The results are
    those of the workers that are there at the end, by their rank then: fewer than `workers` if some had no replacement
    yet. Where none is left, or `fn` trains without a Trainer, all call `fn` anew: have it load its checkpoint. What
    ended the run is raised: when `max_restarts` are used up, when the same call fails on two workers one after the
    other, when all workers raise, when the same error has ended three, and when one is lost after others have returned.
    See docs/elastic.md.
    """
    if is_loading():
        raise LaunchError(
            "lockstep.launch was called while a worker was importing the script that calls it; each worker would start "
            'workers. Put the call under `if __name__ == "__main__":`.'
        )
    host.refuse_nesting(os.environ)
    size = host.num_workers(workers)
    host.require_file_handles(size)
    call, deadline = checked_call(fn, args, kwargs), deadline_after(timeout)
    num_threads = host.num_threads(threads, size, os.environ)
    outcome = run_call(_starter(call, threads), size, num_threads, deadline, limits_of(elastic, size))
    if isinstance(outcome, BaseException):
        raise outcome from None  # Here, so that of our own frames the traceback shows this one.
    return outcome


class Starter(Protocol):
    """Starts the processes of workers that run one function."""

    def start(
        self,
        rank: int,
        outbox_fd: int,
        supervisor: Supervisor,
        variables: Mapping[str, str],
        output: Mapping[str, int] | None = None,
    ) -> None:
        """Start the next worker, which reports to `outbox_fd`: it becomes the supervisor's last one.

        output: where what it prints goes, if not to this process's own.
        """

    def close(self) -> None:
        """Let go of what is no worker's; all have ended."""


def run_call(
    starter: Starter,
    size: int,
    num_threads: int | None,
    deadline: float,
    limits: Elastic | None,
    address: str = LOOPBACK,
) -> list[Any] | BaseException:
    """Start, watch, end; then the results, or the first failure as what is to be raised.

    deadline: on the monotonic clock. limits: of an elastic run. address: of this host, as the workers reach it.
    """
    if limits is not None:
        return _run_elastic(starter, size, num_threads, deadline, limits, address)
    return _run(starter, size, num_threads, deadline, address)


def checked_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> FunctionCall:
    """The call; UsageError for what is none."""
    if not callable(fn):
        raise UsageError(f"launch({fn!r}): the first argument must be a function that every worker calls.")
    if not isinstance(args, (tuple, list)):
        raise UsageError(f"launch(args={args!r}): must be a tuple. For a single argument: args=(value,).")
    return functools.partial(fn, *args, **(kwargs or {}))


def limits_of(elastic: bool | Elastic, size: int) -> Elastic | None:
    """The limits that `elastic` stands for, which `size` workers must fit; None where it is False."""
    if elastic is False:
        return None
    if not isinstance(elastic, bool | Elastic):
        raise UsageError(f"launch(elastic={elastic!r}): must be True, False or a lockstep.Elastic.")
    limits = elastic if isinstance(elastic, Elastic) else Elastic()
    limits.check(size)
    return limits


def deadline_after(timeout: timedelta | float | None) -> float:
    """When `timeout` is over, on the monotonic clock."""
    if timeout is None:
        return float("inf")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not seconds > 0:  # Nor may it be not a number.
        raise UsageError(f"launch(timeout={timeout!r}): a deadline must lie in the future.")
    return time.monotonic() + seconds


def _starter(call: FunctionCall, threads: int | None) -> FreshStarter | ForkStarter:
    try:
        return FreshStarter(call)
    except NotImportable as reason:
        return ForkStarter(call, threads, str(reason))


def _run(
    starter: Starter, size: int, num_threads: int | None, deadline: float, address: str
) -> list[Any] | BaseException:
    """As `run_call`, with workers that stay the same."""
    inboxes: list[Inbox] = []
    cell = open_cell() if isinstance(starter, FreshStarter) else None

    def attend(seconds: float) -> bool:
        written = cell.fds if cell is not None else []
        multiprocessing.connection.wait([*(inbox.fd for inbox in inboxes if inbox.is_open), *written], seconds)
        for inbox in inboxes:
            inbox.receive()
        if cell is not None:
            cell.receive()
        if time.monotonic() > deadline:
            raise _late(inboxes)
        return True

    with (
        contextlib.closing(starter),
        contextlib.closing(Rendezvous(address=address)) as rendezvous,
        contextlib.closing(Warden()) as warden,
    ):
        supervisor = Supervisor(size, num_threads, rendezvous, warden)
        try:
            for rank in range(size):
                inboxes.append(_start(starter, rank, supervisor, supervisor.variables(rank), cell))
            supervisor.watch(attend, lambda: _is_over(supervisor.workers, inboxes))
        except BaseException as error:
            supervisor.end(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        finally:
            supervisor.kill()
            for inbox in inboxes:
                inbox.receive()
                inbox.close()
            if cell is not None:
                cell.close()
    failure = first(_failures(supervisor.workers, inboxes))
    return [_result(inbox) for inbox in inboxes] if failure is None else _error(failure, inboxes[failure.rank])


def _start(
    starter: Starter,
    number: int,
    supervisor: Supervisor,
    variables: Mapping[str, str],
    cell: CellOutput | None = None,
) -> Inbox:
    """Start the next worker; returns where its report comes in."""
    inbox_fd, outbox_fd = os.pipe()
    inbox = Inbox(number, inbox_fd)
    try:
        if cell is None:
            starter.start(number, outbox_fd, supervisor, variables)
        else:
            with cell.of_worker(number) as output:
                starter.start(number, outbox_fd, supervisor, {**variables, environment.CELL: "1"}, output)
    finally:
        os.close(outbox_fd)
    return inbox


def _run_elastic(
    starter: Starter, size: int, num_threads: int | None, deadline: float, limits: Elastic, address: str
) -> list[Any] | BaseException:
    """As `_run`, but workers come and go; results and failures are those of the last generation's members."""
    inboxes: list[Inbox] = []

    def start(slot: int) -> None:
        member = len(inboxes)
        inboxes.append(_start(starter, member, supervisor, supervisor.variables(slot, member=member)))

    def last_words(member: int) -> str:
        inboxes[member].receive()
        return inboxes[member].open_report().trace if inboxes[member].kind is ReportKind.RAISED else ""

    with (
        contextlib.closing(starter),
        contextlib.closing(Rendezvous(address=address)) as rendezvous,
        contextlib.closing(Warden()) as warden,
    ):
        supervisor = Supervisor(limits.max or size, num_threads, rendezvous, warden)
        give_up = float("inf")
        try:
            with contextlib.closing(ElasticWorkers(supervisor, limits, start, size, last_words)) as workers:
                while workers.attend():
                    workers.wait(LOOK_S)
                    for inbox in inboxes:
                        inbox.receive()
                    if time.monotonic() > deadline:
                        raise _late([inboxes[worker.rank] for worker in workers.running])
                    if give_up == float("inf") and _have_returned(workers, inboxes):
                        give_up = time.monotonic() + NOTICE.total_seconds()
                    if time.monotonic() > give_up:
                        break  # What runs at the exit of one does not end.
        except BaseException as error:
            supervisor.end(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            raise
        finally:
            supervisor.kill()
            for inbox in inboxes:
                inbox.receive()
                inbox.close()
    members = workers.culprits or workers.last_members
    failure = first(each for each in _failures(supervisor.workers, inboxes) if each.rank in members)
    if failure is not None:
        return _error(failure, inboxes[failure.rank])
    return [_result(inboxes[member]) for member in members if inboxes[member].is_complete]


def _have_returned(workers: ElasticWorkers, inboxes: Sequence[Inbox]) -> bool:
    members = workers.coordinator.members
    return bool(members) and all(inboxes[member].kind is ReportKind.RETURNED for member in members)


def _is_over(workers: Sequence[Worker], inboxes: Sequence[Inbox]) -> bool:
    """Whether somebody has failed, or ended without a report, or everybody has reported a result."""
    kinds = [inbox.kind for inbox in inboxes]
    has_no_report = any(worker.code is not None and kind is None for worker, kind in zip(workers, kinds, strict=True))
    return has_no_report or any(kind not in (None, ReportKind.RETURNED) for kind in kinds) or None not in kinds


def _failures(workers: Sequence[Worker], inboxes: Sequence[Inbox]) -> list[Failure]:
    failures = []
    for worker, inbox in zip(workers, inboxes, strict=True):
        if inbox.kind in (ReportKind.RAISED, ReportKind.NOT_LOADED):
            raised: Raised = inbox.open_report()
            failures.append(Failure(worker.rank, inbox.arrived_at, 1, raised.trace))
        elif inbox.kind is None and worker.code is not None and not worker.was_told_to_end:
            failures.append(Failure(worker.rank, worker.ended_at, worker.code))
    return failures


def _result(inbox: Inbox) -> Any:
    try:
        return inbox.open_report()
    except Exception as error:
        raise WorkerFailed(
            f"worker {inbox.rank} returned something that cannot be unpickled here: {error!r}. "
            "Return numbers, strings, tensors, or containers of them."
        ) from error


def _late(inboxes: Sequence[Inbox]) -> WorkerLost:
    late = tuple(inbox.rank for inbox in inboxes if not inbox.is_complete)
    return WorkerLost(
        f"launch: the timeout passed and worker(s) {', '.join(map(str, late))} had not returned; all were ended. "
        "Give launch() a longer timeout, or find out what they wait for.",
        late,
    )


def _error(failure: Failure, inbox: Inbox) -> BaseException:
    """What is raised here for the first failure."""
    rank = failure.rank
    if inbox.kind is ReportKind.RAISED:
        return _original(rank, inbox.open_report())
    if inbox.kind is ReportKind.NOT_LOADED:
        return _not_loaded(rank, inbox.open_report())
    if failure.code < 0:
        return WorkerLost(f"worker {rank} was {failure}. The other workers were ended.", (rank,))
    return WorkerFailed(
        f"worker {rank} ended with {failure} and without a result: something in it ended the process directly. "
        "Its output says more, if anything does."
    )


def _original(rank: int, raised: Raised) -> BaseException:
    """The exception that a worker raised, its traceback there as a note."""
    problem = "it cannot be pickled"
    if raised.pickled is not None:
        try:
            error = pickle.loads(raised.pickled)
            if isinstance(error, BaseException):
                error.add_note(f"Raised by worker {rank}:\n\n{_shown(raised)}")
                return error
            problem = "unpickled, it is no exception"
        except Exception as failed:
            problem = f"it cannot be unpickled: {failed!r}"
    return WorkerFailed(f"worker {rank} raised {raised.summary}\n(not raised as itself: {problem})\n\n{_shown(raised)}")


def _shown(raised: Raised) -> str:
    """A worker's traceback as it is shown: our own frames folded."""
    return raised.trace if shows_all_frames(os.environ) else fold(raised.trace)


def _not_loaded(rank: int, raised: Raised) -> LaunchError:
    """A LaunchError for a function that a fresh interpreter could not load; one that is one already, as itself."""
    original = _original(rank, raised)
    if isinstance(original, LaunchError):
        return original
    error = LaunchError(
        f"worker {rank} could not load the function: {raised.summary}. What workers use must be importable: defined in "
        'a module, or in the script outside of `if __name__ == "__main__":`.'
    )
    error.add_note(f"Raised by worker {rank}:\n\n{_shown(raised)}")
    return error
