"""The update itself, the same under every strategy."""

from typing import Any

import torch
from torch import Tensor


def apply(optimizer: torch.optim.Optimizer, scaler: Any, scheduler: Any) -> float | Tensor:
    """Update the weights by their gradients, and go one step on in the schedule; returns the rate that was used."""
    lr = optimizer.param_groups[0]["lr"] if optimizer.param_groups else 0.0
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    if scheduler is not None:
        scheduler.step()
    return lr
