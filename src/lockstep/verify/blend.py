"""By which weights one worker's gradient is made of the workers' own: tells a wrong weighting from all else. Pure.

The gradient of a mean over the whole batch is a weighted mean of the gradients of the parts. Which weights are right is
found by least squares, over thousands of elements and as many unknowns as there are workers. If nothing is left over,
the workers' gradients were right and only their weights can be wrong; and the right weights are known.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lockstep.verify.comparison import Run
from lockstep.verify.record import Sketches, Step
from lockstep.verify.sketch import Floats


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


def blend(one: Run, many: Run, number: int) -> Blend | None:
    """The weights of step `number`; None if the gradients do not tell."""
    (alone,), together = one.steps(number), many.steps(number)
    found = _fit(alone.local, [step.local for step in together], _used(together, -1))
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


def _used(steps: Sequence[Step], number: int) -> tuple[float, ...] | None:
    """By which shares the workers' gradients were combined in one backward pass of a step."""
    if not all(step.backwards for step in steps):
        return None
    passes = [step.backwards[number] for step in steps]
    total = passes[0].total if passes[0].total is not None else sum(each.weight for each in passes)
    return tuple(each.weight / total for each in passes) if total else None
