"""One way to train: a wrapped model and its optimizer, and how a step of them is made."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep.bench.workloads import Batch

LEARNING_RATE = 3e-4


@dataclass(frozen=True, slots=True)
class Setting:
    """What a variant is made of."""

    module: nn.Module
    """Its own model, on its device."""
    kind: str
    """As in the catalogue."""
    world: lockstep.World
    group: dist.ProcessGroup | None
    """What it is to communicate over; None for torch's default group."""
    cap_mb: float | None
    """Most MB of a bucket; None for what the kind does by itself."""
    bf16: bool
    """Whether the forward pass runs under bfloat16 autocast."""
    batch: int
    """Samples per worker and step."""

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self.world.device


class Variant:
    """A model, wrapped in one of the ways, and its optimizer; peers with calls of their own override the phases.

    Phases of a step: forward, backward, update.
    """

    def __init__(self, setting: Setting, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = torch.zeros(())
        self._autocast = torch.autocast(setting.device.type, torch.bfloat16, enabled=setting.bf16)

    def step(self, batch: Batch) -> None:
        """One full step: forward, backward, update."""
        self.forward(batch)
        self.backward()
        self.update()

    def forward(self, batch: Batch) -> None:
        """Compute the loss."""
        with self._autocast:
            self.loss = self.model(*batch)

    def backward(self) -> None:
        """Compute the gradients."""
        self.loss.backward()

    def update(self) -> None:
        """Move the weights by the gradients, and drop those."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Tensor:
        """All weights in one tensor on the host, to compare variants by."""
        params = nn.utils.parameters_to_vector(self.model.parameters())
        return params.detach().cpu()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every variant: AdamW as one fused call."""
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
