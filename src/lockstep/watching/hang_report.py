"""The report of a hang: who has not come, what the others wait for, what everybody does, and what to do about it."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.watching.hang_state import Phase, State
from lockstep.watching.hang_verdict import Account, Kind, Verdict

MOST_LINES = 32
"""How many workers get a line of their own; those who are missing come first."""


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


@dataclass(frozen=True, slots=True)
class Report:
    """A hang, as it is printed and kept."""

    time_s: float
    """When it was made, in seconds since 1970."""
    waited: Waited
    missing: tuple[int, ...]
    """Ranks of the workers that the others wait for."""
    summary: str
    """What was found, in one line."""
    text: str
    """The same in full."""

    def write(self, path: Path) -> None:
        """Keep it as JSON; the file appears whole."""
        fields = {
            "time": self.time_s,
            "step": self.waited.step,
            "bucket": self.waited.bucket,
            "params": list(self.waited.params),
            "missing": list(self.missing),
            "text": self.text,
        }
        whole = path.with_suffix(".tmp")
        whole.write_text(json.dumps(fields, indent=1))
        whole.replace(path)


def report(waited: Waited, verdict: Verdict, accounts: Sequence[Account], folder: Path | None) -> Report:
    """The report, in words. `folder`: where the workers' stacks are written, if anywhere."""
    missing = set(verdict.missing)
    ordered = sorted(accounts, key=lambda account: (account.peer.rank not in missing, account.peer.rank))
    lines = [f"lockstep: step {waited.step} hangs since {waited.since_s:.1f} s: {_head(verdict, accounts)}"]
    if waited.bucket is not None:
        size = f"{waited.num_bytes / 1e6:.1f} MB"
        lines.append(f"  waited for: bucket {waited.bucket} of {waited.num_buckets} ({size}): {some(waited.params)}")
    if verdict.difference:
        lines.append(f"  out of step: {_difference(verdict)}")
    lines += [f"  worker {account.peer.rank}: {_line(account)}" for account in ordered[:MOST_LINES]]
    if len(ordered) > MOST_LINES:
        lines.append(f"  and {len(ordered) - MOST_LINES} more workers")
    where = f"{folder}{os.sep}worker-RANK.txt" if folder is not None else "each worker's output"
    lines.append(f"  stacks of all threads: {where}")
    lines.append(f"  what to do: {_advice(verdict, accounts)}")
    return Report(time.time(), waited, verdict.missing, _summary(verdict, ordered), "\n".join(lines))


def _difference(verdict: Verdict) -> str:
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


def _summary(verdict: Verdict, accounts: Sequence[Account]) -> str:
    """Who is missing and what each of them does, the first few."""
    missing = [account for account in accounts if account.peer.rank in verdict.missing][:4]
    return " ".join([_head(verdict, accounts), *(f"Worker {a.peer.rank}: {_line(a)}." for a in missing)])


def some(names: Sequence[str], number: int = 3) -> str:
    """The first few of `names`, and how many more there are."""
    more = f" and {len(names) - number} more" if len(names) > number else ""
    return (", ".join(map(repr, names[:number])) or "no parameter, but the end of the step") + more


def _head(verdict: Verdict, accounts: Sequence[Account]) -> str:
    names = [str(account.peer) for account in accounts if account.peer.rank in verdict.missing]
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    have = "has" if len(names) == 1 else "have"
    if verdict.kind is Kind.ABSENT:
        return f"{listed} {have} not arrived."
    if verdict.kind is Kind.APART and len(names) == len(accounts):
        return "the workers wait for each other in different operations, and it cannot be told who is right."
    if verdict.kind is Kind.APART:
        return f"the workers wait for each other in different operations, {listed} not in that of the others."
    if verdict.kind is Kind.BEHIND:
        return f"{listed} {have} called fewer collectives than the others."
    if verdict.kind is Kind.UNHEARD:
        who = f" {listed} {'is' if len(names) == 1 else 'are'} stopped or gone." if names else ""
        return f"the place where the workers met does not answer.{who}"
    return "all workers have arrived, and the message does not get through."


