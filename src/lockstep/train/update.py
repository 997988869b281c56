"""The update itself, the same under every strategy."""

from typing import Any

import torch
from torch import Tensor


def apply(optimizer: torch.optim.Optimizer, scaler: Any, scheduler: Any) -> float | Tensor:
    """Update the weights by their gradients, and go one step on in the schedule; returns the rate that was used."""
    lr = rate_of(optimizer)
    move(optimizer, scaler)
    if scheduler is not None:
        scheduler.step()
    return lr


def rate_of(optimizer: torch.optim.Optimizer) -> float | Tensor:
    """The learning rate of the first group."""
    return optimizer.param_groups[0]["lr"] if optimizer.param_groups else 0.0


def move(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """Move the weights by their gradients."""
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
