"""What points to a cause where the runs began alike, and the workers made the same step from the right samples. Pure.

Then it is the computation itself: what a layer, the loss, a buffer or the weighting made of the samples.
"""

import math
from collections.abc import Callable, Iterator

from lockstep.verify.blend import Blend, blend, factor
from lockstep.verify.cause import Cause, first_of
from lockstep.verify.comparison import Comparison, disagreeing

BATCH_NORM = "batch norm without sync"


def ask(comparison: Comparison) -> Iterator[Cause]:
    """The cause of a difference that has none in beginning, step and samples."""
    first, many = comparison.first, comparison.many
    assert first is not None
    if many.records[0].batch_norms:
        yield Cause(
            BATCH_NORM,
            f"{first_of(many.records[0].batch_norms)} normalises over its own worker's part of the batch",
            "lockstep.SyncBatchNorm.convert(net) before the model is wrapped",
        )
        return
    if first.kind == "buffer":
        yield _buffer(comparison, first.name)
        return
    if first.kind == "weight":
        yield _after_gradients(comparison)
        return
    steps = many.steps(first.step)
    mixed = blend(comparison.one, many, first.step)
    tolerance = comparison.tolerance(first.step)
    answers: list[Callable[[], Cause | None]] = [
        lambda: _clipped_early() if any(step.clips_early for step in steps) else None,
        lambda: _changed(comparison) if mixed is not None and mixed.left_with_used <= tolerance else None,
        lambda: _weighting(mixed, tolerance) if mixed is not None else None,
        lambda: _hooked(many.records[0].hooked),
        lambda: _random() if any(step.draws for step in steps) else None,
        lambda: _state(comparison),
    ]
    last = _mean_or_coupled() if many.records[0].is_coupled else _coupled()
    yield next((cause for answer in answers if (cause := answer()) is not None), last)


def _buffer(comparison: Comparison, name: str) -> Cause:
    steps = comparison.many.steps(comparison.first.step if comparison.first else 0)
    differs = name in disagreeing([step.buffers for step in steps])
    return Cause(
        "a forgotten all-reduce of a buffer",
        f"'{name}' is "
        + ("not the same on all workers" if differs else "worker 0's on all workers, and worker 0 saw its part only"),
        "average what goes into it over the workers before it is stored: world.mean(value, weight=len(x)); and leave "
        "broadcast_buffers=True",
    )


def _state(comparison: Comparison) -> Cause | None:
    assert comparison.first is not None
    number = comparison.first.step
    buffers = [each.name for each in comparison.beyond_rounding if each.kind == "buffer" and each.step <= number]
    if buffers:
        return _buffer(comparison, buffers[0])
    steps, (alone,) = comparison.many.steps(max(0, number - 1)), comparison.one.steps(max(0, number - 1))
    kept = [
        {k: v for k, v in s.hidden.items() if k in alone.hidden and alone.hidden[k].numel == v.numel} for s in steps
    ]
    hidden = disagreeing(kept)
    if not hidden and number == 0:
        return None
    where = f"'{hidden[0]}' is not the same on all workers" if hidden else "the steps before it agree"
    return Cause(
        "a forgotten all-reduce of a buffer",
        f"{where}, and it is no buffer of the model: something is kept from step to step that no wrapper can know of",
        "average what goes into it over the workers before it is stored: world.mean(value, weight=len(x)); and "
        "register it with register_buffer",
    )


def _clipped_early() -> Cause:
    return Cause(
        "gradients used before sync",
        "gradients were clipped inside no_sync(), before they were reduced: by each worker's own norm",
        "clip once, after the last backward pass and outside no_sync(): model.clip_grad_norm_(...)",
    )


def _hooked(names: list[str]) -> Cause | None:
    if not names:
        return None
    return Cause(
        "gradients used before sync",
        f"{first_of(names)} has a hook that changes its gradient before it is reduced",
        "change gradients after the backward pass: model.clip_grad_norm_(...), or a loop over param.grad",
    )


def _random() -> Cause:
    return Cause(
        "random numbers in the forward pass",
        "random numbers other than dropout's are drawn between the forward and the backward pass, and many workers "
        "cannot draw those of one; this need not be a mistake",
        "switch them off for this comparison",
    )


def _coupled() -> Cause:
    return Cause(
        "samples that look at each other",
        "no weighting of the workers' gradients gives one worker's: the loss, or a layer, compares samples of a batch "
        "or normalises over them, and on many workers it sees a part of the batch only",
        "gather what is compared from all workers (torch.distributed.nn.functional.all_gather), or compute the loss "
        "sample by sample",
    )


def _mean_or_coupled() -> Cause:
    return Cause(
        "mean of means, or samples that look at each other",
        "what each worker's loss makes of its samples is not what one worker's loss makes of all of them; with "
        "SyncBatchNorm in the model it cannot be told which of the two it is",
        "if the loss is a mean over another count than samples: lockstep.backward(loss, weight=count); if it compares "
        "samples: gather them from all workers",
    )


def _after_gradients(comparison: Comparison) -> Cause:
    assert comparison.first is not None
    return Cause(
        "weights changed beside the optimizer",
        f"the gradients of step {comparison.first.step} agree and the weights after it do not",
        "look for what changes weights or optimizer state on some workers only, or by what differs between them; "
        "optimizers that use a gradient's sign only also make much of rounding",
    )


def _changed(comparison: Comparison) -> Cause:
    """The workers' own gradients, and their weights, are right; what the optimizer was given is not."""
    assert comparison.first is not None
    number = comparison.first.step
    (alone,), together = comparison.one.steps(number), comparison.many.steps(number)
    times = factor(alone.grads, together[0].grads, comparison.tolerance(number))
    which = f"others, {times:.4g} times as large" if times is not None else "others"
    return Cause(
        "gradients used before sync",
        f"the workers' own gradients, combined by weight, are one worker's; but the optimizer was given {which}: they "
        "were changed before or after they were reduced",
        "change gradients after the last backward pass only, by what is the same on any number of workers, as "
        "model.clip_grad_norm_(...) does; and do not reduce them once more",
    )


def _weighting(mixed: Blend, tolerance: float) -> Cause | None:
    """A cause if the workers' own gradients are right and only their weights are not."""
    if mixed.left_with_right > tolerance:
        return None
    ratios = [right / used for right, used in zip(mixed.right, mixed.used, strict=True) if used]
    is_one_factor = max(ratios) - min(ratios) <= 10 * tolerance * max(abs(ratio) for ratio in ratios)
    is_sum = all(math.isclose(right, 1.0, rel_tol=10 * tolerance) for right in mixed.right)
    if is_one_factor or is_sum:
        times = sum(mixed.used) / sum(mixed.right)
        return Cause(
            "loss is not a mean",
            f"the combined gradient is {times:.4g} times one worker's: gradients are averaged over the workers, and "
            "the loss is a sum over samples, or is multiplied or divided by the number of workers",
            "let the loss be the mean over this worker's samples, and leave the averaging to lockstep.DataParallel",
        )
    return Cause(
        "mean of means",
        f"one worker's gradient is the workers' own in the proportion {_proportion(mixed.right)}, and they were "
        f"combined as {_proportion(mixed.used)}: each worker's loss is a mean over another count than its weight",
        "lockstep.backward(loss, weight=count), where count is what the loss was averaged over, as mask.sum()",
    )


def _proportion(weights: tuple[float, ...]) -> str:
    return " : ".join(f"{weight:.3f}" for weight in weights)
