"""What the evidence points to, among the mistakes that people make, and how to mend each. Pure.

Asked in the order in which a training comes to them: did the runs begin alike, do the workers make the same step, did
they see the right samples; and only then, what a layer, the loss, a buffer or the weighting made of these samples. A
later question has no meaning where an earlier one has found something.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.verify import evidence
from lockstep.verify.comparison import Comparison, TensorDifference, disagreeing
from lockstep.verify.evidence import Blend, Mismatch, SampleMismatch

NOT_KNOWN = "not known"
"""The name of the cause where nothing that was recorded points to one."""
BATCH_NORM = "batch norm without sync"
_BEFORE_SYNC = "gradients used before sync"
_BUFFER = "a forgotten all-reduce of a buffer"
_AVERAGE = "average what goes into it over the workers before it is stored: world.mean(value, weight=len(x))"
"""How a buffer that is kept from step to step is mended."""


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause, or that none is known."""

    name: str
    found: str
    """What was seen that points to it."""
    mend: str
    """What to do."""
    by_numbers: bool = False
    """Whether nothing but numbers that differ points to it: then rounding must be excluded first."""


_CLIPPED_EARLY = Cause(
    _BEFORE_SYNC,
    "gradients were clipped inside no_sync(), before they were reduced: by each worker's own norm",
    "clip once, after the last backward pass and outside no_sync(): model.clip_grad_norm_(...)",
)
_RANDOM = Cause(
    "random numbers in the forward pass",
    "random numbers other than dropout's are drawn between the forward and the backward pass, and many workers cannot "
    "draw those of one; this need not be a mistake",
    "switch them off for this comparison",
)
_COUPLED = Cause(
    "samples that look at each other",
    "no weighting of the workers' gradients gives one worker's: the loss, or a layer, compares samples of a batch or "
    "normalises over them, and on many workers it sees a part of the batch only",
    "gather what is compared from all workers (torch.distributed.nn.functional.all_gather), or compute the loss sample "
    "by sample",
)


def find(comparison: Comparison) -> list[Cause]:
    """The likely causes, the first one first; what is wrong without making a difference included."""
    first = comparison.first
    strange, idle, unsharded = _strangers(comparison), _idle(comparison), _same_samples(comparison)
    found = [cause for cause in (strange, idle, unsharded, _random_states(comparison)) if cause is not None]
    if first is None:
        return found
    likely = (
        strange
        or idle
        or _beginning(comparison, first)
        or _settings(comparison, first.step)
        or _unsynced(comparison, first.step)
        or unsharded
        or _samples(comparison, first.step)
        or _computation(comparison, first)
    )
    return [likely, *(cause for cause in found if cause not in (strange, idle, unsharded))]


# What is wrong even where it makes no difference


def _strangers(comparison: Comparison) -> Cause | None:
    if not any(record.is_joined for record in comparison.many.records):
        return Cause(
            "the workers do not know of each other",
            "the script neither joined a world nor opened a torch.distributed group, so each worker trains by itself",
            "begin with world = lockstep.join(), wrap the model in lockstep.DataParallel, shard the loader with "
            "lockstep.shard",
        )
    return None


def _idle(comparison: Comparison) -> Cause | None:
    """What trains nothing, or clips nothing, though it was called: one worker may do the same and agree."""
    is_split = comparison.many.is_split
    for number in range(comparison.num_steps):
        steps = comparison.many.steps(number)
        if any(step.backwards and step.weights and not step.grads for step in steps):
            return Cause(
                "the optimizer has no gradients",
                f"step {number} was made though none of the optimizer's parameters got a gradient in the backward pass"
                + ": with zero=1 to 3 gradients are on the parts that an optimizer handed over has" * is_split,
                "make the optimizer from the parameters of the model that is trained, and with zero=1 to 3 hand it "
                "over: lockstep.DataParallel(net, optimizer=optimizer, zero=...)",
            )
        if any(step.clips_nothing for step in steps):
            return Cause(
                "gradients are not clipped",
                f"in step {number} torch's clipping was given parameters of which none has a gradient"
                + ": with zero=1 to 3 gradients are on the optimizer's parts" * is_split,
                "model.clip_grad_norm_(...), after the last backward pass",
            )
    return None


