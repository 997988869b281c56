"""`lockstep.backward`: a backward pass whose weight the user knows."""

from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.replica.bucket import Factor
from lockstep.weight import Weight
from lockstep.world import World, join


def backward(loss: Tensor, weight: float | Tensor | None = None, **kwargs: Any) -> None:
    """`loss.backward()` for a loss that is the mean over `weight` things (tokens, samples) on this worker.

    Gradients are combined by weight: `sum(weight * grad) / sum(weight)` over the workers, which is what one worker
    would get from the mean over all those things. A weight on the GPU is never read by the host. A weight of zero
    means that this worker's loss does not count.

    Under accumulation (`no_sync`) the weights of the micro-batches count too, against the mean of them: with the
    usual `loss / num_micro_batches` the result is the mean over everything counted in all micro-batches.

    Without `weight` it is plain `loss.backward()`. Costs nothing, but for one pass over the gradients after the
    reduction, since the total weight is not known before it.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError("lockstep.backward takes one loss value: a tensor with one element.")
    if weight is None:
        loss.backward(**kwargs)
        return
    world = join()
    window = world.accumulation or Accumulation()
    scale, counts = window.add(_checked(weight, loss))
    outer, world.weight = world.weight, counts
    try:
        (loss * scale if isinstance(scale, Tensor) or scale != 1.0 else loss).backward(**kwargs)
    finally:
        world.weight = outer
        is_over = all(replica.require_backward_grad_sync for replica in world.replicas)
        world.accumulation = None if is_over else window
    if is_over and world.size == 1:
        window.settle_alone(world)


class Accumulation:
    """The weights of the micro-batches since the last update.

    Local gradients add up as they come, so later micro-batches are scaled against the first one: the sum then
    stands for `reference` each, and what was counted is the mean of the weights.
    """

    def __init__(self) -> None:
        self._reference: Factor = 1.0
        self._sum: Factor = 0.0
        self._count = 0

    def add(self, weight: Factor) -> tuple[Factor, Weight]:
        """What to scale this micro-batch's loss by, and the weight of the accumulated gradients."""
        if self._count == 0:
            self._reference = _one_if_zero(weight)
        self._count += 1
        self._sum = self._sum + weight
        return weight / self._reference, Weight(self._reference, counted=self._sum / self._count)

    def settle_alone(self, world: World) -> None:
        """On one worker nothing is reduced: bring the accumulated gradients to their mean weight here."""
        if self._count == 1:
            return
        mean = _one_if_zero(self._sum / self._count)
        grads = [p.grad for replica in world.replicas for p in replica.parameters() if p.grad is not None]
        torch._foreach_mul_(grads, self._reference / mean)


def _checked(weight: float | Tensor, loss: Tensor) -> Factor:
    if not isinstance(weight, Tensor):
        weight = float(weight)
    elif weight.numel() != 1:
        raise UsageError(f"lockstep.backward: weight must be one number, not a tensor of {tuple(weight.shape)}.")
    elif weight.device.type == "cpu":
        weight = float(weight.item())
    else:
        return weight.detach().to(loss.device, torch.float32).reshape(())
    if not 0 <= weight < float("inf"):
        raise UsageError(f"lockstep.backward: weight={weight}: a weight is a count, zero or more.")
    return weight


def _one_if_zero(value: Factor) -> Factor:
    if isinstance(value, Tensor):
        return torch.where(value == 0, torch.ones_like(value), value)
    return value if value else 1.0
