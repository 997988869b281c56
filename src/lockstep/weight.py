"""What a worker's loss was averaged over, so that gradients are combined by what was counted."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of one worker's part of a global batch (samples, tokens, ...)."""

    value: float | Tensor
    """What this worker's gradients are multiplied by. A tensor on a GPU is never read on the host."""
    total: float | None = None
    """The sum of `value` over all workers where it is known without asking: by sharded loaders. Else None."""
    counted: float | Tensor | None = None
    """What this worker adds to the sum that gradients are divided by, where that is not `value`."""

    @property
    def is_explicit(self) -> bool:
        """Whether the user gave it to `lockstep.backward`: then only the reduction itself can tell the total."""
        return self.total is None


def in_force(now: Weight | None, at_forward: Weight | None) -> Weight | None:
    """The weight of a backward pass: an explicit one, else that of the batch which the forward pass saw."""
    return now if now is not None and now.is_explicit else at_forward
