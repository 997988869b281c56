"""Worker 0's side: puts the records of all workers together, step by step, and works out what they say.

Phases: add (a letter of some worker), settle (every step that is complete: combine, find the last, judge, measure,
write) and say what everybody should know. A step is complete when every worker that is still there has told of it or
of a later one; a worker that is stuck holds back the steps it has not told of until it tells, the run ends, or so many
have piled up that they are settled without it.
"""

import collections
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.watching.efficiency import SpeedTracker, StepSpeed
from lockstep.watching.live import View
from lockstep.watching.network import HostClock, Network
from lockstep.watching.noise import NoiseScale
from lockstep.watching.run_writer import RunWriter, step_line
from lockstep.watching.step_record import SHARES, CombinedStep, StepRecord, combine, is_recorded
from lockstep.watching.stragglers import Stragglers, last_of

_MOST_PENDING = 2000
_MOST_USED, _LITTLE_USED = 0.006, 0.001
"""Parts of a core that worker 0's thread uses: above the one, fewer steps are recorded; below the other, more."""
_PACE_LOOKS_S = 5.0
"""How long is looked before the pace is changed."""
_LARGEST_PACE = 1024
_RATES = ("samples_per_s", "efficiency")
_WARMUP = 3
"""The first steps are left out of the summary: they allocate, compile and count."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A run so far: the mean over workers and steps, the first three left out, in milliseconds a step."""

    steps: int = 0
    """How many steps have been seen so far."""
    wall_ms: float = 0.0
    """A step. The shares below, except `hidden_ms`, add up to it."""
    data_ms: float = 0.0
    """Waiting for the next batch to be loaded."""
    copy_ms: float = 0.0
    """Moving batches to the device."""
    forward_ms: float = 0.0
    """In the model and the loss."""
    backward_ms: float = 0.0
    """In the backward pass, with what of the communication is hidden under it."""
    exposed_ms: float = 0.0
    """Communication that nothing hid."""
    waiting_ms: float = 0.0
    """Waiting for other workers' gradients."""
    optimizer_ms: float = 0.0
    """In the optimizer's step."""
    other_ms: float = 0.0
    """Everything else in the loop."""
    hidden_ms: float = 0.0
    """Communication under the backward pass; not part of the sum."""
    samples_per_s: float | None = None
    """Of all workers together."""
    efficiency: float | None = None
    """T_1 / T_N, from 0 to 1: see watching/efficiency.py."""
    noise_scale: float | None = None
    """In samples: see watching/noise.py."""
    verdict: str = ""
    """Who holds everyone up; empty if nobody does."""

    def __str__(self) -> str:
        """One line, and a second one if somebody is slow."""
        parts = [(name, getattr(self, f"{name}_ms")) for name in SHARES]
        shown = [f"{name} {100 * ms / self.wall_ms:.0f} %" for name, ms in parts if ms >= 0.005 * self.wall_ms > 0]
        line = f"{self.steps} steps, {self.wall_ms:.1f} ms each: {', '.join(shown)}"
        if self.hidden_ms >= 0.005 * self.wall_ms > 0:
            line += f"; {self.hidden_ms:.1f} ms of communication hidden"
        if self.efficiency is not None:
            line += f"; efficiency {100 * self.efficiency:.0f} %"
        return "\n".join(filter(None, (line, self.verdict)))


@dataclass(frozen=True, slots=True)
class Known:
    """What worker 0 makes of the run, for all workers to know."""

    summary: Summary = Summary()
    num_complete: int = 0
    """The last step of which all workers that are still there have told."""
    every: int = 1
    """One of so many steps is recorded, see `Pace`."""
    is_last: bool = False
    """Whether no more will follow."""

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "Known":
        """What was written with `dataclasses.asdict`."""
        return cls(**{**found, "summary": Summary(**found["summary"])})


