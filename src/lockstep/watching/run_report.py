"""What a run amounts to: one pass over its steps, then plain values and the verdict. Page and command show it.

The first steps are left out of every mean (buckets are laid out and memory is found in them), as many as `num_warm_up`.
"""

import math
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import UsageError
from lockstep.watching.number_format import milliseconds, percent, some
from lockstep.watching.run_folder import NUMBERS, GenerationFacts, HangFacts, RunFacts, RunFolder, StepLine, StepTrace
from lockstep.watching.step_record import SHARES

_MOST_WARM_UP = 10
STANDS_OUT = 0.03
"""A worker that costs the others less than this part of a step is not worth a word."""
_NAMED = re.compile(r"worker (\d+) holds everyone up ")
"""How the run's own verdict names a worker: see stragglers.py."""
_MOST_TRACES = 12
"""Steps that the page shows in detail."""

Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MeanStep:
    """A worker's mean step."""

    rank: int
    wall_ms: float
    hidden_ms: float
    shares_ms: Mapping[str, float]
    """By share, every one."""


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
    was_named: bool
    """Whether the run's own verdict has: in every step somebody is last, and that test tells a habit from chance."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """What a run amounts to."""

    run: RunFacts
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
    shares: tuple[MeanStep, ...]
    """One per worker."""
    lateness: tuple[Lateness, ...]
    """Of workers that were ever waited for, the costliest first."""
    verdict: str
    """The last that the run itself said."""
    traces: tuple[StepTrace, ...]
    """A few steps in detail: a typical one first."""
    hang: HangFacts | None
    generations: tuple[GenerationFacts, ...] = ()
    """Those of an elastic run: the steps are those of the last one, the others' are in `earlier/`."""

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
        worst = next((each for each in self.lateness if each.was_named), None)
        return worst if worst is not None and worst.late_ms >= STANDS_OUT * self.step_ms else None

    def part(self, *names: str) -> float:
        """The part of all workers' time that went into these shares."""
        whole = sum(each.wall_ms for each in self.shares)
        return sum(each.shares_ms[name] for each in self.shares for name in names) / whole if whole else math.nan


