"""One script or module on every worker of this host: what `lockstep run` does, without its words.

Phases: start; watch and relay; end; tell who failed first.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from lockstep.environment import WATCH
from lockstep.errors import LaunchError
from lockstep.start import host
from lockstep.start.failure import Failure, first
from lockstep.start.last_words import LastWords
from lockstep.start.meeting import Meeting
from lockstep.start.relay import Relay, Stream
from lockstep.start.signals import Signals
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


class _Stopped(Exception):
    """This process was told to end."""


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
    watch: str | None = None,
) -> Outcome:
    """Run `command` as `workers` workers and return when all have ended; called in the main thread.

    watch: the folder in which the run is recorded, if it is to be watched.

    With several workers, their output is relayed line by line. A single one has this process's own terminal, so that
    progress bars, colours and debuggers work as without a launcher.
    """
    size = host.num_workers(workers)
    num_threads = host.num_threads(threads, size, os.environ)
    refuse_nesting(os.environ)
    with Signals() as signals, Meeting() as meeting, Warden() as warden:
        processes = []
        for rank in range(size):
            environ = _environ(rank, size, meeting.port, num_threads, watch)
            processes.append(
                execute(command, environ, warden)
                if size == 1
                else execute(command, environ, warden, stdin=subprocess.DEVNULL, output=subprocess.PIPE)
            )
        crew = [Worker(rank, process.pid, process.poll, warden) for rank, process in enumerate(processes)]
        last_words = [LastWords() for _ in processes]
        relay = Relay(_streams(processes, last_words, prefix))
        relay.start()
        signum = _watch(crew, meeting, signals, notice)
        relay.finish()
    return Outcome(size, first(_failures(crew, last_words)), signum)


def _watch(workers: list[Worker], meeting: Meeting, signals: Signals, notice: timedelta) -> int:
    """Return when all workers have ended; if it was by a signal to this process, its number, else 0."""

    def attend(seconds: float) -> None:
        if signals.received:
            raise _Stopped
        meeting.attend()
        time.sleep(seconds)

    supervisor = Supervisor(
        workers,
        attend=attend,
        is_over=lambda: any(worker.has_failed for worker in workers),
        is_urgent=lambda: signals.came_again,
        notice=notice,
    )
    try:
        supervisor.watch()
    except _Stopped:
        signum = signals.received[0]
        supervisor.end(signal.SIGTERM if signum == signal.SIGPIPE else signum)
        return signum
    finally:
        supervisor.kill()
    return 0


def _streams(processes: list[subprocess.Popen[bytes]], last_words: list[LastWords], prefix: bool) -> list[Stream]:
    streams = []
    for rank, process in enumerate(processes):
        if process.stdout is not None and process.stderr is not None:
            streams.append(Stream(rank, process.stdout.fileno(), 1, None, prefix))
            streams.append(Stream(rank, process.stderr.fileno(), 2, last_words[rank], prefix))
    return streams


def _failures(workers: list[Worker], last_words: list[LastWords]) -> list[Failure]:
    return [
        Failure(worker.rank, _time_failed(worker, words), worker.code, words.text())
        for worker, words in zip(workers, last_words, strict=True)
        if worker.has_failed and worker.code is not None
    ]


def _time_failed(worker: Worker, words: LastWords) -> float:
    """When a worker failed: its end is seen late, when its peers may have failed of it; its traceback is older."""
    began = words.traceback_at
    was_killed = worker.code is not None and worker.code < 0
    if began is None or was_killed or worker.ended_at - began > _TEARDOWN.total_seconds():
        return worker.ended_at
    return began


def _environ(rank: int, size: int, port: int, num_threads: int | None, watch: str | None) -> dict[str, str]:
    """A worker's whole environment. Its output is not to linger in buffers: what a killed one said last counts."""
    added = variables(os.environ, rank=rank, size=size, port=port, num_threads=num_threads)
    if watch is not None:
        added[WATCH] = str(Path(watch).resolve())
    return {"PYTHONUNBUFFERED": "1", **os.environ, **added}
