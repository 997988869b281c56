"""What the gradients and samples of a step say about a difference, before any cause is named. Pure.

Samples: whether many workers together saw what one worker saw.

Gradients: that of a mean over the whole batch is a weighted mean of the gradients of the parts. Which weights are right
is found by least squares, over thousands of elements and as many unknowns as there are workers. If nothing is left
over, the workers' gradients were right and only their weights can be wrong; and the right weights are known.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations

import numpy as np

from lockstep.verify.comparison import RecordedRun
from lockstep.verify.worker_record import Floats, RecordedStep, Sketches


class SampleMismatch(Enum):
    """How the samples of a step differ from those of one worker."""

    SAME_ON_ALL = "every worker has the same samples"
    OVERLAP = "workers share samples"
    PADDED = "samples are repeated"
    LEFT_OUT = "samples are left out"
    LARGER = "the batch is larger"
    OTHER = "other samples"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first step whose samples differ."""

    step: int
    kind: SampleMismatch
    num_one: int
    """Samples that one worker had in it."""
    num_many: int
    """Samples that all workers together had in it."""
    num_repeated: int = 0
    """Samples of theirs that occur more often than one worker had them."""


def mismatch(one: RecordedRun, many: RecordedRun, num_steps: int) -> Mismatch | None:
    """The first of the first `num_steps` steps in which the samples differ; None if none does."""
    for number in range(num_steps):
        (alone,), together = samples(one, number), samples(many, number)
        if not alone or not any(together):
            continue
        parts = [part for run in (one, many) for step in range(number) for part in samples(run, step)]
        before = {sample for part in parts for sample in part}
        kind = _kind(alone, together, before, _share_any(many, num_steps))
        if kind is not None:
            everybody = Counter(sample for part in together for sample in part)
            repeated = (everybody - Counter(alone)).total()
            return Mismatch(number, kind, len(alone), everybody.total(), repeated)
    return None


def samples(run: RecordedRun, number: int) -> list[list[str]]:
    """Digests of the samples of one step, by worker."""
    return [[sample for forward in step.forwards for sample in forward.samples] for step in run.steps(number)]


def _kind(alone: list[str], together: list[list[str]], before: set[str], shares_later: bool) -> SampleMismatch | None:
    wanted, parts = Counter(alone), [Counter(part) for part in together]
    everybody = sum(parts, Counter[str]())
    if everybody == wanted:
        return None
    if all(part == parts[0] for part in parts):
        return SampleMismatch.SAME_ON_ALL
    extra, missing = everybody - wanted, wanted - everybody
    overlap = any(
        wanted[sample] < max(2, times) for a, b in combinations(parts, 2) for sample, times in (a & b).items()
    )
    if not missing and all(sample in before or sample in wanted for sample in extra):
        return SampleMismatch.PADDED
    if everybody.total() == len(parts) * wanted.total():
        return SampleMismatch.OVERLAP if overlap or shares_later else SampleMismatch.LARGER
    if overlap:
        return SampleMismatch.OVERLAP
    return SampleMismatch.LEFT_OUT if not extra else SampleMismatch.OTHER


def _share_any(many: RecordedRun, num_steps: int) -> bool:
    """Whether a sample of one worker turns up on another in any step: then each takes from the whole data set."""
    by_worker: list[set[str]] = [set() for _ in many.records]
    for number in range(num_steps):
        for seen, part in zip(by_worker, samples(many, number), strict=True):
            seen.update(part)
    return any(a & b for a, b in combinations(by_worker, 2))


def same_random_states(run: RecordedRun, num_steps: int) -> tuple[int, Sequence[int]] | None:
    """The first step in which workers that use dropout began a forward pass in the same random state, and who."""
    for number in range(num_steps):
        steps = run.steps(number)
        if not any(step.drops for step in steps):
            continue
        for passes in zip(*(step.forwards for step in steps), strict=False):
            states = [each.random_state for each in passes]
            alike = [rank for rank, state in enumerate(states) if states.count(state) > 1]
            if alike:
                return number, alike
    return None


@dataclass(frozen=True, slots=True)
class Blend:
    """How one worker's gradient comes from the workers' own gradients."""

    used: tuple[float, ...]
    """The weights by which they were combined."""
    left_with_used: float
    """What these leave over of one worker's gradient, as a part of it."""
    right: tuple[float, ...]
    """The weights that come closest."""
    left_with_right: float
    """What those leave over."""


def blend(one: RecordedRun, many: RecordedRun, number: int) -> Blend | None:
    """The weights of step `number`; None if the gradients do not tell."""
    (alone,), together = one.steps(number), many.steps(number)
    # A script may wrap its model on several workers only: of one pass, what the optimizer was given is the same then.
    own = alone.local or (alone.grads if len(alone.backwards) == 1 else {})
    found = _fit(own, [step.local for step in together], _used(together, -1))
    if alone.opening and (found is None or found.left_with_right > 1e-3):
        return _fit(alone.opening, [step.opening for step in together], _used(together, 0)) or found
    return found


def factor(alone: Sketches, other: Sketches, tolerance: float) -> float | None:
    """What all of `other` is in units of `alone`, if it is one factor."""
    one, many = _row(alone, alone), _row(other, alone)
    scale = float(one @ one)
    if not scale or not np.isfinite(scale):
        return None
    found = float(one @ many) / scale
    left = float(np.linalg.norm(many - found * one)) / float(np.sqrt(scale))
    return found if left <= tolerance * abs(found) else None


def _fit(alone: Sketches, together: Sequence[Sketches], used: tuple[float, ...] | None) -> Blend | None:
    if used is None:
        return None
    # A worker of weight zero had no samples, and its gradient may be no number.
    columns = [_row(sketches if share else {}, alone) for sketches, share in zip(together, used, strict=True)]
    target = _row(alone, alone)
    scale = float(np.linalg.norm(target))
    if not np.isfinite(scale) or scale == 0.0 or len(target) < len(columns) + 2:
        return None
    matrix = np.stack(columns, axis=1)
    if not np.isfinite(matrix).all():
        return None
    right = np.linalg.lstsq(matrix, target, rcond=None)[0]
    left = [float(np.linalg.norm(matrix @ weights - target)) / scale for weights in (np.array(used), right)]
    return Blend(used, left[0], tuple(float(weight) for weight in right), left[1])


def _row(sketches: Sketches, like: Sketches) -> Floats:
    """All samples in one row; zeros where a worker did not use a parameter."""
    rows = [np.zeros(len(wanted.sample)) for wanted in like.values()]
    for row, name in zip(rows, like, strict=True):
        if name in sketches and len(sketches[name].sample) == len(row):
            row[:] = sketches[name].sample
    return np.concatenate(rows) if rows else np.zeros(0)


def _used(steps: Sequence[RecordedStep], number: int) -> tuple[float, ...] | None:
    """By which shares the workers' gradients were combined in one backward pass of a step."""
    if not all(step.backwards for step in steps):
        return None
    passes = [step.backwards[number] for step in steps]
    total = passes[0].total if passes[0].total is not None else sum(each.weight for each in passes)
    return tuple(each.weight / total for each in passes) if total else None
