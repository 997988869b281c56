"""Workers that are forks of this process: for functions that only it has, as in a notebook.

A fork has the memory of its parent but none of its threads. What follows from that is dealt with here: compute threads
(one per worker: measured, a pool of several that the parent has used hangs in the fork), CUDA (cannot be used at all
once the parent has), and a world that the parent has joined (the fork would take it for its own).
"""

import atexit
import contextlib
import multiprocessing.util
import os
import signal
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkProcess

from lockstep.errors import LaunchError
from lockstep.start.call import Call, work
from lockstep.start.meeting import Meeting
from lockstep.start.report import Outbox
from lockstep.start.warden import Warden
from lockstep.start.worker import Worker


class Forked:
    """Starts workers that have the call in memory already."""

    def __init__(self, call: Call, threads: int | None, reason: str) -> None:
        """`reason` says why fresh interpreters will not do; LaunchError if forks will not do either."""
        obstacle = _obstacle(threads)
        if obstacle:
            raise LaunchError(
                f"{call} cannot run in fresh interpreters, since {reason}; and it cannot run in forks of this process, "
                f"since {obstacle}. Change that, or put the function into a module (a .py file) and import it."
            )
        self._call = call
        self._processes: list[ForkProcess] = []

    def start(
        self, rank: int, variables: Mapping[str, str], outbox_fd: int, meeting: Meeting, warden: Warden
    ) -> Worker:
        """Start worker `rank`, which reports to `outbox_fd`."""
        # Not os.fork: multiprocessing also tells itself, and thereby data loaders, that this is another process.
        process = ForkProcess(
            target=_begin,
            args=(self._call, rank, dict(variables), outbox_fd, meeting, warden),
            name=f"lockstep worker {rank}",
        )
        try:
            process.start()
        except OSError as error:
            raise LaunchError(f"worker {rank} could not be forked: {error}.") from error
        self._processes.append(process)
        assert process.pid is not None
        return Worker(rank, process.pid, lambda: process.exitcode, warden)

    def close(self) -> None:
        """Let go of the processes, which have all ended."""
        for process in self._processes:
            with contextlib.suppress(ValueError):  # Not even SIGKILL has ended it.
                process.close()


def _obstacle(threads: int | None) -> str | None:
    if threads is not None and threads > 1:
        return f"a fork can have one compute thread, and threads={threads} was asked for"
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.cuda.is_initialized():
        return "CUDA is in use here already, and no fork can use it then"
    world = sys.modules.get("lockstep.world")
    if torch.distributed.is_initialized() or (world is not None and world.current() is not None):
        return "this process is in a world (`lockstep.join().leave()` ends that), and a fork would take it for its own"
    return None


def _begin(call: Call, rank: int, variables: dict[str, str], outbox_fd: int, meeting: Meeting, warden: Warden) -> None:
    """Be a worker: the first thing that runs in the fork."""
    os.setsid()
    warden.enter()
    meeting.close()
    os.environ.update(variables)
    _forget_parent()
    code = work(lambda: _with_one_thread(call), Outbox(outbox_fd, rank), rank)
    atexit._run_exitfuncs()  # multiprocessing skips them; what the function registered (`world.leave`) is to run.
    sys.exit(code)


def _forget_parent() -> None:
    """Drop what the parent has set up to happen on signals and at its end; it is not to happen here."""
    signal.set_wakeup_fd(-1)  # A notebook's event loop would be woken by our signals.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    atexit._clear()
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]


def _with_one_thread(call: Call) -> Call:
    import torch

    torch.set_num_threads(1)
    return call
