"""What `loss_fn` says of a shard."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import batch as batches
from lockstep.errors import UsageError
from lockstep.replica.data_parallel import DataParallel

LossFn = Callable[[nn.Module, Any], Any]
"""Takes the model and a shard; returns the mean loss of the shard, or that and what it is the mean over."""


@dataclass(frozen=True, slots=True)
class ShardLoss:
    """The loss of one shard."""

    value: Tensor
    """The mean over what was counted."""
    weight: float | Tensor
    """How much that is; a tensor on a GPU."""
    is_weighed: bool
    """Whether `loss_fn` gave the weight; else it is the number of samples."""


def loss_of(loss_fn: LossFn, model: DataParallel, batch: Any, size: int) -> ShardLoss:
    """Run `loss_fn` on a shard of `size` samples; raises UsageError if it does not return a loss."""
    with model.world.events.copying():
        moved = batches.move(batch, model.world.device, non_blocking=True)
    returned = loss_fn(model, moved)
    is_weighed = isinstance(returned, tuple) and len(returned) == 2
    loss, weight = returned if is_weighed else (returned, float(size))
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not isinstance(weight, int | float | Tensor):
        raise UsageError(
            "loss_fn(model, shard) must return the mean loss of the shard, a tensor with one element, or (loss, "
            f"weight); it returned {_kind(returned)}."
        )
    if isinstance(weight, Tensor) and weight.is_cuda:
        return ShardLoss(loss, weight.detach().reshape(()).to(torch.float32), is_weighed)
    return ShardLoss(loss, float(weight), is_weighed)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
