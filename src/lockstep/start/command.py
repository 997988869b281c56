"""One script or module on every worker of this host: what `lockstep run` does, without its words.

Phases: start; watch and relay; end; tell who failed first.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from lockstep import limits
from lockstep.comm.etcd import Deposed
from lockstep.elastic.coordinator import PREFIX as DECISIONS
from lockstep.environment import WATCH, shows_all_frames
from lockstep.errors import LaunchError, UsageError
from lockstep.start import host
from lockstep.start.control import Control
from lockstep.start.elastic import LOOK_S, Elastic, ElasticWorkers
from lockstep.start.elastic_hosts import ElasticRun, HostWorkers, Place
from lockstep.start.failure import Failure, StderrTail, error_line, first, fold, how, lost_ranks
from lockstep.start.hosts import FAREWELL_S, HostOptions, Launchers, Others
from lockstep.start.process import Warden, Worker
from lockstep.start.relay import Output, OutputStream, Relay
from lockstep.start.run_keys import PREFIX, Alone
from lockstep.start.supervisor import NOTICE, Rendezvous, Supervisor, collected_signals, resizing_signals

_READ_S = 0.5
"""How long the rest of an ended worker's output may take to be read."""
_PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
_TEARDOWN = timedelta(seconds=10)
"""A traceback that is older than this when its worker ends was not the reason, but something that was caught."""


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How a run ended."""

    size: int
    """How many workers there were."""
    failure: Failure | None = None
    """The first failure, if any worker failed."""
    signum: int = 0
    """The signal that ended the launcher before the workers ended, or 0."""
    has_met: bool = True
    """Whether the workers have met, where all ended well."""
    log: Path | None = None
    """The folder with all that the failed workers said last, where the run is recorded in one."""
    lost: str = ""
    """Why the workers of this host were ended, where that was not one of theirs: another host, or the way to it."""

    is_relayed: bool = False
    """Whether the output was relayed even of a single worker."""

    @property
    def status(self) -> int:
        """The exit code of the whole: 0, that of the first failure, or 128 plus the signal."""
        if self.signum:
            return 128 + self.signum
        return self.failure.status if self.failure else bool(self.lost)


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
    output: Output = Output(),  # noqa: B008 (frozen)
    notice: timedelta = NOTICE,
    watch: str | None = None,
    elastic: Elastic | None = None,
    name: str | None = None,
    hosts: HostOptions | None = None,
) -> RunOutcome:
    """Run `command` as `workers` workers and return when all have ended; called in the main thread.

    output: what is shown of the workers' output, and where it is kept.
    watch: the folder in which the run is recorded, if it is to be watched.
    elastic: have the run outlive its workers, see `start/elastic.py`.
    name: under which `lockstep resize` finds an elastic run of one host.
    hosts: this is one of several hosts, each of which runs this, see `start/hosts.py`; `workers` is their number here.

    With several workers, their output is relayed line by line. A single one has this process's own terminal, so that
    progress bars, colours and debuggers work as without a launcher.
    """
    size = host.num_workers(workers)
    num_threads = host.num_threads(threads, size, os.environ)
    host.refuse_nesting(os.environ)
    limits.raise_file_handles()
    host.require_file_handles(size)
    output.open_logs()
    if elastic is not None:
        elastic.check(size if hosts is None else None)
    asked: dict[str, object] = {"hosts": hosts.hosts, "elastic": elastic is not None} if hosts is not None else {}
    try:
        with collected_signals() as signals, contextlib.ExitStack() as stack:
            launchers = None
            if hosts is not None:
                asked |= {} if elastic is None else elastic.facts()
                launchers = stack.enter_context(contextlib.closing(Launchers(hosts, size, asked, lambda: not signals)))
            if elastic is not None:
                if launchers is None:
                    return _run_elastic(command, size, num_threads, output, watch, elastic, name, signals)
                return _run_elastic_on_hosts(command, size, num_threads, output, watch, elastic, signals, launchers)
            return _run_fixed(command, size, num_threads, output, notice, watch, signals, launchers)
    except Alone as alone:
        return RunOutcome(size, None, signals[0] if signals else 0, lost=str(alone))


def _run_fixed(
    command: Sequence[str],
    size: int,
    num_threads: int | None,
    output: Output,
    notice: timedelta,
    watch: str | None,
    signals: Sequence[int],
    launchers: Launchers | None,
) -> RunOutcome:
    """As `run`, with workers that stay the same."""
    first_rank = launchers.first_rank if launchers is not None else 0
    total = launchers.num_workers if launchers is not None else size
    tails = [StderrTail() for _ in range(size)]
    with (
        contextlib.closing(Rendezvous(launchers)) as rendezvous,
        contextlib.closing(Warden()) as warden,
    ):
        supervisor = Supervisor(
            total, num_threads, rendezvous, warden, lambda: len(signals) > 1, first_rank=first_rank, local_size=size
        )
        # A single worker has the terminal to itself.
        has_pipes = total > 1 or launchers is not None or not output.is_plain
        pipes = _PIPES if has_pipes else {}
        if launchers is not None:
            launchers.start(lambda: _kill(supervisor))
        processes = [
            supervisor.execute(command, _environ(supervisor.variables(rank), watch), **pipes) for rank in range(size)
        ]
        relay = Relay(_streams(processes, tails, output, first_rank) if has_pipes else [])
        relay.start()
        others = Others(launchers, rendezvous) if launchers is not None else None
        signum = _watch(supervisor, signals, relay, tails, notice, others)
        relay.finish()
        has_met, hang_at_exit = rendezvous.has_met, _hang_at_exit(supervisor, tails)
        failures = here = _failures(supervisor.workers, tails, hang_at_exit)
        lost = ""
        if others is not None:
            failures, lost = others.leave(here, signum)
    failure = first(failures)
    _show_held(relay, failure, {each.rank for each in failures})
    if failure is None:
        return RunOutcome(total, None, signum, has_met=has_met, lost=lost, is_relayed=has_pipes)
    log = _keep_stderr(watch, here) if watch is not None and here else None
    culprit = _culprit(failure, supervisor.workers) if failure.is_consequence else ""
    shown = failure.stderr if shows_all_frames(os.environ) else fold(failure.stderr)
    return RunOutcome(
        total, replace(failure, stderr=shown, culprit=culprit), signum, log=log, lost=lost, is_relayed=has_pipes
    )


def _kill(supervisor: Supervisor) -> None:
    """Kill the workers, without waiting for their ends."""
    for worker in list(supervisor.workers):
        worker.tell(signal.SIGKILL)


def _run_elastic(
    command: Sequence[str],
    size: int,
    num_threads: int | None,
    output: Output,
    watch: str | None,
    options: Elastic,
    name: str | None,
    signals: Sequence[int],
) -> RunOutcome:
    """As `run`, but workers come and go: the first failure is that of a worker after which no other could go on."""
    tails: list[StderrTail] = []
    relay = Relay([], may_grow=True)
    with (
        resizing_signals() as changes,
        contextlib.closing(Rendezvous()) as rendezvous,
        contextlib.closing(Warden()) as warden,
    ):
        supervisor = Supervisor(
            (options.max or size) + options.spares, num_threads, rendezvous, warden, lambda: len(signals) > 1
        )

        def start(slot: int) -> None:
            environ = _environ(supervisor.variables(slot, member=len(supervisor.workers)), watch)
            process = supervisor.execute(command, environ, **_PIPES)
            member = len(tails)
            tails.append(StderrTail())
            relay.add(output.streams(member, process, tails[member], holds=not shows_all_frames(os.environ)))
            processes.append(process)

        def last_words(member: int) -> str:
            stream = next(each for each in relay.streams if each.tail is tails[member])
            give_up = time.monotonic() + _READ_S
            while not stream.has_ended and time.monotonic() < give_up:
                time.sleep(_READ_S / 100)
            return tails[member].text() if tails[member].traceback_at is not None else ""

        processes: list[subprocess.Popen[bytes]] = []
        relay.start()
        control = Control(name, lambda wanted: workers.resize(wanted))
        folder = Path(watch) if watch is not None else None
        workers = ElasticWorkers(supervisor, options, start, size, last_words, folder)
        signum = 0
        try:
            while workers.attend():
                if signals or relay.is_unread:
                    signum = signals[0] if signals else signal.SIGPIPE
                    supervisor.end(signal.SIGTERM if signum == signal.SIGPIPE else signum)
                    break
                if changes:
                    with contextlib.suppress(UsageError):  # A signal has nobody to tell that it is beyond the limits.
                        workers.resize(workers.wanted + changes.pop(0))
                control.attend()
                workers.wait(LOOK_S, control.sockets)
        finally:
            supervisor.kill()
            workers.close()
            control.close()
        relay.finish()
        members = workers.culprits or workers.last_members
    if workers.has_finished and not any(supervisor.workers[member].has_failed for member in members):
        return RunOutcome(size, None, signum)
    failures = _failures(supervisor.workers, tails, hang_at_exit=False)
    failure = first([each for each in failures if each.rank in members] or failures)
    _show_held(relay, failure, {each.rank for each in failures})
    if failure is None:
        return RunOutcome(size, None, signum)
    shown = failure.stderr if shows_all_frames(os.environ) else fold(failure.stderr)
    return RunOutcome(size, replace(failure, stderr=shown), signum)


def _run_elastic_on_hosts(
    command: Sequence[str],
    size: int,
    num_threads: int | None,
    output: Output,
    watch: str | None,
    options: Elastic,
    signals: Sequence[int],
    launchers: Launchers,
) -> RunOutcome:
    """As `_run_elastic`, on one of several hosts."""
    tails: dict[int, StderrTail] = {}
    relay = Relay([], may_grow=True)
    with (
        resizing_signals() as changes,
        contextlib.closing(Rendezvous(launchers)) as rendezvous,
        contextlib.closing(Warden()) as warden,
    ):
        place: Place = launchers
        if launchers.number < launchers.options.hosts:
            options.check(launchers.num_workers)
        limits = 0, options.max or size
        total = sum(card["workers"] for card in place.cards.values())
        supervisor = Supervisor(
            options.max or total,
            num_threads,
            rendezvous,
            warden,
            lambda: len(signals) > 1,
            first_rank=place.first_rank,
            local_size=size,
        )

        def start(slot: int, member: int) -> None:
            environ = _environ(supervisor.variables(slot, member=member), watch)
            process = supervisor.execute(command, environ, rank=member, **_PIPES)
            tails[member] = StderrTail()
            relay.add(output.streams(member, process, tails[member], holds=not shows_all_frames(os.environ)))
            processes.append(process)

        def failure_of(worker: Worker) -> Failure:
            tail = tails[worker.rank]
            return Failure(worker.rank, _time_failed(worker, tail), worker.code or 0, tail.text())

        processes: list[subprocess.Popen[bytes]] = []
        relay.start()
        workers = HostWorkers(supervisor, place, start, failure_of, size, limits)
        launchers.start(lambda: _kill(supervisor))
        signum = 0
        lost = ""
        try:
            signum = _attend_elastic(workers, place, rendezvous, options, signals, changes, relay, watch)
        except Alone as alone:
            lost = str(alone)
        finally:
            supervisor.kill()
        if not lost:
            with contextlib.suppress(Alone):
                _leave_elastic(workers, place, signum)
        relay.finish()
        keys, away = place.keys, place.number
        over = json.loads(keys.get(f"{PREFIX}over") or "{}")
        ended = {int(member): json.loads(text) for member, text in keys.under(f"{PREFIX}ended/").items()}
        hosts = {int(member): json.loads(text)["host"] for member, text in keys.under(f"{PREFIX}started/").items()}
    if over.get("finished"):
        return RunOutcome(total, None, signum)
    here = _failures(supervisor.workers, [tails[worker.rank] for worker in supervisor.workers], hang_at_exit=False)
    here = [replace(each, host=away) for each in here]
    now = time.time() - time.monotonic()
    others = [
        Failure(member, facts["time"] - now, facts["code"], facts["stderr"], host=hosts.get(member))
        for member, facts in ended.items()
        if member not in tails and facts["code"] and not facts["told"]
    ]
    failures = here + others
    failure = first([each for each in failures if each.rank in over.get("members", ())] or failures)
    _show_held(relay, failure, {each.rank for each in failures})
    if failure is None or lost:
        return RunOutcome(total, None, signum, lost=lost or over.get("why", ""))
    shown = failure.stderr if shows_all_frames(os.environ) else fold(failure.stderr)
    return RunOutcome(total, replace(failure, stderr=shown), signum, lost=over.get("why", ""), is_relayed=True)


def _attend_elastic(
    workers: HostWorkers,
    place: Place,
    rendezvous: Rendezvous,
    options: Elastic,
    signals: Sequence[int],
    changes: list[int],
    relay: Relay,
    watch: str | None,
) -> int:
    """Return when the run is over, or this launcher is to end: then the number of the signal."""
    run: ElasticRun | None = None
    begun = 0
    keys = place.keys
    while True:
        term = place.term  # First: what is seen then is all that others have decided before.
        keys.prefixes = (PREFIX, DECISIONS) if term else (PREFIX,)
        keys.refresh()
        if place.lost:
            raise Alone(place.lost)
        rendezvous.attend([])
        workers.attend()
        try:
            with place.deciding(term):
                if not term:
                    run = None
                    place.silent()  # So that it is known when this launcher comes to decide.
                elif run is None or begun != term:
                    run, begun = ElasticRun(place, options, Path(watch) if watch is not None else None), term
                else:
                    run.attend()
        except Deposed:
            run = None
        if keys.get(f"{PREFIX}over") is not None:
            return 0
        if signals or relay.is_unread:
            signum = signals[0] if signals else signal.SIGPIPE
            if run is not None and not place.is_replaceable:
                run.end(f"host {place.number} was ended by {signal.Signals(signum).name}.")
            keys.set(f"{PREFIX}leaving/{place.number}", "1")
            workers.supervisor.end(signal.SIGTERM if signum == signal.SIGPIPE else signum)
            return signum
        while changes:
            workers.resize(changes.pop(0))
        workers.wait(place.news_fd, LOOK_S)


def _leave_elastic(workers: HostWorkers, place: Place, signum: int) -> None:
    """Say the last things, and wait until the others have heard them."""
    workers.tell_ends()
    place.leave({"signal": signum}, FAREWELL_S if place.keys.get(f"{PREFIX}over") is not None else 0.0)
    place.keys.refresh()


def _watch(
    supervisor: Supervisor,
    signals: Sequence[int],
    relay: Relay,
    tails: Sequence[StderrTail],
    notice: timedelta,
    others: Others | None,
) -> int:
    """Return when all workers have ended; if it was by a signal to this process, its number, else 0.

    That nobody reads the output any more counts as the signal that Python ignores, SIGPIPE.
    """

    def attend(seconds: float) -> bool:
        if signals or relay.is_unread:
            return False
        time.sleep(seconds)
        return True

    def is_over() -> bool:
        has_failed = any(worker.has_failed for worker in supervisor.workers) or _hang_at_exit(supervisor, tails)
        if others is not None:
            return others.attend(has_failed)
        return has_failed

    signum = 0
    try:
        if not supervisor.watch(attend, is_over, notice):
            signum = signals[0] if signals else signal.SIGPIPE
            if others is not None:
                others.attend(has_failed=True)
            supervisor.end(signal.SIGTERM if signum == signal.SIGPIPE else signum)
    finally:
        supervisor.kill()
    return signum


def _hang_at_exit(supervisor: Supervisor, tails: Sequence[StderrTail]) -> bool:
    """Whether every worker has raised, and shown its traceback: those that have not ended run code of their exit.

    Nobody may ever see that end. One that has a traceback and has left its world without an error may go on, as may
    those whose peers go on: a traceback that was caught ends nothing.
    """
    return all(tail.traceback_at is not None for tail in tails) and supervisor.rendezvous.have_all_raised(
        supervisor.size
    )


def _show_held(relay: Relay, first_failure: Failure | None, failed: set[int]) -> None:
    """Show the tracebacks that workers ended with: of those who failed later a line, of the first it comes last."""
    for stream in relay.streams:
        text = b"\n".join(stream.held).decode(errors="replace")
        if text and (first_failure is None or stream.rank != first_failure.rank):
            relay.write(stream, error_line(text) if stream.rank in failed else fold(text))


def _keep_stderr(watch: str, failures: list[Failure]) -> Path | None:
    """Write the end of every failed worker's stderr into the folder of the run; None if that cannot be written."""
    folder = Path(watch) / "errors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for failure in failures:
            (folder / f"worker-{failure.rank}.txt").write_text(failure.stderr + "\n")
    except OSError:
        return None
    return folder


