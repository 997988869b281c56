"""Metrics over a data set, every sample counted once, with the same bits on any number of workers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import batch as batches
from lockstep.data.shard_source import GlobalBatch
from lockstep.errors import UsageError
from lockstep.replica.data_parallel import DataParallel
from lockstep.train.feed import Feed

MetricFn = Callable[[nn.Module, Any], Any]
"""Takes the model and a shard; returns a number or a dict of numbers, means over the shard, or that and a weight."""

Entry = tuple[float, dict[str, float]]
"""Weight and metrics of one shard."""

ONLY = ""
"""Stands for the name of a metric that is given without one."""


def evaluate(model: DataParallel, feed: Feed, metric_fn: MetricFn, num_shards: int) -> float | dict[str, float]:
    """The mean of what `metric_fn` returns over all samples of `feed`; called on every worker, the same on all.

    The model is in evaluation mode meanwhile. Shards go to the workers as in training; each one's numbers are kept,
    and added in the order of the shards.
    """
    was_training = model.training
    model.eval()
    mine: dict[tuple[int, int], Entry] = {}
    try:
        with torch.no_grad():
            for batch in feed.walk(0):
                for shard in batch.shards:
                    if shard.size:
                        mine[batch.number, shard.number] = _entry(model, metric_fn, shard.batch, shard.size)
                _keep_company(model, metric_fn, batch, num_shards)
    finally:
        model.train(was_training)
    everything: dict[tuple[int, int], Entry] = {}
    for theirs in model.world.gather(mine):
        everything |= theirs
    return _mean([everything[place] for place in sorted(everything)])


def _entry(model: DataParallel, metric_fn: MetricFn, batch: Any, size: int) -> Entry:
    returned = metric_fn(model, batches.move(batch, model.world.device, non_blocking=True))
    value, weight = returned if isinstance(returned, tuple) else (returned, size)
    named = value if isinstance(value, Mapping) else {ONLY: value}
    return float(weight), {str(name): _number(number) for name, number in named.items()}


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(
            f"metric_fn(model, shard) returned a tensor of shape {list(value.shape)}: return its mean over the shard."
        )
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"metric_fn(model, shard) returned a {type(value).__name__}; it must return a number, a dict of numbers, "
            "or (that, weight)."
        ) from error


def _mean(entries: list[Entry]) -> float | dict[str, float]:
    total = sum(weight for weight, _ in entries)
    names = list(dict.fromkeys(name for _, metrics in entries for name in metrics))
    means = {
        name: sum(weight * metrics[name] for weight, metrics in entries if name in metrics) / (total or 1.0)
        for name in names
    }
    if not entries:
        raise UsageError("evaluate: the data set is empty.")
    return means[ONLY] if names == [ONLY] else means


def _keep_company(model: DataParallel, metric_fn: MetricFn, batch: GlobalBatch, num_shards: int) -> None:
    """Where parameters are gathered, everybody must run as many passes: run what is missing here for nothing."""
    if model.gathers:
        sample = next((shard.batch for shard in batch.shards if shard.size), batch.spare)
        for _ in range(num_shards - sum(1 for shard in batch.shards if shard.size)):
            _entry(model, metric_fn, sample, 1)
