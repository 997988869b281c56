"""What a step of the trainer returns."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step, the same on every worker; with a strategy, what this worker made of its own shards.

    On a GPU the numbers are read when they are asked for, and not before.
    """

    step: int
    """How many steps have been made, this one included."""
    _is_scaled: bool
    _loss: Tensor
    _grad_norm: Tensor
    _weight: Tensor
    _lr: float | Tensor
    _staleness: Callable[[], int] | None = None

    @property
    def loss(self) -> float:
        """The mean loss over the global batch, by weight."""
        return float(self._loss)

    @property
    def grad_norm(self) -> float:
        """The norm of the gradient of that loss over all parameters, before clipping."""
        return float(self._grad_norm)

    @property
    def weight(self) -> float:
        """What the loss is the mean over: samples, or what `loss_fn` gave as weights."""
        return float(self._weight)

    @property
    def lr(self) -> float:
        """The learning rate of the optimizer's first group in this step."""
        return float(self._lr)

    @property
    def staleness(self) -> int:
        """With `Async`, how many updates of others came between reading the parameters and this one, at most.

        Waits until the gradient is applied, if it is asked for before the next step. 0 without `Async`.
        """
        return self._staleness() if self._staleness is not None else 0

    @property
    def skipped(self) -> bool:
        """Whether a gradient scaler found a gradient that is not finite, and left the weights as they were."""
        return self._is_scaled and not math.isfinite(self.grad_norm)

    def __repr__(self) -> str:
        return f"StepResult(step={self.step}, loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g})"
