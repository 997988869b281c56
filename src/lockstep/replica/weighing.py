"""By what a worker's gradients are multiplied before the reduction, and divided after it.

The gradient of the global batch is `sum_r(weight_r * grad_r) / sum_r(weight_r)`. Where the total is known (equal
parts, or a sharded loader's cut) each worker multiplies by its share of it, on the way into the bucket, and the sum
is the result. Where the user gives weights of his own, nobody knows the total beforehand: workers multiply by their
share of the last step's total (so that half precision keeps its range), the sum of those shares rides along, and
the sums are divided by it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lockstep.replica.bucket import Factor
from lockstep.weight import Weight, in_force


class Weighing:
    """The weight of the pass in flight on this worker."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._at_forward: Weight | None = None
        self._expected_total: Factor = float(size)
        self.factor: Factor = 1.0 / size
        """What this worker's gradients are multiplied by."""
        self.counted: Factor = 1.0 / size
        """This worker's share of the expected total."""
        self.is_explicit = False
        """Whether the user gave the weight: only the reduction can tell the total."""
        self.divisor: Factor | None = None
        """What sums are to be divided by after the reduction; None where they are the result already."""

    def see_batch(self, weight: Weight | None) -> None:
        """Remember the weight of the batch that a forward pass is about to see."""
        self._at_forward = weight

    def begin(self, now: Weight | None, accumulated: Iterable[Tensor]) -> None:
        """Settle the weight of a backward pass; `accumulated` have local gradients of earlier passes."""
        before = self.factor
        weight = in_force(now, self._at_forward)
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
        if not (is_explicit or is_uneven):
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
            torch._foreach_zero_(grads)
        elif self.factor == 0.0:
            self.factor = self.counted = before  # This micro-batch is empty here and adds nothing.
        else:
            torch._foreach_mul_(grads, before / self.factor)


class Unweighed(Weighing):
    """For gradients that are to be added as they are: their losses have been weighed."""

    def __init__(self) -> None:
        super().__init__(1)

    def begin(self, now: Weight | None, accumulated: Iterable[Tensor]) -> None:
        """Nothing: all weigh one."""

    def settle(self, counted: Tensor, *, is_explicit: bool, is_uneven: bool) -> None:
        """Nothing: sums are the result."""


def _share(value: Factor, total: Factor) -> Factor:
    """`value / total` as a number where the host has both, as a tensor on the value's device else; 0 of nothing."""
    if isinstance(value, Tensor) and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, Tensor):
        return value.detach().to(torch.float32) / total
    if isinstance(total, Tensor):
        return value / total
    return value / total if total else 0.0