def _random_states(comparison: Comparison) -> Cause | None:
    found = evidence.same_random_states(comparison.many, comparison.many.num_steps)
    if found is not None:
        step, ranks = found
        return Cause(
            "the same dropout seed on every worker",
            f"workers {_listed(ranks)} begin a forward pass of step {step} in the same random state, so their dropout "
            "masks are the same; on one worker every sample has its own",
            "begin with lockstep.join(seed=...): wrapped models then draw each worker's own numbers; or have "
            "world.rank in the seed of torch.manual_seed(...) after the model is made",
        )
    return None


def _same_samples(comparison: Comparison) -> Cause | None:
    found = evidence.mismatch(comparison.one, comparison.many, comparison.num_steps)
    if found is not None and found.kind is SampleMismatch.SAME_ON_ALL:
        return Cause(
            "the loader is not sharded",
            f"in step {found.step} every worker has the same {found.num_many // comparison.many.size} samples, so "
            f"{comparison.many.size} workers do the work of one, {comparison.many.size} times",
            "loader = lockstep.shard(loader): each worker then gets its part of every batch",
        )
    return None


# Did the runs begin alike


def _beginning(comparison: Comparison, first: TensorDifference) -> Cause | None:
    if first.kind != "initial weight":
        return None
    if disagreeing([record.initial for record in comparison.many.records], comparison.many.is_split):
        return Cause(
            "workers begin with different weights",
            f"'{first.name}' is not the same on all workers before the first step",
            "leave init_sync=True, so that all workers begin with worker 0's weights, and let an optimizer update "
            "nothing that is not in the wrapped model",
        )
    return Cause(
        "initial weights depend on the number of workers",
        f"'{first.name}' differs before the first step, though all workers agree on it",
        "seed with the same number on every worker and however many there are, before the model is made: "
        "lockstep.join(seed=...)",
    )


def _settings(comparison: Comparison, last: int) -> Cause | None:
    for number in range(last + 1):
        (alone,), together = comparison.one.steps(number), comparison.many.steps(number)
        if len({(tuple(step.rates), tuple(step.settings)) for step in together}) > 1:
            rates = ", ".join(f"{rate:g}" for rate in (step.rates[0] for step in together if step.rates))
            return Cause(
                "workers take different steps",
                f"the optimizer's settings are not the same on all workers in step {number} (learning rates {rates})",
                "let learning rate and other settings depend on nothing that differs between workers, as world.rank "
                "or a local loss; average what a scheduler decides by: world.mean(loss, weight=len(x))",
            )
        found = evidence.mismatch(comparison.one, comparison.many, comparison.num_steps)
        is_larger = found is not None and found.kind is SampleMismatch.LARGER
        if (alone.rates, alone.settings) != (together[0].rates, together[0].settings) and not is_larger:
            return Cause(
                "optimizer settings depend on the number of workers",
                f"in step {number} the learning rate is {_rates_text(alone.rates)} on one worker and "
                f"{_rates_text(together[0].rates)} on {comparison.many.size}, for the same global batch",
                "leave the learning rate as it is while the global batch stays the same; with lockstep.shard it does",
            )
    return None


# Do the workers make the same step


def _unsynced(comparison: Comparison, number: int) -> Cause | None:
    many = comparison.many
    steps = many.steps(number)
    names = disagreeing([step.grads for step in steps], many.is_split)
    if not names:
        return None
    foreign = [each for each in names if each in many.records[0].foreign]
    seen = f"the gradient of '{names[0]}' is not the same on all workers when step {number} is made"
    if not many.records[0].is_wrapped:
        found, mend = "no model is wrapped", "model = lockstep.DataParallel(model), and call model(x)"
    elif foreign:
        found = f"'{foreign[0]}' is in no wrapped model"
        mend = "put every trained parameter into one module, and wrap that in lockstep.DataParallel"
    elif any(forward.bypassed for step in steps for forward in step.forwards):
        found = "the wrapped module was called by itself, past lockstep.DataParallel"
        mend = "call model(x), not model.module(x), for what is trained"
    elif not any(each.syncs for step in steps for each in step.backwards):
        found = "all its backward passes were inside no_sync()"
        mend = "let the last backward pass before optimizer.step() be outside model.no_sync()"
    else:
        found = "they were changed after the backward pass, on each worker in another way"
        mend = "change gradients by what is the same on all workers only; clip with model.clip_grad_norm_"
    return Cause(_BEFORE_SYNC, f"{seen}: {found}", mend)


