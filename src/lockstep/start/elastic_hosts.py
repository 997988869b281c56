"""The workers of an elastic run over several hosts: who is replaced, when there are enough, and when it is over.

Two parts talk by keys of the run's store. `HostWorkers` is in every launcher: it starts and ends processes of its host
as the keys say, and says what became of them. `ElasticRun` is in one launcher at a time: it has the coordinator decide
who trains (see `lockstep.elastic.coordinator`), asks for processes where some are missing, and ends the run. All that
it needs to know is in the keys, so another launcher can take its place. A process has a *slot* of its host, which says
which device it uses and which a replacement takes over, and a member number of its own.

    hosts/run/H/S      by ElasticRun: how many processes slot S of host H is to have had
    hosts/started/M    by launcher H: process M has started: where, and which process of its slot it is
    hosts/ended/M      by launcher H: it has ended, and how
    hosts/end/M        by ElasticRun: launcher H is to send process M this signal
    hosts/wanted/H     by launcher H: how many workers it is to have, where that has been changed
    hosts/finished     by ElasticRun: a worker has come to the end of the script
    hosts/attempt      by ElasticRun: how often all have started anew
    hosts/over         by ElasticRun: the run is over, and how

What is done:

    a worker has ended badly           the others go on; a replacement is started in its slot, while restarts are left
    one was asked to leave             the same, but it costs no restart
    one has finished (exit code 0)     the script is at its end: nobody is replaced any more
    a host is gone                     its workers count as ended, and are not replaced
    all members have ended             the run is over; if none has finished, all start anew from their checkpoint
"""

import json
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from lockstep.elastic.coordinator import PREFIX as DECISIONS
from lockstep.elastic.coordinator import Coordinator
from lockstep.start.elastic import Elastic, GenerationLog
from lockstep.start.failure import Failure, how
from lockstep.start.hosts import HostOptions, say, shorten
from lockstep.start.process import Worker
from lockstep.start.run_keys import PREFIX, RunKeys
from lockstep.start.supervisor import Supervisor

LOOK_S = 0.1


class Place(Protocol):
    """This launcher among those of the run."""

    keys: RunKeys
    number: int
    """Of this host."""
    lost: str
    """Why this launcher has ended its workers by itself, if it has."""

    @property
    def cards(self) -> dict[int, dict[str, Any]]:
        """What the launchers of all hosts have said of themselves."""

    @property
    def first_rank(self) -> int:
        """How many workers the hosts before this one have."""

    @property
    def options(self) -> HostOptions:
        """Where this launcher belongs."""

    @property
    def term(self) -> int:
        """Which time it is that a launcher decides, if it is this one; else 0."""

    @property
    def is_replaceable(self) -> bool:
        """Whether another launcher decides once this one has ended."""

    @property
    def news_fd(self) -> int | None:
        """Can be read when a worker has said something; None where that cannot be known."""

    def deciding(self, term: int) -> AbstractContextManager[None]:
        """A block in which keys are set only as long as this launcher decides."""

    def silent(self) -> list[int]:
        """Hosts that count as dead and have not been said to be gone."""

    def tell_gone(self, host: int) -> None:
        """A host counts as dead from now on."""

    def leave(self, facts: dict[str, Any], patience_s: float) -> object:
        """Say how it has ended here, and wait for the others to."""


