"""What a run amounts to: one pass over its steps, then plain values. The page and the command line say it in words.

The first steps are left out of every mean (buckets are laid out and memory is found in them), as many as `num_warm_up`.
"""

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UsageError
from lockstep.watching.run_folder import RunFolder
from lockstep.watching.run_record import KINDS, NUMBERS, Hang, Run, Step, Trace

_MOST_WARM_UP = 10
_STANDS_OUT = 0.03
"""A worker that costs the others less than this part of a step is not worth a word."""
_MOST_TRACES = 12
"""Steps that the page shows in detail."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shares:
    """A worker's mean step."""

    rank: int
    wall_ms: float
    hidden_ms: float
    shares_ms: Mapping[str, float]
    """By kind, every kind."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """How a worker held the others up."""

    rank: int
    part_last: float
    """The part of the steps in which the others waited for it."""
    late_ms: float
    """What it cost per step, over all steps."""
    causes: Mapping[str, float]
    """The part of that cost by cause: data, compute, network."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a run amounts to."""

    run: Run
    steps: Numbers
    """The steps' numbers, ascending."""
    columns: Mapping[str, Numbers]
    """By name (`NUMBERS` and late_ms), one value per step: nan where none was written, inf where it was not finite."""
    begins_us: Numbers
    """When each step began on the first worker that reported it."""
    seconds: float
    """From the end of the first step to the end of the last one."""
    num_warm_up: int
    """Steps at the beginning that are left out of means."""
    num_skipped: int
    """Lines of the folder that could not be read."""
    shares: tuple[Shares, ...]
    """One per worker."""
    lateness: tuple[Lateness, ...]
    """Of workers that were ever waited for, the costliest first."""
    verdict: str
    """The last that the run itself said."""
    traces: tuple[Trace, ...]
    """A few steps in detail: a typical one first."""
    hang: Hang | None

    def settled(self, name: str) -> Numbers:
        """A column without the first steps and without gaps."""
        values = self.columns[name][self.num_warm_up :]
        return values[np.isfinite(values)]

    @property
    def step_ms(self) -> float:
        """The mean step; nan if there is none."""
        values = self.settled("wall_ms")
        return float(values.mean()) if values.size else math.nan

    @property
    def samples_per_s(self) -> float:
        """Over all settled steps, which is the harmonic mean; nan if not known."""
        return _harmonic(self.settled("samples_per_s"))

    @property
    def efficiency(self) -> float:
        """T_1/T_N of the mean step; nan if not known."""
        return _harmonic(self.settled("efficiency"))

    @property
    def straggler(self) -> Lateness | None:
        """Who stands out, if anybody does."""
        worst = self.lateness[0] if self.lateness else None
        return worst if worst is not None and worst.late_ms >= _STANDS_OUT * self.step_ms else None

    def part(self, *kinds: str) -> float:
        """The part of all workers' time that went into these kinds."""
        whole = sum(each.wall_ms for each in self.shares)
        return sum(each.shares_ms[kind] for each in self.shares for kind in kinds) / whole if whole else math.nan