def _line(account: Account) -> str:
    state = account.state
    if account.silent_s or state is None:
        seen = f"; last heard of {account.silent_s:.1f} s ago {_place(state)}" if state is not None else ""
        return f"{_silence(account)}{seen}"
    if state.waits:
        what = f"for bucket {state.bucket} of step {state.step}" if state.bucket >= 0 else f"in {state.waits}"
        return f"waiting {what} since {state.waits_s:.1f} s, at {state.at}"
    lacking = f"; its next bucket lacks the gradients of {_lacking(state)}" if state.phase is Phase.BACKWARD else ""
    return f"{_place(state)} since {state.phase_s:.1f} s, at {state.at}{lacking}"


def _lacking(state: State) -> str:
    more = state.num_lacking - len(state.lacking)
    return some(state.lacking) + (f" and {more} more" if more > 0 else "")


def _place(state: State) -> str:
    """Where in its step a worker is."""
    sent = f"{state.launched} of {state.num_buckets} buckets"
    words = {
        Phase.BETWEEN: f"outside of forward and backward passes, before step {state.step}",
        Phase.FORWARD: f"in the forward pass of step {state.step}, or behind it without loss.backward()",
        Phase.ACCUMULATING: f"in a pass under no_sync before step {state.step}",
        Phase.BACKWARD: f"in the backward pass of step {state.step}, {sent} sent",
        Phase.REDUCING: f"at the end of the backward pass of step {state.step}",
        Phase.LEFT: f"at the end of its training, after {state.step} steps",
    }
    return words[state.phase]


def _silence(account: Account) -> str:
    """Why a worker tells nothing, as far as the kernel knows."""
    silent = f"no heartbeat for {account.silent_s:.1f} s" if account.state is not None else "nothing heard of it"
    sleeps = f" in {account.sleeps_in}" if account.sleeps_in else ""
    native = "in native code that keeps the interpreter's lock"
    known = {
        "T": "stopped (process state T)",
        "t": "stopped by a debugger (process state t)",
        "Z": "ended (process state Z)",
        "X": "ended",
        "D": f"frozen: {silent}, in a system call that cannot be interrupted (process state D{sleeps})",
        "R": f"frozen: {silent} while it computes (process state R), {native}",
        "S": f"frozen: {silent} while it sleeps (process state S{sleeps}), {native}",
    }
    if account.state is None and account.process in tuple("RSD"):
        return f"{silent} (process state {account.process}{sleeps})"
    return known.get(account.process, f"{silent}: stopped, frozen or cut off, on another host")


def _advice(verdict: Verdict, accounts: Sequence[Account]) -> str:
    missing = [account for account in accounts if account.peer.rank in verdict.missing]
    if any(account.process in tuple("Tt") for account in missing):
        return "let the stopped process go on (kill -CONT PID), or end it: the others then end by themselves."
    if verdict.kind is Kind.UNHEARD:
        return "look at worker 0 or at the launcher, whichever serves the store: its process or its network is stuck."
    if verdict.kind in (Kind.APART, Kind.BEHIND):
        return (
            "make every worker call the same collectives in the same order; look for a condition that depends on the "
            "rank or on a worker's own data at the lines above."
        )
    if verdict.kind is Kind.TOGETHER:
        return "look at the network between the hosts, and for a worker that was slow until just now."
    if any(account.silent_s and not account.process for account in missing):
        return "look at the host of the worker that is silent: whether its process is stopped, and its network up."
    if any(account.silent_s for account in missing):
        return "look at the stack of the worker that is frozen, which names the call that does not return."
    return (
        "look at the line that the missing worker is at: an endless loop, slow data, or a branch that only it has "
        "taken. Every worker must come to loss.backward() in every step (with model.join(): or lockstep.shard for "
        "workers with fewer batches)."
    )