class HostWorkers:
    """The processes of this host.

    `start(slot, member)` starts one, which is the supervisor's last worker then; `failure` tells how one has ended.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        place: Place,
        start: Callable[[int, int], None],
        failure: Callable[[Worker], Failure],
        num_workers: int,
        limits: tuple[int, int],
    ) -> None:
        self.supervisor = supervisor
        self._place, self._start, self._failure = place, start, failure
        self.wanted = num_workers
        """How many there are to be here."""
        self._least, self._most = limits
        self._orders: dict[int, int] = {}
        """How many processes each slot has had."""
        self._told: set[int] = set()
        """Members whose end has been told."""
        self._obeyed: set[str] = set()

    @property
    def running(self) -> list[Worker]:
        """Those whose process has not ended."""
        return [worker for worker in self.supervisor.workers if not worker.has_ended()]

    def wait(self, news_fd: int | None, seconds: float) -> None:
        """Return when a worker has said something (`news_fd` can be read), or has ended, or the time is over."""
        ends = []
        for worker in self.running:
            try:
                ends.append(worker.end_fd())
            except OSError:
                seconds = 0.0
        fds = ends if news_fd is None else [news_fd, *ends]
        try:
            if news_fd in multiprocessing.connection.wait(fds, seconds) and news_fd is not None:
                os.read(news_fd, 1 << 12)
            elif not fds:
                time.sleep(seconds)
        finally:
            for fd in ends:
                os.close(fd)

    def attend(self) -> None:
        """Do what the keys say, and say what has changed here; called after each refresh."""
        self.tell_ends()
        keys = self._place.keys
        for text, signum in keys.under(f"{PREFIX}end/").items():
            worker = next((each for each in self.supervisor.workers if str(each.rank) == text), None)
            if worker is not None and text not in self._obeyed:
                self._obeyed.add(text)
                if int(signum) == signal.SIGTERM:
                    worker.ask_to_leave()
                else:
                    worker.tell(int(signum))
        for text, order in keys.under(f"{PREFIX}run/{self._place.number}/").items():
            slot = int(text)
            if int(order) > self._orders.get(slot, 0):
                self._orders[slot] = int(order)
                self._begin(slot, int(order))

    def tell_ends(self) -> None:
        """Say who has ended here."""
        for worker in self.supervisor.workers:
            if worker.has_ended() and worker.rank not in self._told:
                self._told.add(worker.rank)
                failure = self._failure(worker)
                facts = {
                    "code": worker.code,
                    "told": worker.was_told_to_end,
                    "time": failure.time - time.monotonic() + time.time(),
                    "stderr": shorten(failure.stderr) if worker.has_failed else "",
                }
                self._place.keys.set(f"{PREFIX}ended/{worker.rank}", json.dumps(facts))

    def resize(self, change: int) -> None:
        """Have so many workers more, or fewer, on this host."""
        self.wanted = max(self._least, min(self.wanted + change, self._most))
        self._place.keys.set(f"{PREFIX}wanted/{self._place.number}", str(self.wanted))

    def _begin(self, slot: int, order: int) -> None:
        """Start the next process of a slot; those that a run begins with are numbered by host."""
        place = self._place
        if order == 1 and place.number < place.options.hosts and slot < place.cards[place.number]["workers"]:
            member = place.first_rank + slot
        else:
            member = int(place.keys.call_add(f"{PREFIX}members")) - 1
        self._start(slot, member)
        pid = self.supervisor.workers[-1].pid
        facts = {"host": place.number, "slot": slot, "order": order, "pid": pid}
        place.keys.set(f"{PREFIX}started/{member}", json.dumps(facts))


@dataclass(slots=True)
class ElasticRun:
    """Decides about the processes of all hosts. Made by the launcher that decides, whenever it begins to."""

    place: Place
    options: Elastic
    folder: Path | None = None
    """Where the generations are written down, in a watched run."""
    coordinator: Coordinator = field(init=False)
    _log: GenerationLog = field(init=False)
    _seen: set[int] = field(default_factory=set)
    """Members whose end has been dealt with."""
    _failed: int = 0
    """How many workers have ended badly."""
    _attempt: int = 0
    _orders: dict[tuple[int, int], int] = field(default_factory=dict)
    """How many processes have been asked for, by host and slot."""
    _total: int = 0
    """How many workers were wanted when that was last said."""
    _started: dict[int, dict[str, Any]] = field(default_factory=dict)
    _is_new: bool = True

    def __post_init__(self) -> None:
        keys = self.place.keys
        for text, order in keys.under(f"{PREFIX}run/").items():
            host, slot = map(int, text.split("/"))
            self._orders[host, slot] = int(order)
        self._attempt = int(keys.get(f"{PREFIX}attempt") or 0)
        self._is_new = not self._orders
        if self._is_new:
            self._total = sum(card["workers"] for card in self.place.cards.values())
            keys.set(f"{PREFIX}members", str(self._total))
        self._log = GenerationLog(keys, self.folder, is_new=self._is_new)
        self.coordinator = self._coordinator()
        self.coordinator.resume()
        for text, facts in keys.under(f"{PREFIX}ended/").items():
            if int(text) not in self.coordinator.members:  # Dealt with by the one who decided before.
                self._seen.add(int(text))
                self._failed += bool(json.loads(facts)["code"]) and not self.has_finished

    @property
    def has_finished(self) -> bool:
        """Whether a worker has come to the end of its script."""
        return self.place.keys.get(f"{PREFIX}finished") is not None

    @property
    def restarts(self) -> int:
        """How many workers have been replaced because they ended badly."""
        return self._failed + self._attempt

    def attend(self) -> None:
        """Deal with what has changed; called after each refresh."""
        place, keys = self.place, self.place.keys
        if keys.get(f"{PREFIX}over") is not None:
            return
        self._log.write()
        silent = place.silent()
        for host in silent:
            place.tell_gone(host)
            say(f"host {host} was not heard of for some seconds: it counts as gone, with all its workers.")
        self._started = {int(member): json.loads(text) for member, text in keys.under(f"{PREFIX}started/").items()}
        ended = {int(member): json.loads(text) for member, text in keys.under(f"{PREFIX}ended/").items()}
        away = {int(host) for kind in ("gone", "leaving") for host in keys.under(f"{PREFIX}{kind}/")}
        gone = {int(host) for host in keys.under(f"{PREFIX}gone/")}
        alive = [
            member
            for member, facts in sorted(self._started.items())
            if member not in ended and facts["host"] not in gone
        ]
        for member, facts in self._started.items():
            if member not in alive and member not in self._seen:
                self._seen.add(member)
                self._see_end(member, facts, ended.get(member))
        if silent and self.coordinator.number:
            self.coordinator.call()  # Its workers may be there still, and are to be left behind.
        wanted = self._wanted(away)
        self.coordinator.wanted = sum(wanted.values())
        self.coordinator.most = self.options.max or max(self.coordinator.wanted, self.options.min)
        held_up = self.coordinator.attend(dict.fromkeys(alive, True))
        for member in held_up:
            if keys.get(f"{PREFIX}end/{member}") is None:
                say(f"worker {member}{self._where(member)} holds the others up without a word: it is ended.")
                keys.set(f"{PREFIX}end/{member}", str(int(signal.SIGKILL)))
        if not self.coordinator.number or any(member in alive for member in self.coordinator.members):
            self._fill(wanted, alive, away)
            if not alive and not self._pending(away):
                self.end("")
            return
        for member in alive:  # Newcomers that nobody will let in.
            if keys.get(f"{PREFIX}end/{member}") is None:
                keys.set(f"{PREFIX}end/{member}", str(int(signal.SIGKILL)))
        if alive or self._pending(away):
            return
        if self.has_finished or self.coordinator.stopped or self.restarts >= self.options.max_restarts or not wanted:
            self.end(self.coordinator.stopped)
            return
        self._attempt += 1
        keys.set(f"{PREFIX}attempt", str(self._attempt))
        say(f"no worker is left: all {self._total} start anew, from the last checkpoint if the script loads one.")
        keys.forget(DECISIONS)
        keys.forget("lockstep/")
        self.coordinator = self._coordinator()
        self._fill(wanted, [], away)

    def _coordinator(self) -> Coordinator:
        return Coordinator(self.place.keys, 1, self.options.min, self.options.max, self._log.tell)

    def end(self, why: str) -> None:
        """The run is over."""
        keys, members = self.place.keys, self.coordinator.members
        ends = [json.loads(keys.get(f"{PREFIX}ended/{member}") or "{}") for member in members]
        have_failed = any(facts.get("code") and not facts.get("told") for facts in ends)
        facts = {"finished": self.has_finished and not have_failed, "why": why, "members": list(members)}
        self._log.write(is_last=True)
        keys.set(f"{PREFIX}over", json.dumps(facts))

    def _wanted(self, away: set[int]) -> dict[int, int]:
        """How many workers each host is to have, within the limits of the run."""
        keys, wanted = self.place.keys, {}
        for text, card in keys.under(f"{PREFIX}card/").items():
            if int(text) not in away:
                wanted[int(text)] = int(keys.get(f"{PREFIX}wanted/{text}") or json.loads(card)["workers"])
        excess = sum(wanted.values()) - (self.options.max or sum(wanted.values()))
        for host in sorted(wanted, reverse=True):
            less = max(0, min(excess, wanted[host]))
            wanted[host], excess = wanted[host] - less, excess - less
        total = sum(wanted.values())
        if total != self._total and self._total and not away:
            say(f"{total} workers are wanted, where {self._total} were.")
        self._total = total
        return wanted

    def _pending(self, away: set[int]) -> bool:
        """Whether a process has been asked for that has not started."""
        started = self._num_started()
        return any(
            host not in away and order > started.get((host, slot), 0) for (host, slot), order in self._orders.items()
        )

    def _num_started(self) -> dict[tuple[int, int], int]:
        started: dict[tuple[int, int], int] = {}
        for facts in self._started.values():
            place = facts["host"], facts["slot"]
            started[place] = max(started.get(place, 0), facts["order"])
        return started

    def _fill(self, wanted: Mapping[int, int], alive: list[int], away: set[int]) -> None:
        """Ask for workers until there are enough, and for those to leave that are too many."""
        if self.has_finished or self.coordinator.stopped:
            return
        keys, started = self.place.keys, self._num_started()
        taken = {(self._started[member]["host"], self._started[member]["slot"]): member for member in alive}
        for (host, slot), member in taken.items():
            if slot >= wanted.get(host, 0) and keys.get(f"{PREFIX}end/{member}") is None:
                keys.set(f"{PREFIX}end/{member}", str(int(signal.SIGTERM)))
        if self.restarts > self.options.max_restarts:
            return
        for host, number in wanted.items():
            for slot in range(number):
                order = self._orders.get((host, slot), 0)
                if (host, slot) not in taken and order == started.get((host, slot), 0):
                    self._orders[host, slot] = order + 1
                    keys.set(f"{PREFIX}run/{host}/{slot}", str(order + 1))

    def _see_end(self, member: int, facts: Mapping[str, Any], ended: Mapping[str, Any] | None) -> None:
        keys = self.place.keys
        is_member = member in self.coordinator.members
        if ended is None:
            self.coordinator.tell_end(member, f"is on host {facts['host']}, which is gone", is_bad=True)
            return
        code = int(ended["code"])
        self.coordinator.tell_end(member, f"ended with {how(code)}" if code else "has finished", is_bad=bool(code))
        if not code and is_member:
            keys.set(f"{PREFIX}finished", "1")
        elif code and not self.has_finished:
            self._failed += 1
            left = self.options.max_restarts - self.restarts
            then = f"a replacement starts ({left} more are left)" if left >= 0 else "it is not replaced"
            say(f"worker {member}{self._where(member)} has ended: {how(code)}; {then}.")

    def _where(self, member: int) -> str:
        facts = self._started[member]
        return f" (pid {facts['pid']}" + (f" on host {facts['host']})" if len(self.place.cards) > 1 else ")")
