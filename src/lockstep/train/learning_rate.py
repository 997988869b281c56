"""The learning rate for a larger batch: scaled by a rule, reached by a gradual warm-up (Goyal et al., 2017)."""

from typing import Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.errors import UsageError

Rule = Literal["linear", "sqrt"]


class ScaledRate(LRScheduler):
    """Each group's rate, times `scale`, after `warmup_steps` that lead there from the unscaled rate in a line."""

    def __init__(self, optimizer: Optimizer, scale: float, warmup_steps: int, last_epoch: int = -1) -> None:
        self.scale = scale
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The rates of the coming step."""
        done = min(1.0, self.last_epoch / self.warmup_steps) if self.warmup_steps else 1.0
        return [float(base) * (1.0 + (self.scale - 1.0) * done) for base in self.base_lrs]

    _get_closed_form_lr = get_lr


def scale_lr(
    optimizer: Optimizer, base_batch: int, batch: int, rule: Rule = "linear", warmup_steps: int = 0
) -> ScaledRate:
    """A scheduler for training at global batch size `batch` with rates that were tuned at `base_batch`.

    rule: "linear" multiplies the rates by batch / base_batch (SGD), "sqrt" by its square root (Adam and the like).
    warmup_steps: steps over which the rate grows from the tuned one to the scaled one. Call `step()` on what is
        returned after each `optimizer.step()`.
    """
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"scale_lr takes a torch optimizer, got {type(optimizer).__name__}.")
    for name, value in (("base_batch", base_batch), ("batch", batch)):
        if value < 1:
            raise UsageError(f"scale_lr: {name}={value} must be at least 1.")
    if warmup_steps < 0:
        raise UsageError(f"scale_lr: warmup_steps={warmup_steps} cannot be negative.")
    ratio = batch / base_batch
    if rule == "linear":
        return ScaledRate(optimizer, ratio, warmup_steps)
    if rule == "sqrt":
        return ScaledRate(optimizer, ratio**0.5, warmup_steps)
    raise UsageError(f"scale_lr: rule={rule!r} is not known; use 'linear' or 'sqrt'.")
