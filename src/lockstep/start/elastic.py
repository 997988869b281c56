"""The workers of an elastic run: who is replaced, when there are enough, and when the run is over.

`ElasticWorkers` stands beside a Supervisor, which starts and ends processes: it looks at their ends, has the
coordinator decide who trains (see `lockstep.elastic.coordinator`), and asks for processes where some are missing. A
process has a *slot*, which says which device it uses and which a replacement takes over, and a number of its own.

    a worker has ended badly           the others go on; a replacement is started in its slot, if restarts are left
    one was asked to leave             the same, but it costs no restart
    one has finished (exit code 0)     the script is at its end: nobody is replaced any more
    all members have ended             the run is over; if none has finished, all start anew from their checkpoint
    one of a script without a trainer  the others are ended, and all start anew from their checkpoint
    the same error has ended several   it is the script's, so the run ends with it
"""

import contextlib
import json
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.elastic.coordinator import PREFIX, Coordinator, Decision, Keys
from lockstep.errors import UsageError
from lockstep.start.failure import error_line, how, is_consequence, was_asked_to_end
from lockstep.start.hosts import say
from lockstep.start.process import Worker
from lockstep.start.supervisor import NOTICE, Supervisor

LOOK_S = 0.05
GENERATIONS = "generations.jsonl"
"""Read by `lockstep report`: see `watching.run_folder`."""
DEFAULT_RESTARTS = 16
_ALIKE = 3
"""So many workers that the same error has ended are the script's own doing."""


@dataclass(frozen=True, slots=True)
class Elastic:
    """How many workers an elastic run may have, and how often one is replaced: see `lockstep.launch`.

    min: with fewer, the workers wait for others.
    max: more are not let in; as many as were started, if None.
    max_restarts: so many workers that end badly are replaced, all together.
    spares: so many more are started, which wait to take the place of one that is lost.
    """

    min: int = 1
    max: int | None = None
    max_restarts: int = DEFAULT_RESTARTS
    spares: int = 0

    def check(self, size: int | None) -> None:
        """Raise UsageError unless `size` workers fit; None where other hosts have some that are not known yet."""
        size = max(self.min, self.max or self.min) if size is None else size
        largest = size if self.max is None else self.max
        if not 1 <= self.min <= size <= largest:
            raise UsageError(
                f"{size} workers, at least {self.min} and at most {largest}: these must be in order, from 1 on."
            )
        if self.max_restarts < 0:
            raise UsageError(f"max_restarts={self.max_restarts}: how often a worker is replaced, 0 or more.")
        if self.spares < 0:
            raise UsageError(f"spares={self.spares}: how many wait to take another's place, 0 or more.")

    def facts(self) -> dict[str, int | None]:
        """What all launchers of a run over several hosts must have been asked for alike."""
        return {"min": self.min, "max": self.max, "max_restarts": self.max_restarts}


class GenerationLog:
    """Says of every generation how it came about, and writes it down in the folder of a watched run."""

    def __init__(self, keys: Keys, folder: Path | None, *, is_new: bool = True) -> None:
        """`is_new`: what the folder has is of an earlier run, and not of a launcher that decided before this one."""
        self._keys, self._folder = keys, folder
        self._decided: list[tuple[float, Decision]] = []
        """Generations that are not written down yet, with the time of each."""
        if folder is not None and is_new:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / GENERATIONS).unlink(missing_ok=True)

    def tell(self, decision: Decision) -> None:
        """A generation has been decided."""
        self._decided.append((time.time(), decision))
        if decision.number == 1:
            return
        changes = [
            f"{word} {', '.join(map(str, members))}"
            for word, members in (("without", decision.lost + decision.left), ("with newcomer", decision.joined))
            if members
        ]
        changed = " and ".join(changes) or f"the same ({decision.why or 'shards move to faster ones'})"
        count = f"{len(decision.members)} worker{'s' * (len(decision.members) > 1)}"
        say(f"generation {decision.number}: {count}, {changed}; decided in {decision.took_s * 1000:.0f} ms.")

    def write(self, *, is_last: bool = False) -> None:
        """Write down the generations that have begun to train, or never will."""
        while self._folder is not None and self._decided:
            at_s, decision = self._decided[0]
            begun = self._keys.get(f"{PREFIX}begun/{decision.number}")
            if begun is None and len(self._decided) == 1 and not is_last:
                return
            self._decided.pop(0)
            facts = {"number": decision.number, "at_s": round(at_s, 3), "members": decision.members}
            facts |= {"lost": decision.lost, "left": decision.left, "joined": decision.joined}
            with contextlib.suppress(OSError), (self._folder / GENERATIONS).open("a") as file:
                file.write(json.dumps(facts | json.loads(begun or "{}")) + "\n")