def report(folder: RunFolder) -> Report:
    """Read a run; raises UsageError if nothing has happened in it yet."""
    tally = _Tally(num_warm_up=min(_MOST_WARM_UP, folder.num_lines() // 10))
    for step in folder.steps():
        tally.add(step)
    hang = folder.hang()
    if not tally.steps and hang is None:
        raise _empty(folder)
    order = np.argsort(np.frombuffer(tally.steps, dtype=np.int64), kind="stable")
    columns = {name: np.frombuffer(values)[order] for name, values in tally.columns.items()}
    steps = np.frombuffer(tally.steps, dtype=np.int64)[order].astype(np.float64)
    traces = _chosen(folder, steps, columns["wall_ms"], tally.num_warm_up)
    return Report(
        run=folder.run,
        steps=steps,
        columns={name: columns[name] for name in (*NUMBERS, "late_ms")},
        begins_us=columns["begin_us"],
        seconds=max(0.0, tally.last_time - tally.first_time),
        num_warm_up=tally.num_warm_up,
        num_skipped=folder.num_skipped,
        shares=tally.shares(),
        lateness=tally.lateness(),
        verdict=tally.verdict,
        traces=traces,
        hang=hang,
    )


class _Tally:
    """Sums over the steps seen so far."""

    def __init__(self, num_warm_up: int) -> None:
        self.num_warm_up = num_warm_up
        self.steps = array("q")
        self.columns = {name: array("d") for name in (*NUMBERS, "late_ms", "begin_us")}
        self.first_time, self.last_time, self.verdict = math.inf, -math.inf, ""
        self._sums: dict[int, dict[str, float]] = {}
        self._times_last: Counter[int] = Counter()
        self._late_ms: dict[int, dict[str, float]] = {}

    def add(self, step: Step) -> None:
        """Take a step in."""
        self.steps.append(step.step)
        for name, value in step.numbers.items():
            self.columns[name].append(_marked(value))
        self.columns["late_ms"].append(math.nan if step.last is None else step.last.late_ms)
        self.columns["begin_us"].append(step.workers[0].begin_us if step.workers else math.nan)
        if step.time is not None:
            self.first_time, self.last_time = min(self.first_time, step.time), max(self.last_time, step.time)
        self.verdict = step.verdict
        if len(self.steps) > self.num_warm_up:
            self._add_times(step)

    def _add_times(self, step: Step) -> None:
        for worker in step.workers:
            sums = self._sums.setdefault(worker.rank, defaultdict(float))
            for kind, ms in worker.shares_ms.items():
                # A kind that a later version may have is time all the same.
                sums[kind if kind in KINDS else "other"] += ms
            sums["wall"] += worker.wall_ms
            sums["hidden"] += worker.hidden_ms
            sums["steps"] += 1
        if step.last is not None:
            self._times_last[step.last.worker] += 1
            causes = self._late_ms.setdefault(step.last.worker, defaultdict(float))
            causes[step.last.cause] += step.last.late_ms

    def shares(self) -> tuple[Shares, ...]:
        """The workers' mean steps."""
        means = {rank: {k: v / sums["steps"] for k, v in sums.items()} for rank, sums in sorted(self._sums.items())}
        return tuple(
            Shares(rank, mean["wall"], mean["hidden"], {kind: mean.get(kind, 0.0) for kind in KINDS})
            for rank, mean in means.items()
        )

    def lateness(self) -> tuple[Lateness, ...]:
        """The workers that were waited for, the costliest first."""
        count = max(1, len(self.steps) - self.num_warm_up)
        found = [
            Lateness(rank, self._times_last[rank] / count, sum(ms.values()) / count, _parts(ms))
            for rank, ms in self._late_ms.items()
        ]
        return tuple(sorted(found, key=lambda each: -each.late_ms))


def _chosen(folder: RunFolder, steps: Numbers, wall_ms: Numbers, num_warm_up: int) -> tuple[Trace, ...]:
    """Steps to show in detail: a typical one, the slowest, the first, and others spread over the run."""
    places = folder.trace_places()
    if not places:
        return ()
    there = np.array(sorted(places))
    took = dict(zip(steps.tolist(), wall_ms.tolist(), strict=True))
    settled = [step for step in there if step >= (steps[num_warm_up] if steps.size else 0)] or list(there)
    by_time = sorted(settled, key=lambda step: took.get(step, math.inf))
    spread = [there[np.abs(there - step).argmin()] for step in np.linspace(there[0], there[-1], _MOST_TRACES)]
    middle = np.median(steps) if steps.size else 0
    late = [step for step in by_time if step >= middle] or by_time
    wanted = dict.fromkeys(map(int, [late[len(late) // 2], by_time[-1], there[0], *spread]))
    return tuple(folder.trace_at(places[step]) for step in list(wanted)[:_MOST_TRACES])


def _empty(folder: RunFolder) -> UsageError:
    if folder.num_skipped:
        return UsageError(
            f"none of the {folder.num_skipped} lines in '{folder.folder / 'steps.jsonl'}' can be read: the file is "
            f"damaged, or something else wrote it. Watch the run again into an empty folder."
        )
    return UsageError(
        f"the run in '{folder.folder}' has made no step yet, so there is nothing to report. Try again after a few "
        f"steps; if it ended already, see what it printed."
    )


def _marked(value: float | None) -> float:
    if value is None:
        return math.nan
    return value if math.isfinite(value) else math.inf


def _harmonic(values: Numbers) -> float:
    values = values[values > 0]
    return float(1 / np.mean(1 / values)) if values.size else math.nan


def _parts(sums: Mapping[str, float]) -> dict[str, float]:
    whole = sum(sums.values())
    return {key: value / whole for key, value in sorted(sums.items(), key=_size)} if whole > 0 else {}


def _size(item: tuple[str, float]) -> float:
    return -item[1]


def first_not_finite(steps: Numbers, values: Numbers) -> tuple[int, int] | None:
    """How many values were not finite, and at which step the first was; None if all were."""
    places = np.flatnonzero(np.isinf(values))
    return (places.size, int(steps[places[0]])) if places.size else None


def ranks_of(traces: Iterable[Trace]) -> set[int]:
    """The workers that the traces show."""
    return {worker.rank for trace in traces for worker in trace.workers}