def _streams(
    processes: Sequence[subprocess.Popen[bytes]], tails: Sequence[StderrTail], output: Output, first_rank: int
) -> list[OutputStream]:
    holds = not shows_all_frames(os.environ)
    return [
        stream
        for rank, (process, tail) in enumerate(zip(processes, tails, strict=True), first_rank)
        for stream in output.streams(rank, process, tail, holds=holds)
    ]


def _failures(workers: Sequence[Worker], tails: Sequence[StderrTail], hang_at_exit: bool) -> list[Failure]:
    failures = []
    for worker, tail in zip(workers, tails, strict=True):
        if worker.has_failed and worker.code is not None:
            failures.append(Failure(worker.rank, _time_failed(worker, tail), worker.code, tail.text()))
        elif hang_at_exit or (_was_failing(worker, tail) and any(other.has_failed for other in workers)):
            failures.append(Failure(worker.rank, tail.traceback_at or 0.0, 1, tail.text(), was_told_to_end=True))
    return failures


def _was_failing(worker: Worker, tail: StderrTail) -> bool:
    """Whether a worker that was told to end had shown a traceback shortly before."""
    if worker.told_at is None or tail.traceback_at is None:
        return False
    return 0 <= worker.told_at - tail.traceback_at < _TEARDOWN.total_seconds()


