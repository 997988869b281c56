"""Worker 0's side: puts the records of all workers together, step by step, and works out what they say.

Phases: add (a letter of some worker), settle (every step that is complete: combine, find the last, judge, measure,
write), state (what the others should know). A step is complete when every worker that is still there has told of it or
of a later one; a worker that is stuck holds back the steps it has not told of until it tells, the run ends, or so many
have piled up that they are settled without it.
"""

import collections
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from lockstep.watching.clock import Clock, offset
from lockstep.watching.combined import CombinedStep, combine
from lockstep.watching.noise import NoiseScale, norms_of, whole_of
from lockstep.watching.pace import Pace
from lockstep.watching.record import SHARES, Record
from lockstep.watching.run_writer import RunWriter, step_line
from lockstep.watching.scaling import Scaling, Speed
from lockstep.watching.straggler import Delays, Stragglers, last_of, outlier
from lockstep.watching.summary import Summary

_MOST_PENDING = 2000
_WARMUP = 3
"""The first steps are left out of the summary: they allocate, compile and count."""

Show = Callable[[Mapping[str, Any]], None]
"""Takes a line of steps.jsonl."""


class Collector:
    """What worker 0 knows of all workers."""

    def __init__(self, size: int, clock: Clock, began_ns: int, writer: RunWriter | None, shows: list[Show]) -> None:
        self._size, self._clock, self._began = size, clock, began_ns
        self._writer, self._shows = writer, shows
        self._pending: dict[int, dict[int, Record]] = {}
        self._newest = dict.fromkeys(range(size), 0)
        self._ended: set[int] = set()
        self._offsets: dict[int, int] = {}
        self._clocks: dict[int, Clock] = {0: clock}
        self._trips: dict[int, Mapping[str, list[list[int]]]] = {}
        self._delays: Delays | None = None
        self._stragglers = Stragglers()
        self._noise = NoiseScale()
        self.speed = Speed(size)
        self._totals: dict[str, float] = collections.defaultdict(float)
        self._num_counted = 0
        self._num_settled = 0

    @property
    def all_have_ended(self) -> bool:
        """Whether every worker has sent its last letter."""
        return len(self._ended) == self._size

    def add(self, rank: int, letter: Mapping[str, Any]) -> None:
        """Take a letter of worker `rank`."""
        if "clock" in letter:
            self._clocks[rank] = Clock(*letter["clock"])
            self._offsets[rank] = offset(self._clock, self._clocks[rank], -int(letter.get("ahead") or 0))
        if "trips" in letter:
            self._trips[rank] = letter["trips"]
            self._delays = self._slow_link()
        for found in letter["records"]:
            record = Record.from_json(found)
            self._pending.setdefault(record.step, {})[rank] = record
        self._newest[rank] = max(self._newest[rank], letter["newest"])
        if letter.get("end"):
            self._ended.add(rank)

    def settle(self, pace: Pace, *, at_end: bool = False) -> None:
        """Work out every step that is complete; at the end, all."""
        for step in sorted(self._pending):
            there = [rank for rank in range(self._size) if rank not in self._ended]
            is_complete = all(self._newest[rank] >= step for rank in there)
            if not (is_complete or at_end or len(self._pending) > _MOST_PENDING):
                break
            records = self._pending.pop(step)
            if pace.keeps(step) or len(records) == self._size:
                self._settle(combine(records, self._offsets))
        if self._writer is not None:
            self._writer.flush()

    def _settle(self, step: CombinedStep) -> None:
        late = last_of(step, self._delays)
        self._stragglers.see(step, late)
        scaling = self.speed.see(step)
        noted = self._noted(step)
        self._count(step, scaling)
        line = step_line(step, scaling, late, noted, self._stragglers.text, self._began)
        if self._writer is not None:
            self._writer.write_step(line)
            self._writer.write_trace(step, has_straggler=bool(self._stragglers.text))
        for show in self._shows:
            show(line)

    def _noted(self, step: CombinedStep) -> dict[str, Any]:
        notes = {worker.rank: worker.record.noted for worker in step.workers}
        samples = {worker.rank: worker.record.num_samples for worker in step.workers}
        norms, whole = norms_of(notes, samples), whole_of(notes, self._size)
        if norms is not None and whole is not None:
            self._noise.see(norms, whole)
        ended = step.workers[0].begin + step.workers[0].wall
        return {
            "time": (ended + self._clock.calendar_ns) / 1e9,
            "noise_scale": self._noise.value,
            **{name: _mean(name, notes, samples) for name in ("loss", "grad_norm", "lr")},
        }

    def _count(self, step: CombinedStep, scaling: Scaling) -> None:
        self._num_settled += 1
        if step.step <= _WARMUP < self._num_settled:
            return
        if self._num_settled == _WARMUP + 1:
            self._totals.clear()
            self._num_counted = 0
        self._num_counted += 1
        for worker in step.workers:
            self._totals["wall"] += worker.wall / len(step.workers)
            self._totals["hidden"] += worker.hidden / len(step.workers)
            for name in SHARES:
                self._totals[name] += worker.shares[name] / len(step.workers)
        for name in ("samples_per_s", "efficiency"):
            value = getattr(scaling, name)
            self._totals[name] += math.nan if value is None else value

    def summary(self) -> Summary:
        """The run so far."""
        number = max(1, self._num_counted)
        means = {f"{name}_ms": self._totals[name] / number / 1e6 for name in ("wall", "hidden", *SHARES)}
        return Summary(
            steps=max(self._newest.values()),
            **means,
            samples_per_s=self._rate("samples_per_s"),
            efficiency=self._rate("efficiency"),
            noise_scale=self._noise.value,
            verdict=self._stragglers.text,
        )

    def _rate(self, name: str) -> float | None:
        mean = self._totals[name] / max(1, self._num_counted)
        return mean if self._num_counted and math.isfinite(mean) else None

    def state(self) -> dict[str, Any]:
        """What the other workers should know."""
        return {"summary": self.summary().to_json(), "time": time.time()}

    def _slow_link(self) -> Delays | None:
        """Who stands out by the probes."""
        one_way = all(self._clock.is_same_as(clock) for clock in self._clocks.values())
        found: dict[tuple[int, int], list[int]] = {}
        for rank, by_peer in self._trips.items():
            for peer, trips in by_peer.items():
                for there, back in trips:
                    there, back = (there, back) if one_way else ((there + back) // 2, (there + back) // 2)
                    found.setdefault((rank, int(peer)), []).append(there)
                    found.setdefault((int(peer), rank), []).append(back)
        return outlier(found, self._size, are_one_way=one_way)


def _mean(name: str, notes: Mapping[int, Mapping[str, float]], samples: Mapping[int, float]) -> float | None:
    """The mean over the workers that noted it, by samples where all know theirs."""
    ranks = [rank for rank, noted in notes.items() if name in noted]
    weights = [samples[rank] for rank in ranks] if all(samples[rank] for rank in ranks) else [1.0] * len(ranks)
    if not ranks:
        return None
    value = sum(w * notes[rank][name] for w, rank in zip(weights, ranks, strict=True)) / sum(weights)
    return value if math.isfinite(value) else None