# Did they see the right samples


def _samples(comparison: Comparison, last: int) -> Cause | None:
    found = evidence.mismatch(comparison.one, comparison.many, last + 1)
    if found is None:
        return None
    size = comparison.many.size
    seen = f"step {found.step} is made from {found.num_one} samples on one worker, from {found.num_many} on {size}"
    if found.kind is SampleMismatch.LARGER:
        return _larger(comparison, found, seen)
    if found.kind is SampleMismatch.PADDED:
        return Cause(
            "sampler padding",
            f"{seen}: {found.num_repeated} of them were there before, as DistributedSampler repeats samples until "
            "every worker has as many",
            "loader = lockstep.shard(DataLoader(dataset, batch_size=...)), without a sampler of your own: it cuts "
            "every batch without padding",
        )
    if found.kind is SampleMismatch.OVERLAP:
        return Cause(
            "samples on several workers",
            f"{seen}, and workers have samples in common: each draws from the whole data set by itself",
            "loader = lockstep.shard(loader): each worker then gets its own part of every batch",
        )
    if found.kind is SampleMismatch.LEFT_OUT:
        return Cause(
            "samples are left out",
            f"{seen}: {found.num_one - found.num_many} of one worker's are on no worker",
            "loader = lockstep.shard(loader), which leaves nothing out, in place of a sampler that drops the rest",
        )
    return Cause(
        "other samples",
        f"{seen}, and they are not the same ones: their order, or random changes made to them, depend on the "
        "number of workers",
        "loader = lockstep.shard(loader), whose order does not depend on it; random augmentation has to be off for "
        "this comparison",
    )


def _larger(comparison: Comparison, found: Mismatch, seen: str) -> Cause:
    (alone,), together = comparison.one.steps(found.step), comparison.many.steps(found.step)
    before, now = _rates_text(alone.rates), _rates_text(together[0].rates)
    if alone.rates == together[0].rates:
        return Cause(
            "learning rate not scaled",
            f"{seen}, with the same learning rate {now}: the batch grows with the number of workers",
            "keep the global batch (lockstep.shard(loader), whose batch_size is the global one), or scale the rate to "
            "the larger batch with lockstep.scale_lr",
        )
    return Cause(
        "a larger batch",
        f"{seen}, and the learning rate is {now} instead of {before}: this is another training, maybe on purpose",
        "to compare, keep the global batch: lockstep.shard(loader), whose batch_size is the global one",
    )


# What came of these samples


def _computation(comparison: Comparison, first: TensorDifference) -> Cause:
    if any(step.clips_early for step in comparison.many.steps(first.step)):
        return _CLIPPED_EARLY
    return replace(_by_numbers(comparison, first), by_numbers=True)


def _by_numbers(comparison: Comparison, first: TensorDifference) -> Cause:
    many, tolerance = comparison.many, comparison.tolerance(first.step)
    record = many.records[0]
    if record.batch_norms:
        return Cause(
            BATCH_NORM,
            f"{_first_of(record.batch_norms)} normalises over its own worker's part of the batch",
            "lockstep.SyncBatchNorm.convert(net) before the model is wrapped",
        )
    if first.kind == "buffer":
        return _buffer(comparison, first.step, first.name)
    if first.kind == "weight":
        return Cause(
            "weights changed beside the optimizer",
            f"the gradients of step {first.step} agree and the weights after it do not",
            "look for what changes weights or optimizer state on some workers only, or by what differs between them; "
            "optimizers that use a gradient's sign only also make much of rounding",
        )
    mixed = evidence.blend(comparison.one, many, first.step)
    draws = any(step.draws for step in many.steps(first.step))
    return (
        (_changed(comparison, first.step) if mixed is not None and mixed.left_with_used <= tolerance else None)
        or (_weighting(mixed, tolerance) if mixed is not None else None)
        or _hooked(record.hooked)
        or (_RANDOM if draws else None)
        or _state(comparison, first.step)
        # With SyncBatchNorm the workers' own gradients say nothing.
        or (_COUPLED if mixed is not None and not record.is_coupled else None)
        or _not_known(comparison, first.step)
    )


