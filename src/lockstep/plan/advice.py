"""What to choose, and why: each choice with its reason in a sentence, and what comes second.

Nothing here is a rule of thumb but the learning rate's: every other choice is what the simulation or the memory's
arithmetic says of each candidate. A choice that gains less than `WORTH` is not worth leaving the simpler one for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.plan import memory, timing
from lockstep.plan.machine import Machine
from lockstep.plan.memory import Memory
from lockstep.plan.timing import Choices, Speed
from lockstep.plan.workload import Checkpointing, Workload
from lockstep.watching.number_format import number, percent, size

WORTH = 0.02
"""By so much a choice must be faster to be taken instead of a simpler one."""
WIRE_WORTH = 0.05
"""The same for a wire, which costs exactness."""
LEAST_EFFICIENCY = 0.8
"""Of what another doubling of the workers must still give, for it to be advised."""
BUCKETS_MB = (1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0)


@dataclass(frozen=True, slots=True)
class Advice:
    """One choice."""

    topic: str
    choice: str
    reason: str
    runner_up: str
    """What comes second, and by how much; "" where there is nothing else."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train the batch: what it holds and how fast it is."""

    workload: Workload
    memory: Memory
    speed: Speed

    @property
    def name(self) -> str:
        """In the words of the arguments."""
        kept = "" if self.workload.checkpointing == "none" else f", {self.workload.checkpointing} checkpointing"
        return f"zero={self.workload.zero}, micro-batch {self.workload.micro_batch}{kept}"


