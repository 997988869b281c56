"""Who holds the others up, by how much, and why. Pure.

A worker's own time in a step is what it spends neither waiting nor communicating; clocks need not agree for that. The
one with the most is the last to be ready, and what it needs more than the median of the others is how much it is late.
Why: by which of its shares exceed the others' (data, or compute: all the rest). It must have made the others wait, or
nobody was held up.

If all are ready in time, and yet wait long for what travels, it is the network. Whose, the probes say: the worker whose
messages (or messages to it) take longer than the others' by more than what probes scatter (network.py).

One late step says nothing. A verdict needs the same worker last in four of five of the last 20 steps (or of the
last seconds, where steps are short), late by a tenth of a step in the median, and by twice what its lateness scatters;
it is dropped when that is clearly over.
"""

import collections
import statistics
from dataclasses import dataclass

from lockstep.watching.network import SlowLink
from lockstep.watching.step_record import CombinedStep

_WINDOW, _WINDOW_NS = 20, 4_000_000_000
"""Steps that count: the last 20, and where these are short, those of the last four seconds."""
_FEWEST, _FEWEST_NS = 8, 1_500_000_000
"""Steps that must have been seen before anybody is named, and how long they must have taken: a scheduler may favour one
of several processes on busy cores for a second."""
_WARMUP = 3
"""The first steps, in which memory is allocated and code compiled, say nothing."""
_LEAST_NS = 2_000_000
"""Workers on busy cores differ by a millisecond or two, for long enough to look like a habit."""
_PHRASES = {
    "data": "data loading",
    "copy": "copying to the device",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
    "other": "code outside the model",
}


@dataclass(frozen=True, slots=True)
class LateWorker:
    """The last worker of one step."""

    worker: int
    late_ns: int
    """Later than the median of the others, or for the network: what everybody lost to it."""
    cause: str
    """`data`, `compute` or `network`."""
    where: str
    """The share that exceeds the others' most, or `network`."""
    part: float
    """How much of the excess that is, from 0 to 1."""


def last_of(step: CombinedStep, slow: SlowLink | None) -> LateWorker | None:
    """Who was last in `step`; None where there is nobody to compare with."""
    if len(step.workers) < 2:
        return None
    slowest = max(step.workers, key=lambda worker: worker.own)
    others = [worker for worker in step.workers if worker is not slowest]
    late = round(slowest.own - statistics.median(worker.own for worker in others))
    lost = round(statistics.median(w.shares["exposed"] + w.shares["waiting"] for w in others))
    if slow is not None:
        behind = round(min(worker.shares["exposed"] + worker.shares["waiting"] for worker in step.workers))
        if behind > late and behind > slow.excess_ns // 2:
            return LateWorker(slow.worker, behind, "network", "network", 1.0)
    excess = {
        name: slowest.shares[name] - statistics.median(worker.shares[name] for worker in others) for name in _PHRASES
    }
    gains = {name: more for name, more in excess.items() if more > 0}
    where = max(gains, key=lambda name: gains[name], default="other")
    part = gains.get(where, 0.0) / (sum(gains.values()) or 1.0)
    return LateWorker(slowest.rank, min(late, max(lost, 0)), "data" if where == "data" else "compute", where, part)


class Stragglers:
    """The moving verdict."""

    def __init__(self) -> None:
        self._seen: collections.deque[tuple[LateWorker, int]] = collections.deque()
        """Steps that count, each with how long it took."""
        self._seen_ns = 0
        self._named: int | None = None
        self.text = ""
        """Who holds everyone up; empty if nobody does."""

    def see(self, step: CombinedStep, late: LateWorker | None) -> None:
        """Take a step into account."""
        if late is None or step.step <= _WARMUP:
            return
        self._seen.append((late, step.wall))
        self._seen_ns += step.wall
        while len(self._seen) > _WINDOW and self._seen_ns - self._seen[0][1] > _WINDOW_NS:
            self._seen_ns -= self._seen.popleft()[1]
        self._named = self._judge()
        self.text = self._sentence(self._named) if self._named is not None else ""

    def _judge(self) -> int | None:
        if len(self._seen) < _FEWEST or self._seen_ns < _FEWEST_NS:
            return None
        worker, times = collections.Counter(late.worker for late, _ in self._seen).most_common(1)[0]
        step = statistics.median(wall for _, wall in self._seen)
        late_by = [late.late_ns if late.worker == worker else -late.late_ns for late, _ in self._seen]
        typical = statistics.median(late_by)
        scatter = statistics.median(abs(each - typical) for each in late_by)
        if worker == self._named:
            is_late = times >= 0.5 * len(self._seen) and typical > max(0.06 * step, _LEAST_NS / 2, 0.5 * scatter)
        else:
            is_late = times >= 0.8 * len(self._seen) and typical > max(0.1 * step, _LEAST_NS, 2.0 * scatter)
        return worker if is_late else None

    def _sentence(self, worker: int) -> str:
        its = [late for late, _ in self._seen if late.worker == worker]
        late_ms = statistics.median(late.late_ns for late in its) / 1e6
        where = collections.Counter(late.where for late in its).most_common(1)[0][0]
        held = f"worker {worker} holds everyone up by {late_ms:.0f} ms a step"
        if where == "network":
            return f"{held}, since its messages are slow: the network"
        part = statistics.median(late.part for late in its if late.where == where)
        return f"{held}, {100 * part:.0f} % of it in {_PHRASES[where]}"