def _buffer(comparison: Comparison, number: int, name: str) -> Cause:
    differs = name in disagreeing([step.buffers for step in comparison.many.steps(number)])
    return Cause(
        _BUFFER,
        f"'{name}' is "
        + ("not the same on all workers" if differs else "worker 0's on all workers, and worker 0 saw its part only"),
        f"{_AVERAGE}; and leave broadcast_buffers=True",
    )


def _state(comparison: Comparison, number: int) -> Cause | None:
    buffers = [each.name for each in comparison.beyond_rounding if each.kind == "buffer" and each.step <= number]
    if buffers:
        return _buffer(comparison, number, buffers[0])
    steps, (alone,) = comparison.many.steps(max(0, number - 1)), comparison.one.steps(max(0, number - 1))
    kept = [
        {k: v for k, v in s.hidden.items() if k in alone.hidden and alone.hidden[k].numel == v.numel} for s in steps
    ]
    hidden = disagreeing(kept)
    if not hidden:
        return None
    return Cause(
        _BUFFER,
        f"'{hidden[0]}' is not the same on all workers, and it is no buffer of the model: something is kept from step "
        "to step that no wrapper can know of",
        f"{_AVERAGE}; and register it with register_buffer",
    )


def _hooked(names: list[str]) -> Cause | None:
    if not names:
        return None
    return Cause(
        _BEFORE_SYNC,
        f"{_first_of(names)} has a hook that changes its gradient before it is reduced",
        "change gradients after the backward pass: model.clip_grad_norm_(...), or a loop over param.grad",
    )


def _not_known(comparison: Comparison, step: int) -> Cause:
    many = comparison.many
    has_samples = any(batch for run in (comparison.one, many) for batch in evidence.samples(run, step))
    seen = "the runs began alike and made the same kind of step" + (" from the same samples" if has_samples else "")
    seen += f"; the steps before step {step} agree" if step else ""
    if many.records[0].is_coupled:
        seen += (
            "; with SyncBatchNorm in the model each worker's own gradients depend on all samples, so it cannot be told "
            "whether they were weighted wrongly or are wrong themselves"
        )
    elif not comparison.one.steps(step)[0].local:
        seen += "; the model is not wrapped on one worker, so the gradients of its parts were not seen"
    return Cause(
        NOT_KNOWN,
        seen,
        "if the loss is a mean over another count than samples, lockstep.backward(loss, weight=count); if it compares "
        "samples of a batch, gather them from all workers; if something is kept from step to step, average it with "
        "world.mean",
    )


def _changed(comparison: Comparison, number: int) -> Cause | None:
    """The workers' own gradients, and their weights, are right; what the optimizer was given is not."""
    tolerance = comparison.tolerance(number)
    (alone,), together = comparison.one.steps(number), comparison.many.steps(number)
    times = evidence.factor(alone.grads, together[0].grads, tolerance)
    if times is not None and abs(times - 1) <= tolerance:
        return None  # On the whole they are the same: one small tensor differs, and was not changed with the others.
    which = f"others, {times:.4g} times as large" if times is not None else "others"
    return Cause(
        _BEFORE_SYNC,
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


def _rates_text(rates: Sequence[float]) -> str:
    """Learning rates of an optimizer's groups, each once."""
    return " and ".join(dict.fromkeys(f"{rate:g}" for rate in rates)) or "unknown"


def _listed(numbers: Sequence[int]) -> str:
    """As `0, 1 and 3`."""
    *others, last = [str(number) for number in numbers]
    return f"{', '.join(others)} and {last}" if others else last


def _first_of(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    return f"'{names[0]}'" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
