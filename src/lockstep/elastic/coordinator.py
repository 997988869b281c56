"""Decides who trains: the one place where the generations of an elastic run come from. In the launcher; needs no torch.

What it knows comes from the keys that workers write (see `lockstep.comm.generations`) and from the launchers, who
start the processes and see their ends. `attend` is called whenever either may have changed, and answers with keys. What
it has decided is in these keys too, so that a coordinator in another launcher can go on from there: see `resume`.

    forming    generation 1 waits for as many workers as were asked for; one that is started and has not joined within
               the deadline of those who wait for it is ended here, and another one starts
    running    newcomers that are ready, or a smaller number asked for, call the members to the next boundary
    regrouping from the first report on: every member reports, or ends, or is ended here for its silence; then the next
               generation is written: those who reported and stay, in their order, and newcomers behind them

A generation with fewer than `least` members is not written: members wait until newcomers are ready, for `WAIT_S` at
most. Who failed by an error of its own script is not to take everybody along: where the same call has failed twice by
such an error, on different workers, its cause is in the run and not in a worker, and the run stops.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

PREFIX = "elastic/"
WAIT_S = 600.0
"""How long members wait for newcomers where there are fewer than asked for."""
LEAST_PATIENCE_S = 5.0


class Keys(Protocol):
    """The keys of the run, as a launcher sees them."""

    def get(self, key: str) -> str | None:
        """What a key held when the keys were looked at last, or was set to from here since."""

    def under(self, prefix: str) -> dict[str, str]:
        """All keys that begin so, without this beginning."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def forget(self, prefix: str) -> None:
        """Drop the keys that begin so, and break off waits for such keys."""


@dataclass(slots=True)
class Decision:
    """One generation, as it came about: for logs and reports."""

    number: int
    members: tuple[int, ...]
    lost: tuple[int, ...]
    """Members of the generation before that had ended, or were ended for their silence."""
    left: tuple[int, ...]
    """Those that left as they were asked to."""
    joined: tuple[int, ...]
    took_s: float
    """From the first report to the decision."""
    why: str = ""
    """What the first member that reported had met, where no process has ended."""


