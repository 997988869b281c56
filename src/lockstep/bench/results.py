"""What a contest found: times, ratios, memory, and who could not take part."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.bench import catalogue, interleave
from lockstep.bench.contest import Contest
from lockstep.bench.interleave import Estimate


@dataclass(frozen=True, slots=True)
class Entry:
    """What the trial of a variant found, before anything was timed; the largest over the workers."""

    peak_bytes: int
    """By how much the memory of a worker grew at most, from before the variant was made to the end of its first steps;
    activations and all."""
    held_bytes: int
    """How much of that it kept."""
    loss: float
    """After the first steps, the mean over the workers: the same for all who did the same work."""


@dataclass(frozen=True, slots=True)
class Heat:
    """What was measured in one run, in which its variants took turns."""

    machine: Mapping[str, str | int]
    """What it ran on."""
    rounds: str
    """How many rounds count, and how busy the machine was with other things; a line for each crew."""
    num_params: int
    seconds: Mapping[str, Sequence[float]]
    """By variant: the time of a step, until the last worker was done, in the rounds that count."""
    entries: Mapping[str, Entry]
    failed: Mapping[str, str]
    """By variant: why it could not take part."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was found for one variant."""

    variant: str
    heat: int
    """The number of the run that its times are from: the first that it took part in."""
    low: float
    median: float
    high: float
    """10 %, 50 % and 90 % quantile of its times, in seconds."""
    ratios: Mapping[str, Estimate]
    """Its time in units of each base's, compared within rounds."""
    entry: Entry


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was found for one contest."""

    contest: Contest
    date: str
    versions: Mapping[str, str]
    """Of the peers that are installed."""
    bases: tuple[str, ...]
    """What the others are compared with: the limit, and torch's DDP."""
    rows: tuple[Row, ...]
    not_run: Mapping[str, str]
    """By variant: why it could not take part."""
    heats: tuple[Heat, ...]

    @property
    def num_params(self) -> int:
        """Of the model."""
        return self.heats[0].num_params if self.heats else 0


def collect(contest: Contest, date: str, missing: Mapping[str, str], heats: Sequence[Heat]) -> Results:
    """The results of all heats of a contest, in its order of variants."""
    not_run = {**missing, **{name: reason for heat in heats for name, reason in heat.failed.items()}}
    measured = [name for name in contest.variants if any(name in heat.seconds for heat in heats)]
    rows = tuple(_row(name, _bases(measured, heats), heats) for name in measured)
    ordered = {name: not_run[name] for name in contest.variants if name in not_run and name not in measured}
    return Results(contest, date, catalogue.versions(), _bases(measured, heats), rows, ordered, tuple(heats))


def joined(heats: Sequence[Heat]) -> Heat:
    """What was found by several crews in turn, as one; a variant that failed in one of them counts in none."""
    first = heats[0]
    failed = {name: reason for heat in heats for name, reason in heat.failed.items()}
    names = [name for name in first.seconds if all(name in heat.seconds for heat in heats)]
    seconds = {name: [time for heat in heats for time in heat.seconds[name]] for name in names}
    rounds = "\n".join(heat.rounds for heat in heats)
    return dataclasses.replace(first, rounds=rounds, seconds=seconds, failed=failed)


def as_json(results: Sequence[Results]) -> str:
    """All of it as text, for programs."""
    return json.dumps([_plain(each) for each in results], indent=1) + "\n"


def _plain(results: Results) -> dict[str, Any]:
    return {"workload": results.contest.workload, **dataclasses.asdict(results)}


def _bases(measured: Sequence[str], heats: Sequence[Heat]) -> tuple[str, ...]:
    """What can be compared with: who was in every heat in which there was anybody."""
    wanted = catalogue.bases(measured) if measured else []
    return tuple(base for base in wanted if all(base in heat.seconds for heat in heats if heat.seconds))


def _row(name: str, bases: Sequence[str], heats: Sequence[Heat]) -> Row:
    number, heat = next((number, heat) for number, heat in enumerate(heats) if name in heat.seconds)
    times = interleave.as_times(heat.seconds)
    low, median, high = interleave.spread(times[name])
    ratios = {base: interleave.compare(times, interleave.ratio, name, base) for base in bases if base in times}
    return Row(name, number, low, median, high, ratios, heat.entries[name])