@dataclass(slots=True)
class ElasticWorkers:
    """The workers of one run. `start(slot)` starts the next process; it is the supervisor's last worker then."""

    supervisor: Supervisor
    options: Elastic
    start: Callable[[int], None]
    wanted: int
    """How many there are to be."""
    last_words: Callable[[int], str]
    """The traceback with which a worker has ended, if it left one."""
    folder: Path | None = None
    """Where the generations are written down, in a watched run."""
    slots: list[int] = field(default_factory=list)
    """Of each process, by member number."""
    restarts: int = 0
    """How many workers have been replaced because they ended badly."""
    has_finished: bool = False
    """Whether a worker has come to the end of its script."""
    coordinator: Coordinator = field(init=False)
    culprits: tuple[int, ...] = ()
    """The workers that the same error has ended, where the run ended for that."""
    _seen: set[int] = field(default_factory=set)
    """Members whose end has been dealt with."""
    _asked: set[int] = field(default_factory=set)
    """Those that were asked to leave from here."""
    _ended_by: dict[int, str] = field(default_factory=dict)
    """The error that ended a worker, if it was one of its own script."""
    _num_free: int = 0
    """How many ends that follow from one that was counted need not be counted themselves."""
    _give_up_at: float | None = None
    """When the others of a script without a trainer are ended, once one has failed."""
    _log: GenerationLog = field(init=False)
    _most: int = field(init=False)
    _news_fd: int = field(init=False)

    def __post_init__(self) -> None:
        keys = self.supervisor.rendezvous.server
        self._news_fd = keys.watch(PREFIX)
        self._most = self.options.max or self.wanted
        self._log = GenerationLog(keys, self.folder)
        self._begin()

    def close(self) -> None:
        """Listen no more; the workers are as they are."""
        self._log.write(is_last=True)
        os.close(self._news_fd)

    @property
    def running(self) -> list[Worker]:
        """Those whose process has not ended."""
        return [worker for worker in self.supervisor.workers if not worker.has_ended()]

    def wait(self, seconds: float, others: Sequence[Any] = ()) -> None:
        """Return when a worker has said something or ended, `others` can be read, or the time is over."""
        ends = []
        for worker in self.running:
            try:
                ends.append(worker.end_fd())
            except OSError:
                seconds = 0.0
        try:
            ready = multiprocessing.connection.wait([self._news_fd, *ends, *others], seconds)
            if self._news_fd in ready:
                os.read(self._news_fd, 1 << 12)
        finally:
            for fd in ends:
                os.close(fd)

    @property
    def last_members(self) -> tuple[int, ...]:
        """The members of the last generation; where none was formed, the last worker of each slot."""
        return self.coordinator.members or tuple(
            sorted({slot: member for member, slot in enumerate(self.slots)}.values())
        )

    @property
    def has_trainer(self) -> bool:
        """Whether the script has made a `lockstep.Trainer`, so that it can go on with fewer or other workers."""
        return self.supervisor.rendezvous.server.get(f"{PREFIX}trainer") is not None

    def attend(self) -> bool:
        """Deal with what has changed; False once the run is over."""
        self.supervisor.rendezvous.attend([])
        running = {worker.rank: worker for worker in self.running}
        for worker in self.supervisor.workers:
            if worker.rank not in running and worker.rank not in self._seen:
                self._seen.add(worker.rank)
                self._see_end(worker)
        if self.culprits:
            return False
        self._log.write()
        silent = self.coordinator.attend({member: member in running for member in running})
        for member in silent:
            if running[member].was_told_to_end:
                continue
            say(f"worker {member} (pid {running[member].pid}) holds the others up without a word: it is ended.")
            self.supervisor.workers[member].tell(9)
            self._count_restart()
        members = self.coordinator.members
        if not self.coordinator.number or any(member in running for member in members):
            if self._give_up_at is not None and time.monotonic() > self._give_up_at:
                for worker in running.values():
                    worker.tell(9)
            self._fill()
            return bool(running)
        for worker in running.values():  # Newcomers that nobody will let in.
            worker.tell(9)
        if self.has_finished or self.coordinator.stopped or self.restarts >= self.options.max_restarts:
            return False
        errors = {self._ended_by.get(member, "") for member in members}
        if len(members) > 1 and len(errors) == 1 and errors != {""}:
            self.culprits = members
            return False
        self._count_restart()
        say(f"no worker is left: all {self.wanted} start anew, from the last checkpoint if the script loads one.")
        self._begin()
        return True

    def resize(self, wanted: int) -> str:
        """Have so many workers from now on; returns what that means. Raises UsageError beyond the limits."""
        if not self.options.min <= wanted <= self._most:
            raise UsageError(
                f"{wanted} workers: this run was started for {self.options.min} to {self._most}. "
                "`lockstep run --min` and `--max` set that."
            )
        said = f"{wanted} workers are wanted, where {self.wanted} were."
        say(said)
        self.wanted = self.coordinator.wanted = wanted
        if self.options.spares:
            self.coordinator.most = wanted
        staying = [worker for worker in self.running if worker.rank not in self._asked]
        members = [worker for worker in staying if not self.options.spares or worker.rank in self.coordinator.members]
        for worker in members[wanted:]:
            self._asked.add(worker.rank)
            worker.ask_to_leave()
        self._fill()
        return said

    def _begin(self) -> None:
        """Start all of them."""
        keys = self.supervisor.rendezvous.server
        keys.forget(PREFIX)
        keys.forget("lockstep/")
        self._give_up_at = None
        most = self.wanted if self.options.spares else self._most
        self.coordinator = Coordinator(keys, self.wanted, self.options.min, most, self._log.tell)
        self._fill()

    def _fill(self) -> None:
        """Start workers until there are enough."""
        if self.has_finished or self.coordinator.stopped or self._give_up_at is not None:
            return
        taken, total = {self.slots[worker.rank] for worker in self.running}, self.wanted + self.options.spares
        for slot in range(total):
            if slot not in taken and len(taken) < total and self.restarts <= self.options.max_restarts:
                taken.add(slot)
                self.slots.append(slot)
                self.start(slot)

    def _see_end(self, worker: Worker) -> None:
        code, member = worker.code or 0, worker.rank
        is_formed, is_member = self.coordinator.number > 0, member in self.coordinator.members
        self.coordinator.tell_end(member, f"ended with {how(code)}" if code else "has finished", is_bad=bool(code))
        if not code and (is_member or not is_formed):
            self.has_finished = True
        if not code or self.has_finished or worker.was_told_to_end or member in self._asked:
            return
        words = self.last_words(member) if code > 0 else ""
        if code > 0 and not is_consequence(words) and not was_asked_to_end(code):
            self._ended_by[member] = error_line(words) or how(code)
            alike = [each for each, error in self._ended_by.items() if error == self._ended_by[member]]
            if len(alike) >= _ALIKE:
                self.culprits = tuple(alike)
                say(f"the same error has ended {len(alike)} workers, so the run ends with it: {error_line(words)}")
                return
        error = f" ({error_line(words)})" if words else ""
        said = f"worker {member} (pid {worker.pid}) has ended: {how(code)}{error}"
        if is_formed and not self.has_trainer:
            if is_member and self._give_up_at is None:
                self._give_up_at = time.monotonic() + NOTICE.total_seconds()
                say(f"{said}; without a lockstep.Trainer no worker can be replaced alone: all are ended.")
            return
        if is_consequence(words) and self._num_free:  # Of another's end, which counts.
            self._num_free -= 1
            return
        self._count_restart()
        left = self.options.max_restarts - self.restarts
        is_replaced = left >= 0 and not self.coordinator.stopped
        then = f"a replacement starts ({left} more are left)" if is_replaced else "it is not replaced"
        say(f"{said}; {then}.")

    def _count_restart(self) -> None:
        self.restarts += 1
        self._num_free = self.wanted
