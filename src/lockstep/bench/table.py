"""The results of a contest as lines of text."""

from collections.abc import Iterator

from lockstep.bench.catalogue import LIMITS, WORKLOADS, spelled
from lockstep.bench.interleave import Estimate
from lockstep.bench.results import Results, Row

ENOUGH_ROUNDS = 6
"""With fewer, a bootstrap interval of the median says too little."""
SAME_LOSS = {False: 1e-4, True: 1e-3}
"""Losses that differ by less, relatively, are called the same; in float32, and in bfloat16."""


def lines(results: Results) -> list[str]:
    """A heading, the table, who did not run and why, and what the numbers rest on."""
    return [*_heading(results), "", *_table(results), *_not_run(results), "", *_closing(results)]


def _heading(results: Results) -> list[str]:
    contest = results.contest
    about = WORKLOADS[contest.workload].about
    return [
        f"{contest.workload}: {about}",
        f"{results.num_params:,} parameters, {contest.workers} worker(s), {contest.batch} sample(s) per worker and "
        f"step, {'bf16 autocast' if contest.is_bf16 else 'float32'}, fused AdamW",
    ]


def _table(results: Results) -> list[str]:
    bases = "".join(f"{'to ' + base + ' (95 %)':>24}" for base in results.bases)
    return [
        f"{'':16}{'median ms':>10}{'10-90 %':>18}{bases}{'peak MB':>9}",
        *(_line(row, results.bases) for row in results.rows),
    ]


def _line(row: Row, bases: tuple[str, ...]) -> str:
    spread = f"{1e3 * row.low:.1f} - {1e3 * row.high:.1f}"
    ratios = "".join(f"{'1' if base == row.variant else _cell(row.ratios.get(base)):>24}" for base in bases)
    return f"{row.variant:16}{1e3 * row.median:10.1f}{spread:>18}{ratios}{row.entry.peak_bytes / 1e6:9.0f}"


def _cell(estimate: Estimate | None) -> str:
    return f"{estimate.median:.3f} ({estimate.low:.3f}-{estimate.high:.3f})" if estimate else "-"


def _not_run(results: Results) -> list[str]:
    if not results.not_run:
        return []
    return ["", "Not run:", *(f"  {name:16}{reason}" for name, reason in results.not_run.items())]


def _closing(results: Results) -> Iterator[str]:
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


def _losses(results: Results) -> Iterator[str]:
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