@dataclass(slots=True)
class Coordinator:
    """The state of one run. `alive` of `attend` maps the member numbers of all processes that run to nothing else."""

    keys: Keys
    wanted: int
    """How many members generation 1 waits for."""
    least: int = 1
    most: int | None = None
    on_decision: Callable[[Decision], None] = lambda decision: None
    number: int = 0
    """Of the current generation; 0 while there is none."""
    members: tuple[int, ...] = ()
    stopped: str = ""
    """Why the run was stopped from here, if it was."""
    _since: float | None = None
    """When the first report on the current generation was seen; before there is one, when the first worker joined."""
    _awaited_since: dict[int, float] = field(default_factory=dict)
    """Before there is a generation: when each process was first seen to run."""
    _failed: dict[int, int] = field(default_factory=dict)
    """The member whose script has raised in a call of the trainer, by the call's number."""
    _is_called: bool = False

    def resume(self) -> None:
        """Go on from where a coordinator before this one was, as the keys have it. What it was amid is done again."""
        numbers = [int(text) for text in self.keys.under(f"{PREFIX}generation/")]
        said = {number: json.loads(self.keys.get(f"{PREFIX}generation/{number}") or "{}") for number in numbers}
        self.stopped = next((text["stop"] for text in said.values() if "stop" in text), "")
        written = [number for number in numbers if "members" in said[number]]
        if written:
            self.number = max(written)
            self.members = tuple(said[self.number]["members"])
            self._is_called = self.keys.get(f"{PREFIX}call/{self.number}") is not None
            self._admit()

    def attend(self, alive: Mapping[int, bool]) -> list[int]:
        """Look at what has changed; `alive` says of every process that runs whether it may be let in.

        Returns the members whose silence holds the others up: they are to be ended.
        """
        if self.stopped:
            return []
        if not self.number:
            return self._form(alive)
        reports = {member: report for member in self.members if (report := self._report(member)) is not None}
        ready = self._ready(alive)
        if not reports:
            if ready and not self._is_called and len(self.members) < (self.most or len(self.members) + 1):
                self.call()
            return []
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        missing = [member for member in self.members if member in alive and member not in reports]
        if missing:
            patience = max(LEAST_PATIENCE_S, *(float(report.get("patience_s", 0.0)) for report in reports.values()))
            return missing if now - self._since > patience else []
        self._decide(alive, reports, ready, now)
        return []

    def call(self) -> None:
        """Have the current generation end at its next boundary."""
        self._is_called = True
        self.keys.set(f"{PREFIX}call/{self.number}", "1")

    def tell_end(self, member: int, how: str, *, is_bad: bool) -> None:
        """A member's process has ended: tell those of its world, who may wait for it.

        is_bad: it will not have done its part. Then all who wait for anything give up, which they would not learn by
            themselves where the link to its host is cut.
        """
        if member in self.members:
            rank = self.members.index(member)
            self.keys.set(f"lockstep/e{self.number}/ended/{rank}", how)
            if is_bad:
                self.keys.set(f"lockstep/e{self.number}/failed", str(rank))
            if self._since is None and self.number:
                self.keys.forget(f"lockstep/e{self.number}/group")

    def stop(self, why: str) -> None:
        """No generation follows: whoever asks for one is told why."""
        self.stopped = why
        self.keys.set(f"{PREFIX}generation/{self.number + 1}", json.dumps({"stop": why}))

    # Deciding

    def _form(self, alive: Mapping[int, bool]) -> list[int]:
        """Write generation 1 when all are there; returns those that the others have waited too long for."""
        there = [member for member in sorted(alive) if self.keys.get(f"{PREFIX}card/{member}") is not None]
        if len(there) >= self.wanted:
            first = there[: self.wanted]  # The others are spares, and wait.
            self._write(first, Decision(1, tuple(first), (), (), tuple(first), 0.0))
            return []
        now = time.monotonic()
        self._awaited_since = {member: self._awaited_since.get(member, now) for member in alive}
        self._since = (now if self._since is None else self._since) if there else None
        if self._since is None:
            return []
        deadlines = [float(self.keys.get(f"{PREFIX}deadline/{member}") or WAIT_S) for member in there]
        latest = now - max(LEAST_PATIENCE_S, *deadlines)
        return [m for m in alive if m not in there and max(self._since, self._awaited_since[m]) < latest]

    def _decide(
        self, alive: Mapping[int, bool], reports: Mapping[int, dict[str, Any]], ready: list[int], now: float
    ) -> None:
        for member, report in reports.items():
            if report.get("failed") and self._failed.setdefault(report["calls"], member) != member:
                self.stop(f"the same step has failed on two workers, one after the other: {report['failed']}")
                return
        stay = [m for m in self.members if m in reports and m in alive and not _goes(reports[m])]
        if any(report.get("call") != "step" for report in reports.values()):
            ready = []  # The others are elsewhere in the script than where a newcomer begins.
        if not stay:
            stay = self._stay_to_hand_over(alive, reports, ready, now)
            if not stay:
                return
        room = max(1 if _goes(reports[stay[0]]) else 0, (self.most or len(stay) + len(ready)) - len(stay))
        joined = ready[:room]
        if len(stay) + len(joined) < self.least:
            if now - (self._since or now) > WAIT_S:
                self.stop(
                    f"{len(stay)} workers are left where at least {self.least} are asked for, and no other came "
                    f"within {WAIT_S:.0f} s."
                )
            return
        lost = tuple(m for m in self.members if m not in stay and not reports.get(m, {}).get("leaves"))
        left = tuple(m for m in self.members if m not in stay and m in reports and reports[m].get("leaves"))
        members = [*stay, *joined]
        took_s = now - (self._since or now)
        why = next((f"worker {member}: {report['why']}" for member, report in reports.items() if report.get("why")), "")
        self._write(members, Decision(self.number + 1, tuple(members), lost, left, tuple(joined), took_s, why))

    def _stay_to_hand_over(
        self, alive: Mapping[int, bool], reports: Mapping[int, dict[str, Any]], ready: list[int], now: float
    ) -> list[int]:
        """Nobody wants to stay: those who are to be members once more, since they alone have the state of the run.

        They leave at the next boundary, when the newcomers have it. Where nobody has it, the launcher starts all anew.
        """
        leaving = [m for m in self.members if m in alive and m in reports and reports[m].get("leaves")]
        if not leaving or ready:
            return leaving
        are_coming = any(member not in self.members for member in alive)
        if not are_coming or now - (self._since or now) > WAIT_S:
            self.stop("all workers have left.")
        return []

    def _write(self, members: list[int], decision: Decision) -> None:
        before, self.number, self.members = self.number, self.number + 1, tuple(members)
        self._since, self._is_called = None, False
        cards = [self.keys.get(f"{PREFIX}card/{member}") for member in members]
        self.keys.set(f"{PREFIX}generation/{self.number}", json.dumps({"members": members, "cards": cards}))
        if before:
            self._admit()
        if before > 1:
            self.keys.forget(f"lockstep/e{before - 1}/")
            self.keys.forget(f"{PREFIX}report/{before - 1}/")
        self.on_decision(decision)

    def _admit(self) -> None:
        """Tell newcomers of the current generation that they are in it, and who listens for the end of the last one."""
        source = self._source()
        for member in self.members:
            asked = self.keys.get(f"{PREFIX}ready/{member}/{source}") is not None
            if asked and self.keys.get(f"{PREFIX}admit/{member}/{source}") is None:
                self.keys.set(f"{PREFIX}admit/{member}/{source}", json.dumps({"generation": self.number}))
        self.keys.set(f"{PREFIX}call/{self.number - 1}", "1")

    # Looking

    def _report(self, member: int) -> dict[str, Any] | None:
        text = self.keys.get(f"{PREFIX}report/{self.number}/{member}")
        return None if text is None else json.loads(text)

    def _source(self) -> int:
        return int(self.keys.get(f"{PREFIX}source") or 0)

    def _ready(self, alive: Mapping[int, bool]) -> list[int]:
        """Newcomers that wait in the source that the run is in; those that wait in an earlier one are sent on."""
        source, ready = self._source(), []
        for member, may_join in alive.items():
            if member in self.members or not may_join:
                continue
            asked = [at for at in range(source + 1) if self.keys.get(f"{PREFIX}ready/{member}/{at}") is not None]
            if not asked or self.keys.get(f"{PREFIX}admit/{member}/{asked[-1]}") is not None:
                continue  # Not there yet; or it has its answer: one that has left again is no newcomer.
            if asked[-1] == source:
                ready.append(member)
            else:
                self.keys.set(f"{PREFIX}admit/{member}/{asked[-1]}", json.dumps({"source": source}))
        return ready


def _goes(report: Mapping[str, Any]) -> bool:
    """Whether a member has said that it will not be in the next generation."""
    return bool(report.get("leaves") or report.get("failed"))
