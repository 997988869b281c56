"""What the demo trains, and how."""

import math
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lockstep.demo.gpt import SHAPES, Shape
from lockstep.errors import UsageError

LEARNING_RATE = 2e-3


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training run, the same for every worker."""

    model: str
    """A name in `SHAPES`."""
    steps: int
    batch: int
    """Samples in the global batch."""
    seed: int

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise UsageError(f"{self.steps} steps: give 1 or more.")
        if self.batch < 1:
            raise UsageError(f"a batch of {self.batch} samples: give 1 or more.")

    @property
    def shape(self) -> Shape:
        """The model's dimensions."""
        return SHAPES[self.model]

    def optimizer(self, net: nn.Module) -> tuple[Optimizer, LambdaLR]:
        """An optimizer for `net` and its schedule of learning rates."""
        optimizer = AdamW(net.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
        return optimizer, LambdaLR(optimizer, lambda step: rate(step, self.steps))


def rate(step: int, steps: int) -> float:
    """The part of the full learning rate at `step`: up in a tenth of the steps, then down along a cosine to a tenth."""
    warmup = max(1, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.55 + 0.45 * math.cos(math.pi * done)


def default_batch(workers: int) -> int:
    """A global batch that is the same for any usual number of workers, so that their losses can be compared."""
    return max(32, 4 * workers)
