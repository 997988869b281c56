"""Who holds the others up, judged from what every worker told of itself, and said in words. Pure.

The report names who has not come, what the others wait for, what everybody does, and what to do about it.
"""

import enum
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.comm.peers import Peer
from lockstep.replica.step_state import PassPhase
from lockstep.watching.hang_state import QueuedCall, WorkerState
from lockstep.watching.number_format import some

_MOST_LINES = 32
"""How many workers get a line of their own; those who are missing come first."""
STANDS = tuple("TtZX")
"""The kernel's letters for a process that is stopped or has ended."""


# Who


@dataclass(frozen=True, slots=True)
class Account:
    """What is known of one worker."""

    peer: Peer
    state: WorkerState | None
    """What it told of itself last; None if nothing was heard of it."""
    silent_s: float
    """Since when it has told nothing, in seconds; 0 if it answers."""
    process: str
    """The letter by which the kernel tells what its process does, X if it is gone; empty on another host."""

    @property
    def waits(self) -> bool:
        """Whether it answers, and waits for others."""
        return self.state is not None and not self.silent_s and bool(self.state.waits)


class HangKind(enum.Enum):
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
class HangVerdict:
    """Who, and how."""

    kind: HangKind
    missing: tuple[int, ...]
    """Ranks of the workers that the others wait for; all of them where it cannot be told who is wrong."""
    difference: Mapping[int, QueuedCall] = field(default_factory=dict)
    """What each worker called first that was not what others called, where that is known."""


def judge(accounts: Sequence[Account], *, hears: bool) -> HangVerdict:
    """Whom the hang is due to. `hears`: whether the store answers."""
    if not hears:
        return HangVerdict(HangKind.UNHEARD, tuple(a.peer.rank for a in accounts if a.process in STANDS))
    absent = tuple(account.peer.rank for account in accounts if not account.waits)
    if absent:
        return HangVerdict(HangKind.ABSENT, absent)
    states = [account.state for account in accounts if account.state is not None]
    if difference := _first_difference(states):
        return HangVerdict(HangKind.APART, _other_callers(difference, states), difference)
    operations = defaultdict(list)
    for state in states:
        operations[_operation(state)].append(state.rank)
    if len(operations) > 1:
        return HangVerdict(HangKind.APART, _odd(list(operations.values()), states))
    behind = _behind_in_calls(states)
    return HangVerdict(HangKind.BEHIND, behind) if behind else HangVerdict(HangKind.TOGETHER, ())


def _operation(state: WorkerState) -> tuple[object, ...]:
    """What has to be the same for workers to wait for each other: in a reduction, whatever bucket is waited for."""
    if state.phase is PassPhase.REDUCING or state.bucket >= 0:
        return PassPhase.REDUCING, state.step
    return state.waits, state.at


def _first_difference(states: list[WorkerState]) -> dict[int, QueuedCall]:
    """By rank: the calls of the same number in the same group, the first that are not the same."""
    calls: dict[tuple[int, str], dict[int, QueuedCall]] = defaultdict(dict)
    for state in states:
        for call in state.queued:
            calls[call.number, call.group][state.rank] = call
    return next((by for _, by in sorted(calls.items()) if len({call.what for call in by.values()}) > 1), {})


def _other_callers(difference: Mapping[int, QueuedCall], states: list[WorkerState]) -> tuple[int, ...]:
    """Those who did not call what most did; without a majority, what everybody called in earlier steps; else all."""
    callers: dict[str, list[int]] = defaultdict(list)
    for rank, call in difference.items():
        callers[call.what].append(rank)
    largest = max(callers.values(), key=len)
    if 2 * len(largest) <= len(difference):
        rank, some = next(iter(difference.items()))
        queued = next(state.queued for state in states if state.rank == rank)
        history = [call for call in queued if call.group == some.group and call.number < some.number]
        expected = _precedent(history)
        largest = callers.get(expected.what, []) if expected is not None else []
    return tuple(sorted(set(difference) - set(largest)))


def _odd(groups: list[list[int]], states: list[WorkerState]) -> tuple[int, ...]:
    """Those who are not with the majority; without one, those who have not come as far; else everybody."""
    largest = max(groups, key=len)
    if 2 * len(largest) > len(states):
        return tuple(sorted(state.rank for state in states if state.rank not in largest))
    farthest = max(state.position for state in states)
    return tuple(state.rank for state in states if state.position < farthest) or tuple(s.rank for s in states)