class Pace:
    """Which steps are recorded: all, until that takes more of worker 0's time than watching may cost.

    A step's record costs worker 0 some tenths of a millisecond for each worker. That is nothing for steps of a second,
    and a lot for a hundred workers with steps of ten milliseconds. So worker 0 looks what its thread uses, and doubles
    or halves the distance between recorded steps; the others follow what it publishes.
    """

    def __init__(self) -> None:
        self.every = 1
        """One of so many is recorded: a power of two, so that the steps with norms (see noise.py) are among them."""
        self._since_s = self._used_s = 0.0

    def see(self, now_s: float, used_s: float) -> None:
        """At `now_s`, worker 0's thread has used the processor for `used_s` in all."""
        lasted = now_s - self._since_s
        if lasted < _PACE_LOOKS_S:
            return
        part = (used_s - self._used_s) / lasted
        if self._since_s and part > _MOST_USED:
            self.every = min(2 * self.every, _LARGEST_PACE)
        elif self._since_s and part < _LITTLE_USED:
            self.every = max(1, self.every // 2)
        self._since_s, self._used_s = now_s, used_s


class Collector:
    """What worker 0 knows of all workers. Called by its background thread alone, `close` when that has ended."""

    def __init__(
        self, size: int, began_ns: int, speed: SpeedTracker, writer: RunWriter | None, views: Sequence[View]
    ) -> None:
        self._began = began_ns
        self._writer = writer
        self.views = list(views)
        """Who is shown every step; another may come while the run goes on."""
        self._pending: dict[int, dict[int, StepRecord]] = {}
        self._newest = dict.fromkeys(range(size), 0)
        self._ended: set[int] = set()
        self._network = Network(size, HostClock.mine())
        self._stragglers = Stragglers()
        self._noise = NoiseScale()
        self._speed = speed
        self._means = _Means()
        self._pace = Pace()

    @property
    def all_have_ended(self) -> bool:
        """Whether every worker has sent its last letter."""
        return len(self._ended) == len(self._newest)

    def add(self, rank: int, letter: Mapping[str, Any]) -> None:
        """Take a letter of worker `rank`, as its `Background` has written it."""
        self._network.add(rank, HostClock(*letter["clock"]), letter.get("ahead"), letter.get("trips") or {})
        for found in letter["records"]:
            record = StepRecord.from_json(found)
            self._pending.setdefault(record.step, {})[rank] = record
        self._newest[rank] = max(self._newest[rank], letter["newest"])
        if letter["end"]:
            self._ended.add(rank)

    def settle(self, *, at_end: bool = False) -> Known:
        """Work out every step that is complete, of those that are recorded (at the end, all); what is known then."""
        there = [newest for rank, newest in self._newest.items() if rank not in self._ended]
        num_complete = min(there, default=max(self._newest.values()))
        for step in sorted(self._pending):
            if not (step <= num_complete or at_end or len(self._pending) > _MOST_PENDING):
                break
            records = self._pending.pop(step)
            # One that only some have told of, while the pace changed, is left out.
            if is_recorded(step, self._pace.every) or len(records) == len(self._newest):
                self._settle(combine(records, self._network.offsets))
        if self._writer is not None:
            self._writer.flush()
            self._writer.write_run(self._speed.single_step_ns)
        self._pace.see(time.monotonic(), time.thread_time())
        summary = Summary(
            steps=max(self._newest.values()),
            **self._means.values(),
            noise_scale=self._noise.value,
            verdict=self._stragglers.text,
        )
        return Known(summary, num_complete, self._pace.every, at_end)

    def close(self) -> None:
        """The run is over: write what is left."""
        for view in self.views:
            view.close()
        if self._writer is not None:
            self._writer.close(self._speed.single_step_ns)

    def _settle(self, step: CombinedStep) -> None:
        late = last_of(step, self._network.slow)
        self._stragglers.see(step, late)
        speed = self._speed.see(step)
        self._means.see(step, speed)
        notes = {worker.rank: worker.record.noted for worker in step.workers}
        samples = {worker.rank: worker.record.num_samples for worker in step.workers}
        if len(step.workers) == len(self._newest):
            self._noise.see(notes, samples)
        first = step.workers[0]
        noted = {
            "time": (first.begin + first.record.wall + self._network.clock.calendar_ns) / 1e9,
            "noise_scale": None if self._noise.value is None else float(f"{self._noise.value:.6g}"),
            **{name: _mean(name, notes, samples) for name in ("loss", "grad_norm", "lr")},
        }
        line = step_line(step, speed, late, noted, self._stragglers.text, self._began)
        if self._writer is not None:
            self._writer.write_step(line, step, has_straggler=bool(self._stragglers.text))
        for view in self.views:
            view.show(line)


class _Means:
    """Means over workers and steps; the first steps count until there are others."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = collections.defaultdict(float)
        self._num_counted = 0
        self._num_seen = 0

    def see(self, step: CombinedStep, speed: StepSpeed) -> None:
        """Take a step into account."""
        self._num_seen += 1
        if step.step <= _WARMUP < self._num_seen:
            return
        if self._num_seen == _WARMUP + 1:
            self._totals.clear()
            self._num_counted = 0
        self._num_counted += 1
        for worker in step.workers:
            times = {"wall": worker.record.wall, "hidden": worker.hidden, **worker.shares}
            for name, ns in times.items():
                self._totals[f"{name}_ms"] += ns / 1e6 / len(step.workers)
        for name in _RATES:
            # Of the mean step, as on the page of a run: slow steps count by how long they took.
            self._totals[name] += 1 / value if (value := getattr(speed, name)) else math.nan

    def values(self) -> dict[str, Any]:
        """By the names of Summary's fields; a rate that was not known in every step is None."""
        means = {name: total / self._num_counted for name, total in self._totals.items()}
        rates = {name: 1 / means[name] if math.isfinite(means[name]) else None for name in _RATES if name in means}
        return {**means, **rates}


def _mean(name: str, notes: Mapping[int, Mapping[str, float]], samples: Mapping[int, float]) -> float | None:
    """The mean over the workers that noted it, by samples where all know theirs."""
    ranks = [rank for rank, noted in notes.items() if name in noted]
    weights = [samples[rank] for rank in ranks] if all(samples[rank] for rank in ranks) else [1.0] * len(ranks)
    if not ranks:
        return None
    value = sum(w * notes[rank][name] for w, rank in zip(weights, ranks, strict=True)) / sum(weights)
    return value if math.isfinite(value) else None
