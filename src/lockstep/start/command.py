"""One script or module on every worker of this host: what `lockstep run` does, without its words.

Phases: start; watch and relay; end; tell who failed first.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType

from lockstep.errors import LaunchError
from lockstep.start import host
from lockstep.start.failure import Failure, first
from lockstep.start.last_words import LastWords
from lockstep.start.meeting import Meeting
from lockstep.start.relay import Relay, Stream
from lockstep.start.supervisor import NOTICE, Supervisor
from lockstep.start.variables import refuse_nesting, variables
from lockstep.start.warden import Warden
from lockstep.start.worker import Worker, execute

_TEARDOWN = timedelta(seconds=10)
"""A traceback that is older than this when its worker ends was not the reason, but something that was caught."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended."""

    size: int
    """How many workers there were."""
    failure: Failure | None = None
    """The first failure, if any worker failed."""
    signum: int = 0
    """The signal that ended the launcher before the workers ended, or 0."""

    @property
    def status(self) -> int:
        """The exit code of the whole: 0, that of the first failure, or 128 plus the signal."""
        if self.signum:
            return 128 + self.signum
        return self.failure.status if self.failure else 0


class _Stopped(BaseException):
    """This process was told to end. Not an Exception: nobody is to handle it on its way."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def python_command(script: str, args: Sequence[str], *, as_module: bool) -> list[str]:
    """The command line of a worker that runs a script, or a module by its name; a missing script is refused."""
    if as_module:
        return [sys.executable, "-m", script, *args]
    if not Path(script).exists():
        raise LaunchError(f"there is no {script!r} here ({Path.cwd()}).")
    if not Path(script).is_file():
        raise LaunchError(f"{script!r} is not a file. Give a Python script, or a module with -m.")
    return [sys.executable, script, *args]


def run(
    command: Sequence[str],
    *,
    workers: int | None = None,
    threads: int | None = None,
    prefix: bool = True,
    notice: timedelta = NOTICE,
) -> Outcome:
    """Run `command` as `workers` workers and return when all have ended; called in the main thread.

    With several workers, their output is relayed line by line. A single one has this process's own terminal, so that
    progress bars, colours and debuggers work as without a launcher.
    """
    size = host.num_workers(workers)
    num_threads = host.num_threads(threads, size, os.environ)
    refuse_nesting(os.environ)
    try:
        with _signals_raised(), Meeting() as meeting, Warden() as warden:
            processes = []
            for rank in range(size):
                environ = _environ(rank, size, meeting.port, num_threads)
                processes.append(
                    execute(command, environ, warden)
                    if size == 1
                    else execute(command, environ, warden, stdin=subprocess.DEVNULL, output=subprocess.PIPE)
                )
            return _watch(processes, meeting, warden, prefix, notice)
    except _Stopped as stopped:  # A second signal, while the first was being followed.
        return Outcome(size, signum=stopped.signum)


def _watch(
    processes: list[subprocess.Popen[bytes]], meeting: Meeting, warden: Warden, prefix: bool, notice: timedelta
) -> Outcome:
    workers = [Worker(rank, process.pid, process.poll, warden) for rank, process in enumerate(processes)]
    last_words = [LastWords() for _ in processes]
    relay = Relay(_streams(processes, last_words, prefix))
    relay.start()

    def attend(seconds: float) -> None:
        meeting.attend()
        time.sleep(seconds)

    supervisor = Supervisor(workers, attend=attend, notice=notice)
    signum = 0
    try:
        supervisor.watch()
    except _Stopped as stopped:
        signum = stopped.signum
        supervisor.end(signal.SIGTERM if signum == signal.SIGPIPE else signum)
    finally:
        supervisor.kill()
    relay.finish()
    return Outcome(len(workers), first(_failures(workers, last_words)), signum)


def _streams(processes: list[subprocess.Popen[bytes]], last_words: list[LastWords], prefix: bool) -> list[Stream]:
    streams = []
    for rank, process in enumerate(processes):
        if process.stdout is not None and process.stderr is not None:
            streams.append(Stream(rank, process.stdout.fileno(), 1, None, prefix))
            streams.append(Stream(rank, process.stderr.fileno(), 2, last_words[rank], prefix))
    return streams


def _failures(workers: list[Worker], last_words: list[LastWords]) -> list[Failure]:
    failures = []
    for worker, words in zip(workers, last_words, strict=True):
        if worker.has_failed and worker.code is not None:
            began = words.traceback_at
            # Its end is seen after its peers may have failed because of it; its traceback is older than theirs.
            is_cause = began is not None and worker.code > 0 and worker.ended_at - began < _TEARDOWN.total_seconds()
            time_failed = began if is_cause and began is not None else worker.ended_at
            failures.append(Failure(worker.rank, time_failed, worker.code, words.text()))
    return failures


def _environ(rank: int, size: int, port: int, num_threads: int | None) -> dict[str, str]:
    """A worker's whole environment. Its output is not to linger in buffers: what a killed one said last counts."""
    added = variables(os.environ, rank=rank, size=size, port=port, num_threads=num_threads)
    return {"PYTHONUNBUFFERED": "1", **os.environ, **added}


@contextlib.contextmanager
def _signals_raised() -> Iterator[None]:
    """Raise _Stopped in this thread when the process is told to end, or when nobody reads its output any more.

    A signal that is ignored by whoever started us (nohup, a shell's background job) stays ignored; SIGPIPE is always
    taken, since it is Python itself that ignores it.
    """
    handled = [
        signum
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
        if signum == signal.SIGPIPE or signal.getsignal(signum) != signal.SIG_IGN
    ]
    before = {signum: signal.signal(signum, _raise_stopped) for signum in handled}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _raise_stopped(signum: int, frame: FrameType | None) -> None:
    raise _Stopped(signum)
