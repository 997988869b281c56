"""A model and its optimizer as one dict in memory, whole, whatever is split; and back."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lockstep.keep.state import State
from lockstep.replica.data_parallel import DataParallel


def whole_state(model: DataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Tensors by name, as a checkpoint has them, and the optimizer's plain values; every worker calls this."""
    state = State(model, optimizer, model.world.rank, model.world.size)
    mine = [(piece.name, piece.shape, piece.begin, piece.flat.cpu()) for piece in state.pieces()]
    tensors: dict[str, Tensor] = {}
    for theirs in model.world.gather(mine):
        for name, shape, begin, data in theirs:
            if name not in tensors:
                tensors[name] = torch.zeros(shape, dtype=data.dtype)
            tensors[name].view(-1)[begin : begin + data.numel()] = data.view(-1)
    scalars: dict[str, Any] = {}
    for each in model.world.gather(state.scalars()):
        scalars |= each
    return {"tensors": tensors, "optimizer": {"groups": state.hyper(), "scalars": scalars}}


def restore_state(model: DataParallel, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Set model and optimizer to what `whole_state` gave, on however many workers; every worker calls this."""
    held: Any = _InMemory(state["tensors"])
    model.before_load()
    stored = state["optimizer"]
    State(model, optimizer, model.world.rank, model.world.size).restore(held, stored["scalars"], stored["groups"])
    model.after_load()


@dataclass(frozen=True, slots=True)
class _InMemory:
    """What `State` reads of a checkpoint."""

    whole: Mapping[str, Tensor]

    @property
    def path(self) -> str:
        return "the state"

    @property
    def tensors(self) -> dict[str, Any]:
        return {name: SimpleNamespace(shape=tuple(value.shape)) for name, value in self.whole.items()}

    def read(self, name: str, begin: int, end: int) -> Tensor:
        return self.whole[name].reshape(-1)[begin:end].clone()

    def read_whole(self, name: str) -> Tensor:
        return self.whole[name].clone()
