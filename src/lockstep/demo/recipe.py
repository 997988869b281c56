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
        # eps well above the rounding errors of gradients, or Adam would make steps of those: with 1e-8, one worker and
        # two differed by 5e-6 after 5 steps; so by 1e-6.
        optimizer = AdamW(net.parameters(), LEARNING_RATE, betas=(0.9, 0.98), eps=1e-7, weight_decay=0.1, fused=True)
        return optimizer, LambdaLR(optimizer, lambda step: rate(step, self.steps))


def rate(step: int, steps: int) -> float:
    """The part of the full learning rate at `step`: up in a tenth of the steps, then down along a cosine to a tenth.

    Not in fewer than 10 steps, so that the first of a short run are not wild: they are compared with one worker's.
    """
    warmup = max(10, steps // 10)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.55 + 0.45 * math.cos(math.pi * done)


def default_batch(workers: int) -> int:
    """A global batch with which the demo takes about as long on any number of workers."""
    return 8 * workers
