"""What a worker's loss was averaged over, so that gradients are combined by what was counted."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of one worker's part of a global batch."""

    value: float | Tensor
    """Samples, tokens, ...: what this worker's loss is the mean of. A tensor is never read on the host."""
    total: float | None = None
    """The same over all workers, where it is known without asking them."""
