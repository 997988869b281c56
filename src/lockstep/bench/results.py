"""What a contest found: times, ratios, memory, and who could not take part; as lines of text, and for programs."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lockstep import terminal
from lockstep.bench import catalogue, interleave
from lockstep.bench.catalogue import LIMITS, WORKLOADS, spelled
from lockstep.bench.interleave import Estimate
from lockstep.bench.request import Contest

ENOUGH_ROUNDS = 6
"""With fewer, a bootstrap interval of the median says too little."""
SAME_LOSS = {False: 1e-4, True: 1e-3}
"""Losses that differ by less, relatively, are called the same; in float32, and in bfloat16."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What the trial of a variant found, before anything was timed; the largest over the workers."""

    peak_bytes: int
    """By how much the memory of a worker grew at most, from before the variant was made to the end of its first steps;
    activations and all."""
    loss: float
    """After the first steps, the mean over the workers: the same for all who did the same work."""


@dataclass(frozen=True, slots=True)
class Heat:
    """What was measured in one run, in which its variants took turns."""

    machine: Mapping[str, str | int]
    """What it ran on."""
    rounds: str
    """How many rounds count, and how busy the machine was with other things; a line for each crew."""
    seconds: Mapping[str, Sequence[float]]
    """By variant: the time of a step, until the last worker was done, in the rounds that count."""
    entries: Mapping[str, Entry]
    failed: Mapping[str, str]
    """By variant: why it could not take part."""


@dataclass(frozen=True, slots=True)
class VariantRow:
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
class ContestResults:
    """Everything that was found for one contest."""

    contest: Contest
    date: str
    versions: Mapping[str, str]
    """Of the peers that are installed."""
    bases: tuple[str, ...]
    """What the others are compared with: the limit, and torch's DDP."""
    rows: tuple[VariantRow, ...]
    not_run: Mapping[str, str]
    """By variant: why it could not take part."""
    heats: tuple[Heat, ...]


def collect(contest: Contest, date: str, missing: Mapping[str, str], heats: Sequence[Heat]) -> ContestResults:
    """The results of all heats of a contest, in its order of variants."""
    not_run = {**missing, **{name: reason for heat in heats for name, reason in heat.failed.items()}}
    measured = [name for name in contest.variants if any(name in heat.seconds for heat in heats)]
    rows = tuple(_row(name, _bases(measured, heats), heats) for name in measured)
    ordered = {name: not_run[name] for name in contest.variants if name in not_run and name not in measured}
    return ContestResults(contest, date, catalogue.versions(), _bases(measured, heats), rows, ordered, tuple(heats))


def joined(heats: Sequence[Heat]) -> Heat:
    """What was found by several crews in turn, as one; a variant that failed in one of them counts in none."""
    first = heats[0]
    failed = {name: reason for heat in heats for name, reason in heat.failed.items()}
    names = [name for name in first.seconds if all(name in heat.seconds for heat in heats)]
    seconds = {name: [time for heat in heats for time in heat.seconds[name]] for name in names}
    rounds = "\n".join(heat.rounds for heat in heats)
    return dataclasses.replace(first, rounds=rounds, seconds=seconds, failed=failed)


def as_json(results: Sequence[ContestResults]) -> str:
    """All of it as text, for programs."""
    plain = [{"workload": each.contest.workload, **dataclasses.asdict(each)} for each in results]
    return json.dumps(plain, indent=1) + "\n"


def _bases(measured: Sequence[str], heats: Sequence[Heat]) -> tuple[str, ...]:
    """What can be compared with: who was in every heat in which there was anybody."""
    wanted = catalogue.bases(measured) if measured else []
    return tuple(base for base in wanted if all(base in heat.seconds for heat in heats if heat.seconds))


def _row(name: str, bases: Sequence[str], heats: Sequence[Heat]) -> VariantRow:
    number, heat = next((number, heat) for number, heat in enumerate(heats) if name in heat.seconds)
    times = {each: np.asarray(seconds) for each, seconds in heat.seconds.items()}
    low, median, high = interleave.spread(times[name])
    ratios = {base: interleave.compare(times, interleave.ratio, name, base) for base in bases if base in times}
    return VariantRow(name, number, low, median, high, ratios, heat.entries[name])


# As text


def lines(results: ContestResults) -> list[str]:
    """A heading, the table, who did not run and why, and what the numbers rest on."""
    contest = results.contest
    heading = [
        f"{contest.workload}: {WORKLOADS[contest.workload].about}",
        f"{contest.workers} worker(s), {contest.batch} sample(s) per worker and step, "
        f"{'bf16 autocast' if contest.is_bf16 else 'float32'}, fused AdamW",
    ]
    header = ["", "median ms", "10-90 %", *(f"to {base} (95 %)" for base in results.bases), "peak MB"]
    table = terminal.table(header, [_cells(row, results.bases) for row in results.rows])
    failed = [f"  {name:16}{reason}" for name, reason in results.not_run.items()]
    not_run = ["", "Not run:", *failed] if failed else []
    return [*heading, "", *table, *not_run, "", *_closing(results)]


def _cells(row: VariantRow, bases: Sequence[str]) -> list[str]:
    spread = f"{1e3 * row.low:.1f} - {1e3 * row.high:.1f}"
    found = [row.ratios.get(base) for base in bases]
    ratios = [str(each) if each else "-" for each in found]
    ratios = ["1" if base == row.variant else ratio for base, ratio in zip(bases, ratios, strict=True)]
    return [row.variant, f"{1e3 * row.median:.1f}", spread, *ratios, f"{row.entry.peak_bytes / 1e6:.0f}"]


def _closing(results: ContestResults) -> Iterator[str]:
    gpu = results.contest.device == "cuda"
    yield "peak MB: by how much a worker's memory grew at most, from before the variant was made to the end of its"
    yield f"first steps: {'what torch has allocated on the GPU' if gpu else 'its proportional set size'}."
    yield from _losses(results)
    # Where fewer than half were quiet, some of those that count may have been disturbed too.
    enough = max(ENOUGH_ROUNDS, results.contest.crews * results.contest.steps / 2)
    for number, heat in enumerate(results.heats, 1):
        for line in heat.rounds.splitlines():
            yield (f"heat {number}: " if len(results.heats) > 1 else "") + line
    if any(len(times) < enough for heat in results.heats for times in heat.seconds.values()):
        yield "That is too few quiet rounds to rely on any ratio: give more --steps, or a quieter machine."
    facts = {**(results.heats[0].machine if results.heats else {}), **results.versions, "date": results.date}
    facts.pop("backend", None)  # Each variant has its own.
    yield ", ".join(f"{name}: {fact}" for name, fact in facts.items())


def _losses(results: ContestResults) -> Iterator[str]:
    """Whether all did the same work: who trains together ends with one loss, whatever the way."""
    together = [row for row in results.rows if spelled(row.variant).kind not in LIMITS]
    base = next((row for row in together if row.variant in results.bases), None)
    if base is None or len(together) < 2 or results.contest.workers < 2:
        return
    same = SAME_LOSS[results.contest.is_bf16]
    apart = {row.variant: abs(row.entry.loss / base.entry.loss - 1) for row in together}
    others = [f"{name} ({distance:.1e})" for name, distance in apart.items() if not distance < same]
    but = f", but for {', '.join(others)}" if others else ""
    yield f"Loss after the first steps: as {base.variant}'s within {same:.0e} for all that communicate{but}."
