"""The state of workers' own optimizers, made one: so that a checkpoint is that of equal replicas.

Workers that train by themselves have optimizers of their own: of their moments the mean is taken, of their counts of
steps the largest. That needs messages, and is done before saving, and in every exchange only where that is asked for:
moments of a worker's own are what Local SGD and DiLoCo train with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.replica import agreement
from lockstep.world import World

DOING = "averaging the optimizers' state"
MESSAGE_NUMEL = 16 << 20
"""Values that travel together: few messages, and no second model in memory."""

Key = tuple[int, str]
"""A parameter's number, and what the optimizer calls its state."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What an entry of the state is, so that a worker that lacks it can have one like it."""

    shape: tuple[int, ...] | None
    """None for what is not a tensor."""
    dtype: torch.dtype | None = None
    is_on_host: bool = False
    value: Any = None
    """Of what is not a tensor."""


@torch.no_grad()
def make_equal(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], world: World) -> None:
    """Give all workers the same state of `optimizer`; every worker calls this. What one lacks counts as zero."""
    if world.size == 1:
        return
    kinds = _agree(optimizer, params, world)
    means: list[Tensor] = []
    firsts: list[Tensor] = []
    counts: list[Key] = []
    for key, kind in kinds.items():
        value = _entry(optimizer, params, key, kind)
        if not isinstance(value, Tensor) or not kind.shape:
            counts.append(key)
        else:
            (means if value.is_floating_point() or value.is_complex() else firsts).append(value)
    _average(means, world)
    assert world.group is not None
    agreement.broadcast(firsts, world, 0, world.group)
    _level(optimizer, params, counts, world)


def _agree(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], world: World) -> dict[Key, Kind]:
    """Everything that some worker has, in one order."""
    mine: dict[Key, Kind] = {}
    for number, param in enumerate(params):
        for name, value in optimizer.state.get(param, {}).items():
            mine[number, name] = _kind(value)
    found: dict[Key, Kind] = {}
    for theirs in world.gather(mine):
        found = theirs | found
    return dict(sorted(found.items()))


def _kind(value: Any) -> Kind:
    if isinstance(value, Tensor):
        return Kind(tuple(value.shape), value.dtype, value.device.type == "cpu")
    return Kind(None, value=value)


def _entry(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], key: Key, kind: Kind) -> Any:
    """This worker's, which is made where it lacks."""
    param = params[key[0]]
    state = optimizer.state[param]
    if key[1] not in state:
        device = torch.device("cpu") if kind.is_on_host else param.device
        if kind.shape is None:
            state[key[1]] = kind.value
        elif kind.shape == tuple(param.shape):
            state[key[1]] = torch.zeros_like(param, dtype=kind.dtype, device=device)
        else:
            state[key[1]] = torch.zeros(kind.shape, dtype=kind.dtype, device=device)
    return state[key[1]]


def _average(tensors: Sequence[Tensor], world: World) -> None:
    """The mean over the workers, some tensors at a time."""
    for together in _batches(tensors):
        real = [torch.view_as_real(t) if t.is_complex() else t for t in together]
        flat = torch.cat([t.reshape(-1) for t in real]).mul_(1.0 / world.size)
        group = world.host_group if flat.device.type == "cpu" else world.group
        work = dist.all_reduce(flat, group=group, async_op=True)
        if flat.device.type == "cpu":
            world.wait(work, DOING)
        elif work is not None:
            work.wait()
        for tensor, piece in zip(real, flat.split([t.numel() for t in real]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def _batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device and dtype together, up to MESSAGE_NUMEL."""
    batches: dict[tuple[torch.device, torch.dtype, int], list[Tensor]] = {}
    filled: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        kind = (tensor.device, tensor.dtype)
        before = filled.get(kind, 0)
        filled[kind] = before + tensor.numel()
        batches.setdefault((*kind, before // MESSAGE_NUMEL), []).append(tensor)
    return list(batches.values())


def _level(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], keys: Sequence[Key], world: World) -> None:
    """Counts of steps, and whatever else is one number: the largest; what is no number is worker 0's."""
    mine = [optimizer.state[params[number]][name] for number, name in keys]
    plain = [value.item() if isinstance(value, Tensor) else value for value in mine]
    for (number, name), was, all_of_them in zip(keys, mine, zip(*world.gather(plain), strict=True), strict=True):
        are_numbers = all(isinstance(each, int | float) for each in all_of_them)
        value = max(all_of_them) if are_numbers else all_of_them[0]
        if isinstance(was, Tensor):
            was.fill_(value)
        else:
            optimizer.state[params[number]][name] = value


def level_scaler(scaler: Any, world: World) -> None:
    """Give all workers' gradient scalers the smallest scale that one of them has come to; every worker calls this."""
    if scaler is None or world.size == 1 or not scaler.is_enabled():
        return
    states = world.gather(scaler.state_dict())
    scaler.load_state_dict(min(states, key=lambda state: (state["scale"], state["_growth_tracker"])))