def read_report(folder: RunFolder) -> RunReport:
    """Read a run; raises UsageError if nothing has happened in it yet."""
    tally = _Tally(num_warm_up=min(_MOST_WARM_UP, folder.num_lines() // 10))
    for step in folder.steps():
        tally.add(step)
    hang = folder.hang()
    if not tally.steps and hang is None:
        steps_file = folder.folder / "steps.jsonl"
        raise UsageError(
            f"none of the {folder.num_skipped} lines in '{steps_file}' can be read: the file is damaged, or something "
            f"else wrote it. Watch the run again into an empty folder."
            if folder.num_skipped
            else f"the run in '{folder.folder}' has made no step yet, so there is nothing to report. Try again after a "
            f"few steps; if it ended already, see what it printed."
        )
    order = np.argsort(np.frombuffer(tally.steps, dtype=np.int64), kind="stable")
    columns = {name: np.frombuffer(values)[order] for name, values in tally.columns.items()}
    steps = np.frombuffer(tally.steps, dtype=np.int64)[order].astype(np.float64)
    traces = _chosen(folder, steps, columns["wall_ms"], tally.num_warm_up)
    return RunReport(
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
        generations=tuple(folder.generations()),
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
        self._named: set[int] = set()
        self._late_ms: dict[int, dict[str, float]] = {}

    def add(self, line: StepLine) -> None:
        """Take a step in."""
        workers, last = line["workers"], line["last"]
        self.steps.append(line["step"])
        for name in NUMBERS:
            self.columns[name].append(_marked(line[name]))
        self.columns["late_ms"].append(last["late_ms"] if last else math.nan)
        self.columns["begin_us"].append(workers[0]["begin_us"] if workers else math.nan)
        if line["time"] is not None:
            self.first_time, self.last_time = min(self.first_time, line["time"]), max(self.last_time, line["time"])
        self.verdict = line["verdict"]
        if len(self.steps) <= self.num_warm_up:
            return
        if (named := _NAMED.match(self.verdict)) is not None:
            self._named.add(int(named[1]))
        for worker in workers:
            sums = self._sums.setdefault(worker["rank"], defaultdict(float))
            for kind, ms in worker["shares_ms"].items():
                # A kind that a later version may have is time all the same.
                sums[kind if kind in SHARES else "other"] += ms
            sums["wall"] += worker["wall_ms"]
            sums["hidden"] += worker["hidden_ms"]
            sums["steps"] += 1
        if last:
            self._times_last[last["worker"]] += 1
            self._late_ms.setdefault(last["worker"], defaultdict(float))[last["cause"]] += last["late_ms"]

    def shares(self) -> tuple[MeanStep, ...]:
        """The workers' mean steps."""
        means = {rank: {k: v / sums["steps"] for k, v in sums.items()} for rank, sums in sorted(self._sums.items())}
        return tuple(
            MeanStep(rank, mean["wall"], mean["hidden"], {kind: mean.get(kind, 0.0) for kind in SHARES})
            for rank, mean in means.items()
        )

    def lateness(self) -> tuple[Lateness, ...]:
        """The workers that were waited for, the costliest first."""
        count = max(1, len(self.steps) - self.num_warm_up)
        found = [
            Lateness(rank, self._times_last[rank] / count, sum(ms.values()) / count, _parts(ms), rank in self._named)
            for rank, ms in self._late_ms.items()
        ]
        return tuple(sorted(found, key=lambda each: -each.late_ms))


def _chosen(folder: RunFolder, steps: Numbers, wall_ms: Numbers, num_warm_up: int) -> tuple[StepTrace, ...]:
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


def _marked(value: float | None) -> float:
    if value is None:
        return math.nan
    return value if math.isfinite(value) else math.inf


def _harmonic(values: Numbers) -> float:
    values = values[values > 0]
    return float(1 / np.mean(1 / values)) if values.size else math.nan


def _parts(sums: Mapping[str, float]) -> dict[str, float]:
    whole = sum(sums.values())
    largest_first = sorted(sums.items(), key=lambda item: -item[1])
    return {key: value / whole for key, value in largest_first} if whole > 0 else {}


# The verdict

_CAUSES = {"data": "data loading", "compute": "computing", "network": "the network"}
"""What the causes are called in sentences."""

_ADVICE = {
    "data": "Give its loader more processes (num_workers), or make its samples cheaper to read: a slow disk, or "
    "samples that are larger than the others', look like this.",
    "compute": "See what else runs on its host, whether its device is throttled, and whether its samples are larger "
    "than the others'.",
    "network": "See the link of its host: its speed, what else uses it, and errors of the interface (ip -s link).",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the page begins with."""

    is_good: bool
    """Whether nothing asks for attention."""
    headline: str
    detail: str
    """More sentences, with what to do; may be empty."""


def verdict(report: RunReport) -> Verdict:
    """The run in a sentence: a hang before a straggler before none."""
    if report.hang is not None:
        return _stuck(report, report.hang)
    if report.straggler is not None:
        return _slow(report, report.straggler)
    if report.run.size == 1:
        return Verdict(True, "One worker: nobody waits for anybody.", "")
    detail = ""
    if report.lateness:
        worst = report.lateness[0]
        scatters = worst.late_ms >= STANDS_OUT * report.step_ms
        detail = (
            f"The most that any worker costs the others is {milliseconds(worst.late_ms)} a step (worker {worst.rank}), "
            f"{percent(worst.late_ms / report.step_ms)} of it{', which is how steps scatter here' * scatters}."
        )
    return Verdict(True, "Nobody holds the others up.", detail)


def _stuck(report: RunReport, hang: HangFacts) -> Verdict:
    went_on = hang.step is not None and max(report.steps.tolist(), default=0) > hang.step
    headline = "The run stood still" if went_on else "The run hung"
    if hang.step is not None:
        headline += f" at step {hang.step:,}"
    if hang.missing:
        workers = "worker" if len(hang.missing) == 1 else "workers"
        headline += f": {workers} {', '.join(map(str, hang.missing))} did not arrive{' in time' * went_on}"
    waited = ""
    if hang.bucket is not None:
        waited = f"Bucket {hang.bucket} waited for {some(hang.params) or 'its gradients'}. "
    detail = f"{waited}The workers' stacks are at the end of this page."
    return Verdict(False, f"{headline}.{' It went on later.' * went_on}", detail)


def _slow(report: RunReport, worst: Lateness) -> Verdict:
    cause, part = next(iter(worst.causes.items()), ("", 0.0))
    how_much = "all" if part > 0.995 else "most" if part > 0.5 else "the largest part"
    why = f", {how_much} of it by {_CAUSES.get(cause, cause)}" if cause else ""
    host = report.run.host(worst.rank)
    detail = (
        f"It was the last in {percent(worst.part_last)} of the steps{f' (on {host})' if host else ''}, and waiting "
        f"took {percent(report.part('waiting'))} of all workers' time."
    )
    without = report.step_ms - worst.late_ms
    if without > 0 and not math.isnan(report.samples_per_s):
        times = f"{milliseconds(without)} instead of {milliseconds(report.step_ms)}"
        detail += f" Without that, a step would take about {times}."
    headline = f"Worker {worst.rank} holds everyone up by {milliseconds(worst.late_ms)} a step{why}."
    return Verdict(False, headline, f"{detail} {_ADVICE.get(cause, '')}".strip())
