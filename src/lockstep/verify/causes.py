"""What the evidence points to, among the mistakes that people make, and how to mend each. Pure.

Asked in the order in which a training comes to them: did the runs begin alike, do the workers make the same step, did
they see the right samples; and only then, what came of these samples. A later question has no meaning where an earlier
one has found something.
"""

from collections.abc import Iterator

from lockstep.verify import batches, outcome
from lockstep.verify.batches import Kind, Mismatch
from lockstep.verify.cause import Cause, listed, rates_text
from lockstep.verify.comparison import Comparison, disagreeing


def find(comparison: Comparison) -> list[Cause]:
    """The likely causes, the first one first; what is wrong without making a difference included."""
    masks = list(_random_states(comparison))
    if comparison.first is None:
        return [*_strangers(comparison), *_same_samples(comparison), *masks]
    for question in (_strangers, _beginning, _settings, _unsynced, _same_samples, _samples, outcome.ask):
        found = list(question(comparison))
        if found:
            return [*found, *masks]
    return masks


# What is wrong even where it makes no difference


def _strangers(comparison: Comparison) -> Iterator[Cause]:
    if not any(record.is_joined for record in comparison.many.records):
        yield Cause(
            "the workers do not know of each other",
            "the script neither joined a world nor opened a torch.distributed group, so each worker trains by itself",
            "begin with world = lockstep.join(), wrap the model in lockstep.DataParallel, shard the loader with "
            "lockstep.shard",
        )


def _random_states(comparison: Comparison) -> Iterator[Cause]:
    found = batches.same_random_states(comparison.many, comparison.many.num_steps)
    if found is not None:
        step, ranks = found
        yield Cause(
            "the same dropout seed on every worker",
            f"workers {listed(ranks)} begin a forward pass of step {step} in the same random state, so their dropout "
            "masks are the same; on one worker every sample has its own",
            "seed once, before the model is made (lockstep.join(seed=...) does it); wrapping then sends every worker "
            "its own way, and torch.manual_seed(...) must not be called after that, unless world.rank is in the seed",
        )


def _same_samples(comparison: Comparison) -> Iterator[Cause]:
    found = batches.mismatch(comparison.one, comparison.many, comparison.num_steps)
    if found is not None and found.kind is Kind.SAME_ON_ALL:
        yield Cause(
            "the loader is not sharded",
            f"in step {found.step} every worker has the same {found.num_many // comparison.many.size} samples, so "
            f"{comparison.many.size} workers do the work of one, {comparison.many.size} times",
            "loader = lockstep.shard(loader): each worker then gets its part of every batch",
        )


# Did the runs begin alike


def _beginning(comparison: Comparison) -> Iterator[Cause]:
    first = comparison.first
    if first is None or first.kind != "initial weight":
        return
    if disagreeing([record.initial for record in comparison.many.records], comparison.many.is_split):
        yield Cause(
            "workers begin with different weights",
            f"'{first.name}' is not the same on all workers before the first step",
            "leave init_sync=True, so that all workers begin with worker 0's weights, and let an optimizer update "
            "nothing that is not in the wrapped model",
        )
        return
    yield Cause(
        "initial weights depend on the number of workers",
        f"'{first.name}' differs before the first step, though all workers agree on it",
        "seed with the same number on every worker and however many there are, before the model is made: "
        "lockstep.join(seed=...)",
    )


def _settings(comparison: Comparison) -> Iterator[Cause]:
    assert comparison.first is not None
    for number in range(comparison.first.step + 1):
        (alone,), together = comparison.one.steps(number), comparison.many.steps(number)
        if len({(tuple(step.rates), tuple(step.settings)) for step in together}) > 1:
            rates = ", ".join(f"{rate:g}" for rate in (step.rates[0] for step in together if step.rates))
            yield Cause(
                "workers take different steps",
                f"the optimizer's settings are not the same on all workers in step {number} (learning rates {rates})",
                "let learning rate and other settings depend on nothing that differs between workers, as world.rank "
                "or a local loss; average what a scheduler decides by: world.mean(loss, weight=len(x))",
            )
            return
        is_larger = _is_larger(batches.mismatch(comparison.one, comparison.many, comparison.num_steps))
        if (alone.rates, alone.settings) != (together[0].rates, together[0].settings) and not is_larger:
            yield Cause(
                "optimizer settings depend on the number of workers",
                f"in step {number} the learning rate is {rates_text(alone.rates)} on one worker and "
                f"{rates_text(together[0].rates)} on {comparison.many.size}, for the same global batch",
                "leave the learning rate as it is while the global batch stays the same; with lockstep.shard it does",
            )
            return


# Do the workers make the same step


def _unsynced(comparison: Comparison) -> Iterator[Cause]:
    assert comparison.first is not None
    many, number = comparison.many, comparison.first.step
    steps = many.steps(number)
    names = disagreeing([step.grads for step in steps], many.is_split)
    if not names:
        return
    name = "gradients used before sync"
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
    yield Cause(name, f"{seen}: {found}", mend)


# Did they see the right samples


def _is_larger(found: Mismatch | None) -> bool:
    return found is not None and found.kind is Kind.LARGER


def _samples(comparison: Comparison) -> Iterator[Cause]:
    assert comparison.first is not None
    found = batches.mismatch(comparison.one, comparison.many, comparison.first.step + 1)
    if found is None or found.kind is Kind.SAME_ON_ALL:
        return
    size = comparison.many.size
    seen = f"step {found.step} is made from {found.num_one} samples on one worker, from {found.num_many} on {size}"
    if found.kind is Kind.LARGER:
        yield _larger(comparison, found, seen)
    elif found.kind is Kind.PADDED:
        yield Cause(
            "sampler padding",
            f"{seen}: {found.num_repeated} of them were there before, as DistributedSampler repeats samples until "
            "every worker has as many",
            "loader = lockstep.shard(DataLoader(dataset, batch_size=...)), without a sampler of your own: it cuts "
            "every batch without padding",
        )
    elif found.kind is Kind.OVERLAP:
        yield Cause(
            "samples on several workers",
            f"{seen}, and workers have samples in common: each draws from the whole data set by itself",
            "loader = lockstep.shard(loader): each worker then gets its own part of every batch",
        )
    elif found.kind is Kind.LEFT_OUT:
        yield Cause(
            "samples are left out",
            f"{seen}: {found.num_one - found.num_many} of one worker's are on no worker",
            "loader = lockstep.shard(loader), which leaves nothing out, in place of a sampler that drops the rest",
        )
    else:
        yield Cause(
            "other samples",
            f"{seen}, and they are not the same ones: their order, or random changes made to them, depend on the "
            "number of workers",
            "loader = lockstep.shard(loader), whose order does not depend on it; random augmentation has to be off for "
            "this comparison",
        )


def _larger(comparison: Comparison, found: Mismatch, seen: str) -> Cause:
    (alone,), together = comparison.one.steps(found.step), comparison.many.steps(found.step)
    before, now = rates_text(alone.rates), rates_text(together[0].rates)
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
