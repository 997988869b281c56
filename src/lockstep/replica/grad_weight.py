"""The weight of a worker's gradients, and `lockstep.backward`, by which a user gives it.

The gradient of the global batch is `sum_r(weight_r * grad_r) / sum_r(weight_r)`. Where the total is known (equal
parts, or a sharded loader's cut) each worker multiplies by its share of it, on the way into the bucket, and the sum
is the result. Where the user gives weights of his own, no worker knows the total beforehand: workers multiply by their
share of the last step's total (so that half precision keeps its range), the sum of those shares rides along, and
the sums are divided by it.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.replica.local_params import local_part
from lockstep.torch_private import foreach_
from lockstep.weight import Factor, Weight, checked
from lockstep.world import World, join


class GradWeight:
    """The weight of the pass in flight on this worker.

    size: how many workers there are; None if gradients are added as they are, since their losses have been weighed.
    """

    def __init__(self, size: int | None) -> None:
        self._is_fixed = size is None
        self._size = size or 1
        self._expected_total: Factor = float(self._size)
        self.factor: Factor = 1.0 / self._size
        """What this worker's gradients are multiplied by on their way into a bucket."""
        self.counted: Factor = 1.0 / self._size
        """This worker's share of the expected total."""
        self.is_explicit = False
        """Whether the user gave the weight: only the reduction can tell the total."""
        self.divisor: Factor | None = None
        """What sums are to be divided by after the reduction; None where they are the result already."""

    def begin(self, weight: Weight | None, accumulated: Iterable[Tensor]) -> None:
        """A backward pass of this weight begins; `accumulated` have local gradients of earlier passes."""
        if self._is_fixed:
            return
        before = self.factor
        self.is_explicit = weight is not None and weight.is_explicit
        if weight is None:
            self.factor = self.counted = 1.0 / self._size
        elif weight.total is not None:
            self.factor = self.counted = _share(weight.value, weight.total)
        else:
            counted = weight.value if weight.counted is None else weight.counted
            self.factor = _share(weight.value, self._expected_total)
            self.counted = _share(counted, self._expected_total)
        if not self.is_explicit:
            self._carry_over(before, [param for param in accumulated if param.grad is not None])

    def withdraw(self) -> None:
        """This worker has nothing to add to the step."""
        self.factor = self.counted = 0.0

    def settle(self, counted: Tensor, *, is_explicit: bool, is_uneven: bool) -> None:
        """Learn the sum of everybody's shares; every worker calls this with the same values."""
        self.divisor = None
        if self._is_fixed or not (is_explicit or is_uneven):
            return
        total = torch.where(counted == 0, torch.ones_like(counted), counted)
        self.divisor = total.item() if total.device.type == "cpu" else total
        if is_explicit:
            self._expected_total = self._expected_total * self.divisor

    def _carry_over(self, before: Factor, params: list[Tensor]) -> None:
        """Keep what earlier micro-batches counted when this one's share differs from theirs.

        All local gradients are multiplied by one factor at the end, so earlier ones are brought to its scale here.
        """
        if not params or isinstance(before, Tensor) or isinstance(self.factor, Tensor) or before == self.factor:
            return
        grads = [param.grad for param in params if param.grad is not None]
        if before == 0.0:
            foreach_("zero", grads)
        elif self.factor == 0.0:
            self.factor = self.counted = before  # This micro-batch is a stand-in, whose gradient was dropped.
        else:
            foreach_("mul", grads, before / self.factor)


def _share(value: Factor, total: Factor) -> Factor:
    """`value / total` as a number where the host has both, as a tensor on the value's device else; 0 of nothing."""
    if isinstance(value, Tensor) and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, Tensor):
        return value.detach().to(torch.float32) / total
    if isinstance(total, Tensor):
        return value / total
    return value / total if total else 0.0


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
    in_use = world.hand_outs.in_use
    if in_use is not None and in_use.is_stand_in:
        weight = 0.0  # What the user counted is another worker's sample.
    window = world.accumulation
    count = checked(weight, "lockstep.backward")
    scale, counts = window.add(count.to(loss.device) if isinstance(count, Tensor) else count)
    outer, window.in_force = window.in_force, counts
    try:
        (loss * scale if isinstance(scale, Tensor) or scale != 1.0 else loss).backward(**kwargs)
    finally:
        window.in_force = outer
        is_over = all(replica.require_backward_grad_sync for replica in world.replicas)
        factor = window.end() if is_over else 1.0
    scale_grads(
        factor, (param for replica in world.replicas if replica.world.size == 1 for param in replica.parameters())
    )


@contextlib.contextmanager
def evenly(world: World) -> Iterator[None]:
    """A block whose backward passes count the same on every worker, whatever its loader's cut was.

    For losses that are divided by what all workers counted already, so that their sum is wanted: multiply by the number
    of workers. A stand-in adds nothing, and is divided by.
    """
    window = world.accumulation
    outer, window.in_force = window.in_force, Weight(1.0, float(world.size))
    try:
        yield
    finally:
        window.in_force = outer


def scale_grads(factor: Factor, params: Iterable[Tensor]) -> None:
    """Multiply the gradients of `params`, what this worker holds of them."""
    if isinstance(factor, Tensor) or factor != 1.0:
        grads = [local_part(param.grad) for param in params if param.grad is not None]
        if grads:
            foreach_("mul", grads, factor)