def _culprit(failure: Failure, workers: Sequence[Worker]) -> str:
    """The worker whose loss a failure names, and what became of it; empty if that has failed itself, or is unknown."""
    for worker in workers:
        if worker.rank in lost_ranks(failure.stderr) and worker.rank != failure.rank and not worker.has_failed:
            if not worker.was_told_to_end:
                return f"worker {worker.rank}, which had finished ({how(worker.code or 0)})"
            state = "was stopped" if worker.was_stopped else "did not come"
            return f"worker {worker.rank}, which {state} and was ended with the others"
    return ""


def _time_failed(worker: Worker, tail: StderrTail) -> float:
    """When a worker failed: its end is seen late, when its peers may have failed of it; its traceback is older."""
    began = tail.traceback_at
    was_killed = worker.code is not None and worker.code < 0
    if began is None or was_killed or worker.ended_at - began > _TEARDOWN.total_seconds():
        return worker.ended_at
    return began


def _environ(added: Mapping[str, str], watch: str | None) -> dict[str, str]:
    """A worker's whole environment. Its output is not to linger in buffers: what a killed one said last counts."""
    watched = {} if watch is None else {WATCH: str(Path(watch).resolve())}
    return {"PYTHONUNBUFFERED": "1", **os.environ, **added, **watched}
