"""Who holds the others up, judged from what every worker told of itself. Pure."""

import enum
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.comm.peers import Peer
from lockstep.watching import hang_queue
from lockstep.watching.hang_queue import Queued
from lockstep.watching.hang_state import Phase, State


@dataclass(frozen=True, slots=True)
class Account:
    """What is known of one worker."""

    peer: Peer
    state: State | None
    """What it told of itself last; None if nothing was heard of it."""
    silent_s: float
    """Since when it has told nothing, in seconds; 0 if it answers."""
    process: str
    """The letter by which the kernel tells what its process does, X if it is gone; empty on another host."""
    sleeps_in: str = ""
    """Where in the kernel its main thread sleeps, or empty."""

    @property
    def waits(self) -> bool:
        """Whether it answers, and waits for others."""
        return self.state is not None and not self.silent_s and bool(self.state.waits)


class Kind(enum.Enum):
    """What kind of hang it is."""

    ABSENT = "absent"
    """Some workers do not wait: they have not come to where the others are."""
    APART = "apart"
    """All wait, but not in the same operation."""
    BEHIND = "behind"
    """All wait in what looks like the same operation, and some have called fewer of them."""
    TOGETHER = "together"
    """All have come, and nothing gets through."""
    UNHEARD = "unheard"
    """The store does not answer, so that nothing is known of the others but what this host's kernel tells."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who, and how."""

    kind: Kind
    missing: tuple[int, ...]
    """Ranks of the workers that the others wait for; all of them where it cannot be told who is wrong."""
    difference: Mapping[int, Queued] = field(default_factory=dict)
    """What each worker called first that was not what others called, where that is known."""


def judge(accounts: Sequence[Account], *, hears: bool) -> Verdict:
    """Whom the hang is due to. `hears`: whether the store answers."""
    if not hears:
        return Verdict(Kind.UNHEARD, tuple(a.peer.rank for a in accounts if a.process and a.process in "TtZX"))
    absent = tuple(account.peer.rank for account in accounts if not account.waits)
    if absent:
        return Verdict(Kind.ABSENT, absent)
    states = [account.state for account in accounts if account.state is not None]
    if difference := _first_difference(states):
        return Verdict(Kind.APART, _other_callers(difference, states), difference)
    operations = defaultdict(list)
    for state in states:
        operations[_operation(state)].append(state.rank)
    if len(operations) > 1:
        return Verdict(Kind.APART, _odd(list(operations.values()), states))
    behind = _behind_in_calls(states)
    return Verdict(Kind.BEHIND, behind) if behind else Verdict(Kind.TOGETHER, ())


def _operation(state: State) -> tuple[object, ...]:
    """What has to be the same for workers to wait for each other: in a reduction, whatever bucket is waited for."""
    if state.phase is Phase.REDUCING or state.bucket >= 0:
        return Phase.REDUCING, state.step
    return state.waits, state.at


def _first_difference(states: list[State]) -> dict[int, Queued]:
    """By rank: the calls of the same number in the same group, the first that are not the same."""
    calls: dict[tuple[int, str], dict[int, Queued]] = defaultdict(dict)
    for state in states:
        for call in state.queued:
            calls[call.number, call.group][state.rank] = call
    return next((by for _, by in sorted(calls.items()) if len({call.what for call in by.values()}) > 1), {})


def _other_callers(difference: Mapping[int, Queued], states: list[State]) -> tuple[int, ...]:
    """Those who did not call what most did; without a majority, what everybody called in earlier steps; else all."""
    callers: dict[str, list[int]] = defaultdict(list)
    for rank, call in difference.items():
        callers[call.what].append(rank)
    largest = max(callers.values(), key=len)
    if 2 * len(largest) <= len(difference):
        rank, some = next(iter(difference.items()))
        queued = next(state.queued for state in states if state.rank == rank)
        history = [call for call in queued if call.group == some.group and call.number < some.number]
        expected = hang_queue.precedent(history)
        largest = callers.get(expected.what, []) if expected is not None else []
    return tuple(sorted(set(difference) - set(largest)))


def _odd(groups: list[list[int]], states: list[State]) -> tuple[int, ...]:
    """Those who are not with the majority; without one, those who have not come as far; else everybody."""
    largest = max(groups, key=len)
    if 2 * len(largest) > len(states):
        return tuple(sorted(state.rank for state in states if state.rank not in largest))
    farthest = max(state.position for state in states)
    return tuple(state.rank for state in states if state.position < farthest) or tuple(s.rank for s in states)


def _behind_in_calls(states: list[State]) -> tuple[int, ...]:
    """Those who have called fewer collectives of some group than others."""
    most: dict[str, int] = {}
    for state in states:
        for group, count in state.calls.items():
            most[group] = max(count, most.get(group, 0))
    return tuple(s.rank for s in states if any(count < most[group] for group, count in s.calls.items()))