def _behind_in_calls(states: list[WorkerState]) -> tuple[int, ...]:
    """Those who have called fewer collectives of some group than others."""
    most: dict[str, int] = {}
    for state in states:
        for group, count in state.calls.items():
            most[group] = max(count, most.get(group, 0))
    return tuple(s.rank for s in states if any(count < most[group] for group, count in s.calls.items()))


def _precedent(history: Sequence[QueuedCall]) -> QueuedCall | None:
    """What followed when the same calls had been made before, as far back as they are the same; None if never."""
    best, longest = None, 0
    for end in range(len(history) - 1, 0, -1):
        same = 0
        while same < end and _call_kind(history[end - 1 - same]) == _call_kind(history[-1 - same]):
            same += 1
        if same > longest:
            best, longest = history[end], same
    return best


def _call_kind(call: QueuedCall) -> tuple[str, str]:
    return call.what, call.at


def awaited(verdict: HangVerdict, accounts: Sequence[Account]) -> tuple[int, int]:
    """The step, and the bucket waited for or -1.

    As those say who wait, else the first that the missing ones have not sent; but where workers called different
    things, the first that came to nothing.
    """
    known = [(account.peer.rank, account.state) for account in accounts if account.state is not None]
    unpaired = []
    for rank, state in known:
        call = verdict.difference.get(rank)
        if call is not None and call.is_bucket and state.num_buckets:  # A step sends them all.
            steps, place = divmod(state.launched - 1 - call.later_buckets, state.num_buckets)
            unpaired.append((state.step + steps, place))
    if unpaired:
        return min(unpaired)
    waiting = [account.state for account in accounts if account.waits and account.state is not None]
    step = max((state.step for state in waiting or (state for _, state in known)), default=0)
    waiting = [state for state in waiting if state.step == step]
    if buckets := [state.bucket for state in waiting if state.bucket >= 0]:
        return step, min(buckets)
    if not any(state.phase is PassPhase.REDUCING for state in waiting):
        return step, -1
    missing = [state for rank, state in known if rank in verdict.missing]
    return step, min((state.launched if state.step >= step else 0 for state in missing), default=-1)


# In words


@dataclass(frozen=True, slots=True)
class Waited:
    """What is waited for."""

    step: int
    since_s: float
    bucket: int | None
    """Its place in the launch order, where a bucket is waited for."""
    num_buckets: int
    num_bytes: int
    params: tuple[str, ...]
    """The parameters in it."""


def make_report(
    waited: Waited, verdict: HangVerdict, accounts: Sequence[Account], folder: Path | None
) -> tuple[str, str]:
    """The hang in one line, and in full. `folder`: where the workers' stacks are written, if anywhere."""
    missing = set(verdict.missing)
    ordered = sorted(accounts, key=lambda account: (account.peer.rank not in missing, account.peer.rank))
    head = _head(verdict, accounts)
    lines = [f"lockstep: step {waited.step} hangs since {waited.since_s:.1f} s: {head}"]
    if waited.bucket is not None:
        params = some(waited.params) or "no parameter, but the end of the step"
        place = f"bucket {waited.bucket} of {waited.num_buckets} ({waited.num_bytes / 1e6:.1f} MB)"
        lines.append(f"  waited for: {place}: {params}")
    if verdict.difference:
        lines.append(f"  out of step: {_difference(verdict)}")
    lines += [f"  worker {account.peer.rank}: {_line(account)}" for account in ordered[:_MOST_LINES]]
    if len(ordered) > _MOST_LINES:
        lines.append(f"  and {len(ordered) - _MOST_LINES} more workers")
    where = f"{folder}{os.sep}worker-RANK.txt" if folder is not None else "each worker's output"
    lines.append(f"  stacks of all threads: {where}")
    lines.append(f"  what to do: {_advice(verdict, accounts)}")
    missing_first = [f"Worker {account.peer.rank}: {_line(account)}." for account in ordered[: min(4, len(missing))]]
    return " ".join([head, *missing_first]), "\n".join(lines)


def _difference(verdict: HangVerdict) -> str:
    """Who called what, at the first call that was not the same."""
    called: dict[tuple[str, str], list[int]] = {}
    for rank, call in sorted(verdict.difference.items(), key=lambda item: (item[0] not in verdict.missing, item[0])):
        called.setdefault((call.what, call.at), []).append(rank)
    number = next(iter(verdict.difference.values())).number
    parts = [
        f"{'worker' if len(ranks) == 1 else 'workers'} {', '.join(map(str, ranks[:8]))}{' ...' * (len(ranks) > 8)} "
        f"called {what}{f', at {at}' if at else ''}"
        for (what, at), ranks in called.items()
    ]
    return f"as collective {number} of their group, {'; '.join(parts)}"


