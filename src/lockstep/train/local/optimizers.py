"""The optimizers of workers that train by themselves: each one's own, and the outer one of DiLoCo.

The own ones' state is made one before saving, so that a checkpoint is that of equal replicas, and in every exchange
only where that is asked for: moments of a worker's own are what Local SGD and DiLoCo train with.

The outer optimizer takes the mean change of a round, its sign reversed, for a gradient. Every worker has one and steps
it alike, from the same sums: so all come to the same bits, and none needs to be told.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.errors import UsageError
from lockstep.keep import json_tree
from lockstep.replica import agreement
from lockstep.world import World

MakeOuter = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""From the common weights to their optimizer."""


@dataclass(frozen=True, slots=True)
class StateEntry:
    """An entry of a worker's state, so that one that lacks it can have one like it."""

    shape: tuple[int, ...] | None
    """None for what is not a tensor."""
    dtype: torch.dtype | None
    is_on_host: bool
    value: Any
    """Of what has no dimensions; None for other tensors."""

    @classmethod
    def of(cls, value: Any) -> "StateEntry":
        """What is to be told of `value`."""
        if not isinstance(value, Tensor):
            return cls(None, None, True, value)
        number = None if value.ndim else value.item()
        return cls(tuple(value.shape), value.dtype, value.device.type == "cpu", number)

    def made_for(self, param: Tensor) -> Any:
        """A new entry of `param` like this one; zero."""
        device = torch.device("cpu") if self.is_on_host else param.device
        if self.shape is None:
            return self.value
        if self.shape == tuple(param.shape):
            return torch.zeros_like(param, dtype=self.dtype, device=device)
        return torch.zeros(self.shape, dtype=self.dtype, device=device)

    def to_json(self) -> list[Any]:
        """As it is told to other workers; UsageError if the value is more than numbers, words and lists."""
        dtype = str(self.dtype).removeprefix("torch.") if self.dtype is not None else None
        return [self.shape, dtype, self.is_on_host, json_tree.encode(self.value)]

    @classmethod
    def from_json(cls, shape: list[int] | None, dtype: str | None, is_on_host: bool, value: Any) -> "StateEntry":
        """What `to_json` was made of."""
        kind = getattr(torch, dtype) if dtype is not None else None
        return cls(None if shape is None else tuple(shape), kind, is_on_host, json_tree.decode(value))


@torch.no_grad()
def equalize_state(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], world: World) -> None:
    """Give all workers the same state of `optimizer`; every worker calls this. What one lacks counts as zero.

    Of moments the mean; of counts of steps, and whatever else is one number, the largest; of all else worker 0's.
    """
    if world.size == 1:
        return
    mine = [
        [number, name, *StateEntry.of(value).to_json()]
        for number, param in enumerate(params)
        for name, value in optimizer.state.get(param, {}).items()
    ]
    everyone = [
        {(number, name): StateEntry.from_json(*entry) for number, name, *entry in theirs}
        for theirs in world.gather_json(mine)
    ]
    means: list[Tensor] = []
    firsts: list[Tensor] = []
    for key in sorted(set().union(*everyone)):
        number, name = key
        entries = [theirs.get(key) for theirs in everyone]
        like = next(entry for entry in entries if entry is not None)
        state = optimizer.state[params[number]]
        if name not in state:
            state[name] = like.made_for(params[number])
        value = state[name]
        if like.shape:
            (means if value.is_floating_point() or value.is_complex() else firsts).append(value)
            continue
        values = [entry.value for entry in entries if entry is not None]
        largest = max(values) if all(isinstance(each, int | float) for each in values) else values[0]
        if isinstance(value, Tensor):
            value.fill_(largest)
        else:
            state[name] = largest
    _average(means, world)
    assert world.group is not None
    agreement.broadcast(firsts, world, 0, world.group)


def _average(tensors: Sequence[Tensor], world: World) -> None:
    """The mean over the workers, some tensors at a time."""
    for together in agreement.in_messages(tensors):
        real = [torch.view_as_real(t) if t.is_complex() else t for t in together]
        flat = torch.cat([t.reshape(-1) for t in real]).mul_(1.0 / world.size)
        group = world.host_group if flat.device.type == "cpu" else world.group
        work = dist.all_reduce(flat, group=group, async_op=True)
        if flat.device.type == "cpu":
            world.wait(work, "averaging the optimizers' state")
        elif work is not None:
            work.wait()
        for tensor, piece in zip(real, flat.split([t.numel() for t in real]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def equalize_scaler(scaler: Any, world: World) -> None:
    """Give all workers' gradient scalers the smallest scale that one of them has come to; every worker calls this."""
    if scaler is None or world.size == 1 or not scaler.is_enabled():
        return
    states = world.gather_json(scaler.state_dict())
    scaler.load_state_dict(min(states, key=lambda state: (state["scale"], state["_growth_tracker"])))


def nesterov(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What Douillard et al. (2023) found best."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class OuterOptimizer:
    """Advances the common weights."""

    def __init__(self, make: MakeOuter, common: list[nn.Parameter], names: Sequence[str]) -> None:
        self.optimizer = make(common)
        self._named = dict(zip(names, common, strict=True))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"DiLoCo(outer=...) is a function from a list of parameters to a torch optimizer; it returned a "
                f"{type(self.optimizer).__name__}. Use outer=lambda params: torch.optim.SGD(params, lr=0.7)."
            )

    @torch.no_grad()
    def __call__(self, common: Sequence[nn.Parameter], mean: Sequence[Tensor]) -> None:
        """Make an outer step; `mean` is overwritten."""
        torch_private.foreach_("neg", list(mean))
        for param, grad in zip(common, mean, strict=True):
            param.grad = grad
        self.optimizer.step()
        for param in common:
            param.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's tensors, by names of parameters."""
        return {
            f"outer/{name}/{key}": value
            for name, param in self._named.items()
            for key, value in self.optimizer.state.get(param, {}).items()
            if isinstance(value, Tensor)
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` gave; what is not there begins anew."""
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            steps_on_device = bool(group.get("capturable") or group.get("fused"))
            for name, param in self._named.items():
                if any(param is each for each in group["params"]):
                    self._load(name, param, tensors, steps_on_device)

    def _load(self, name: str, param: nn.Parameter, tensors: Mapping[str, Tensor], steps_on_device: bool) -> None:
        prefix = f"outer/{name}/"
        for full_name, value in tensors.items():
            if full_name.startswith(prefix):
                key = full_name.removeprefix(prefix)
                if param.is_complex() and value.shape == (*param.shape, 2):
                    value = torch.view_as_complex(value)
                is_on_device = key != "step" or steps_on_device
                self.optimizer.state[param][key] = value.to(param.device) if is_on_device else value

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer is, and what it keeps besides tensors."""
        found: dict[str, dict[str, Any]] = {}
        for name, param in self._named.items():
            state = self.optimizer.state.get(param, {})
            if plain := {key: value for key, value in state.items() if isinstance(value, bool | int | float | str)}:
                found[name] = plain
        return {"kind": type(self.optimizer).__name__, "scalars": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, after `load_tensors`; an optimizer of another kind begins anew."""
        if state.get("kind") != type(self.optimizer).__name__:
            self.optimizer.state.clear()
            return
        for name, plain in state["scalars"].items():
            if name in self._named:
                self.optimizer.state[self._named[name]].update(plain)