def ways(
    workload: Workload,
    machine: Machine,
    choices: Choices,
    *,
    zero: int | None = None,
    micro_batch: int | None = None,
    checkpointing: Checkpointing | None = None,
) -> list[Way]:
    """The ways to train `workload`'s batch, what is given being fixed: those that fit first, the fastest first.

    Of each split and checkpointing the largest micro-batch that fits, half and a quarter of it; 1 where none fits.
    """
    stages = [zero] if zero is not None else [*range(4 if machine.workers > 1 else 1)]
    kept: list[Checkpointing] = ["none"]
    if any(layer.attention_bytes for layer in workload.layers):
        kept.append("selective")
    if workload.num_blocks():
        kept.append("full")
    found = []
    for stage in stages:
        for each in kept if checkpointing is None else [checkpointing]:
            way = replace(workload, zero=stage, checkpointing=each)
            largest = micro_batch or max(1, memory.largest_micro_batch(way, machine))
            micros = {largest} if micro_batch else {max(1, largest // part) for part in (1, 2, 4)}
            for micro in sorted(micros, reverse=True):
                cut = way.trained_by(machine.workers, micro)
                found.append(
                    Way(cut, memory.estimate(cut, machine), timing.speed(cut, machine, choices, batch=cut.batch))
                )
    fastest = max(way.speed.units_per_s for way in found)
    # Within WORTH of each other the simpler one comes first.
    return sorted(
        found,
        key=lambda way: (
            not way.memory.fits,
            way.memory.total if not way.memory.fits else 0.0,
            -math.floor(math.log(way.speed.units_per_s / fastest) / WORTH + 0.5),
            way.workload.zero,
            way.workload.checkpointing != "none",
            -way.workload.micro_batch,  # What small ones cost in launches of kernels is not in the simulation.
            -way.speed.units_per_s,
        ),
    )


def advise(
    found: Sequence[Way],
    machine: Machine,
    choices: Choices,
    *,
    noise_scale: float | None = None,
    base_lr: float | None = None,
    base_batch: int | None = None,
) -> list[Advice]:
    """All advice, for the first of `ways`."""
    best = found[0]
    return [
        _way(found),
        *(_bucket(best, machine, choices), _wire(best, machine, choices)) * (machine.workers > 1),
        _workers(best, machine, choices),
        _batch(best, noise_scale),
        _learning_rate(best.workload, noise_scale, base_lr, base_batch),
    ]


def _way(found: Sequence[Way]) -> Advice:
    best = found[0]
    room, needs = size(best.memory.capacity), size(best.memory.total)
    unit = best.workload.unit
    if not best.memory.fits:
        return Advice(
            "split",
            best.name,
            f"nothing fits: even this needs {needs} of {room}. More workers, shorter samples or a smaller model.",
            "",
        )
    others = [way for way in found[1:] if way.workload.zero != best.workload.zero or _kept(way) != _kept(best)]
    fitting = next((way for way in others if way.memory.fits), None)
    steps = f"{best.workload.accumulation} micro-batches a step" if best.workload.accumulation > 1 else "one a step"
    simpler = [way for way in others if (way.workload.zero, _kept(way)) < (best.workload.zero, _kept(best))]
    too_large = min((way for way in simpler if not way.memory.fits), key=lambda way: way.memory.total, default=None)
    reason = f"it needs {needs} of {room}, {steps}, and makes {number(best.speed.units_per_s)} {unit}/s"
    if too_large is not None:
        reason += f"; {too_large.name} would need {size(too_large.memory.total)}"
    second = ""
    if fitting is not None:
        second = (
            f"{fitting.name}: {percent(fitting.speed.units_per_s / best.speed.units_per_s)} of its speed, "
            f"{size(fitting.memory.total)}"
        )
    return Advice("split", best.name, reason + ".", second)


def _kept(way: Way) -> int:
    return ("none", "selective", "full").index(way.workload.checkpointing)


def _tried(
    best: Way, machine: Machine, candidates: Sequence[tuple[str, Choices]], worth: float
) -> tuple[str, str, dict[str, float]]:
    """The fastest candidate, or the first where that is as good; the one after it; and seconds of a step of each."""
    seconds = {name: timing.speed(best.workload, machine, choices).times.step_s for name, choices in candidates}
    usual = candidates[0][0]
    fastest = min(seconds, key=seconds.__getitem__)
    chosen = fastest if seconds[fastest] < seconds[usual] * (1 - worth) else usual
    second = min((name for name in seconds if name != chosen), key=seconds.__getitem__)
    return chosen, second, seconds


def _bucket(best: Way, machine: Machine, choices: Choices) -> Advice:
    candidates = [("as it is", replace(choices, bucket_mb=None))]
    candidates += [(f"bucket_cap_mb={mb:g}", replace(choices, bucket_mb=mb)) for mb in BUCKETS_MB]
    chosen, second, seconds = _tried(best, machine, candidates, WORTH)
    exposed = best.speed.times.exposed_s / best.speed.times.step_s
    reason = f"{percent(exposed)} of a step is communication that nothing hides"
    if chosen != "as it is":
        reason += f"; with this a step takes {percent(seconds[chosen] / seconds['as it is'])} of its time"
    else:
        reason += ", and no other size makes a step shorter by 2 %"
    return Advice("bucket", chosen, reason + ".", _compared(second, seconds, chosen))


def _wire(best: Way, machine: Machine, choices: Choices) -> Advice:
    names = {
        "none": "none", "half": 'wire=Half("bf16")', "int8": "wire=Int8()", "sign": "wire=Sign()",
        "lowrank": "wire=LowRank(4)",
    }  # fmt: skip
    candidates = [(words, replace(choices, wire=name)) for name, words in names.items()]
    if best.workload.grad_bytes == 2:
        del candidates[1]
    chosen, second, seconds = _tried(best, machine, candidates, WIRE_WORTH)
    if chosen == "none":
        reason = "no wire makes a step shorter by 5 %, and gradients arrive exactly as they are"
    else:
        reason = (
            f"a step takes {percent(seconds[chosen] / seconds['none'])} of its time; docs/wire.md says what it costs"
        )
    return Advice("wire", chosen, reason + ".", _compared(second, seconds, chosen))


def _compared(name: str, seconds: dict[str, float], chosen: str) -> str:
    return f"{name}: {percent(seconds[name] / seconds[chosen])} of the time of a step"


def _workers(best: Way, machine: Machine, choices: Choices) -> Advice:
    curve = timing.strong_scaling(best.workload, machine, choices)
    first = curve[0].units_per_s
    good = [each for each in curve if each.units_per_s / first / each.workers >= LEAST_EFFICIENCY]
    last = good[-1]
    more = next((each for each in curve if each.workers > last.workers), None)
    share = percent(last.units_per_s / first / last.workers)
    if more is None:
        reason = f"for this batch of {best.workload.batch:,} each still works at {share} of a lone worker's speed"
        return Advice("workers", f"up to {last.workers:,}", reason + ".", "")
    reason = (
        f"for this batch of {best.workload.batch:,} each still works at {share} of a lone worker's speed; with "
        f"{more.workers:,} it would be {percent(more.units_per_s / first / more.workers)}"
    )
    gain = more.units_per_s / last.units_per_s
    return Advice("workers", f"up to {last.workers:,}", reason + ".", f"{more.workers:,}: {number(gain)} times as fast")


def _batch(best: Way, noise_scale: float | None) -> Advice:
    work = best.workload
    if noise_scale is None:
        return Advice(
            "batch",
            f"{work.batch:,}",
            "how large a batch still helps is in the gradients: watch a run (lockstep run --watch=run/ ...), then "
            "lockstep plan --run run/.",
            "",
        )
    # McCandlish et al. 2018: to B samples a step belong 1 + noise/B times the fewest steps, and 1 + B/noise times the
    # fewest samples.
    at = max(1, round(noise_scale))
    steps = 1 + noise_scale / work.batch
    samples = 1 + work.batch / noise_scale
    choice = f"up to about {number(at)}"
    reason = (
        f"the run's gradient noise scale is {number(noise_scale)} samples: at {work.batch:,} training takes "
        f"{number(steps)} times the fewest steps and {number(samples)} times the fewest samples"
    )
    return Advice(
        "batch", choice, reason + ".", f"{number(2 * at)}: 1.5 times the fewest steps, 3 times the fewest samples"
    )


def _learning_rate(work: Workload, noise_scale: float | None, base_lr: float | None, base_batch: int | None) -> Advice:
    adaptive = "adam" in work.optimizer.lower() or "lamb" in work.optimizer.lower()
    rule, other = ("sqrt", "linear") if adaptive else ("linear", "sqrt")
    why = "what Adam divides by shrinks as the root of the batch" if adaptive else "Goyal et al. 2017, up to 8,192"
    if base_batch is None:
        choice = f'scale_lr(..., rule="{rule}")'
        return Advice("learning rate", choice, f"{why}; say --base-batch and --base-lr to have it in numbers.", "")
    ratio = work.batch / base_batch
    factor = math.sqrt(ratio) if adaptive else ratio
    if noise_scale is not None and not adaptive:
        # The best rate saturates with the batch, as the steps do.
        factor = (1 + noise_scale / base_batch) / (1 + noise_scale / work.batch)
        why = f"the noise scale of {number(noise_scale)} says where the linear rule ends"
    choice = f"{number(factor)} times that of {base_batch:,}"
    if base_lr is not None:
        choice = f"{number(base_lr * factor)}, {choice}"
    return Advice(
        "learning rate",
        choice,
        f'{why}; with a warm-up: scale_lr(optimizer, {base_batch}, {work.batch}, rule="{rule}", warmup_steps=500).',
        f"{other}: {number(ratio if adaptive else math.sqrt(ratio))} times",
    )