def _head(verdict: HangVerdict, accounts: Sequence[Account]) -> str:
    names = [str(account.peer) for account in accounts if account.peer.rank in verdict.missing]
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    have, are = ("has", "is") if len(names) == 1 else ("have", "are")
    apart = "the workers wait for each other in different operations"
    who_is_apart = f"{listed} not in that of the others" if len(names) < len(accounts) else ""
    words = {
        HangKind.ABSENT: f"{listed} {have} not arrived.",
        HangKind.APART: f"{apart}, {who_is_apart or 'and it cannot be told who is right'}.",
        HangKind.BEHIND: f"{listed} {have} called fewer collectives than the others.",
        HangKind.TOGETHER: "all workers have arrived, and the message does not get through.",
        HangKind.UNHEARD: "the place where the workers met does not answer."
        + (f" {listed} {are} stopped or gone." if names else ""),
    }
    return words[verdict.kind]


def _line(account: Account) -> str:
    state = account.state
    if account.silent_s or state is None:
        seen = f"; last heard of {account.silent_s:.1f} s ago {_place(state)}" if state is not None else ""
        return f"{_silence(account)}{seen}"
    if state.waits:
        what = f"for bucket {state.bucket} of step {state.step}" if state.bucket >= 0 else f"in {state.waits}"
        return f"waiting {what} since {state.waits_s:.1f} s, at {state.at}"
    lacking = ""
    if state.phase is PassPhase.BACKWARD:
        lacking = f"; its next bucket lacks the gradients of {some(state.lacking, state.num_lacking)}"
    return f"{_place(state)} since {state.phase_s:.1f} s, at {state.at}{lacking}"


def _place(state: WorkerState) -> str:
    """Where in its step a worker is."""
    if state.has_left:
        return f"at the end of its training, after {state.step} steps"
    sent = f"{state.launched} of {state.num_buckets} buckets"
    words = {
        PassPhase.BETWEEN: f"outside of forward and backward passes, before step {state.step}",
        PassPhase.FORWARD: f"in the forward pass of step {state.step}, or behind it without loss.backward()",
        PassPhase.ACCUMULATING: f"in a pass under no_sync before step {state.step}",
        PassPhase.BACKWARD: f"in the backward pass of step {state.step}, {sent} sent",
        PassPhase.REDUCING: f"at the end of the backward pass of step {state.step}",
    }
    return words[state.phase]


def _silence(account: Account) -> str:
    """Why a worker tells nothing, as far as the kernel knows."""
    silent = f"no heartbeat for {account.silent_s:.1f} s" if account.state is not None else "nothing heard of it"
    state = f"(process state {account.process})"
    if account.process in STANDS:
        whats = {"T": "stopped", "t": "stopped by a debugger", "Z": "ended", "X": "ended"}
        return f"{whats[account.process]} {state}"
    if not account.process:
        return f"{silent}: stopped, frozen or cut off, on another host"
    if account.state is None:
        return f"{silent} {state}"
    doing = {"R": "while it computes", "D": "in a system call that cannot be interrupted"}
    what = doing.get(account.process, "while it sleeps")
    return f"frozen: {silent} {what} {state}, in native code that keeps the interpreter's lock"


def _advice(verdict: HangVerdict, accounts: Sequence[Account]) -> str:
    missing = [account for account in accounts if account.peer.rank in verdict.missing]
    if any(account.process in tuple("Tt") for account in missing):
        return "let the stopped process go on (kill -CONT PID), or end it: the others then end by themselves."
    if verdict.kind is HangKind.ABSENT and any(account.silent_s for account in missing):
        return (
            "look at the stack of the worker that is silent, which names the call that does not return; if it is on "
            "another host, at that: whether its process is stopped, and its network up."
        )
    same_calls = (
        "make every worker call the same collectives in the same order; look for a condition that depends on the rank "
        "or on a worker's own data at the lines above."
    )
    words = {
        HangKind.ABSENT: "look at the line that the missing worker is at: an endless loop, slow data, or a branch that "
        "only it has taken. Every worker must come to loss.backward() in every step (with model.join(): or "
        "lockstep.shard for workers with fewer batches).",
        HangKind.APART: same_calls,
        HangKind.BEHIND: same_calls,
        HangKind.TOGETHER: "look at the network between the hosts, and for a worker that was slow until just now.",
        HangKind.UNHEARD: "look at worker 0 or at the launcher, whichever serves the store: its process or its network "
        "is stuck.",
    }
    return words[verdict.kind]
