"""A training run's state, from a worker that has it to those that have not: at the speed of memory, or of the network.

What travels are the tensors of the model and of its optimizer where they are, in messages of many tensors, and one
small object for the rest. Nothing is written to disk. Every worker takes part, so that afterwards all have the same
bits, whatever they had before.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import faults
from lockstep.replica import agreement
from lockstep.world import World


def share(
    world: World, source: int, module: nn.Module, optimizer: torch.optim.Optimizer, rest: Any, *, needs: bool
) -> Any:
    """Give every worker that `needs` it the state of worker `source`; returns the `rest` that it gave.

    Called by every worker of `world`, with nothing split and nothing under way. What is received is put in place when
    all of it is there: a worker whose source dies meanwhile still has, whole, what it had before.
    """
    is_source = world.rank == source
    faults.at("sending state" if is_source else "receiving state")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    told, mine = None, []
    if is_source:
        mine, told = _everything(module, optimizer, params), _describe(optimizer, params)
        places = {id(tensor): number for number, tensor in enumerate(mine)}
        told["messages"] = [[places[id(tensor)] for tensor in each] for each in agreement.in_messages(mine)]
        told["kinds"] = [(tuple(tensor.shape), tensor.dtype, tensor.device.type) for tensor in mine]
    described, rest = world.gather((told, rest) if is_source else None)[source]
    received = _exchange(world, source, mine, described)
    if needs:
        _prepare(optimizer, params, described)
        with torch.no_grad():
            for tensor, value in zip(_everything(module, optimizer, params), received, strict=True):
                if value is not None:
                    _real(tensor).copy_(value)
    return rest


def _exchange(world: World, source: int, mine: list[Tensor], described: dict[str, Any]) -> list[Tensor | None]:
    """Send what this worker has if it is the source; else what has come, by number, row by row."""
    kinds = described["kinds"]
    received: list[Tensor | None] = [None] * len(kinds)
    for numbers in described["messages"]:
        if world.rank == source:
            flat = torch.cat([_real(mine[number]).reshape(-1) for number in numbers])
        else:
            like = [torch.empty(kinds[number][0], dtype=kinds[number][1], device="meta") for number in numbers]
            shapes = [_real(each).shape for each in like]
            where = world.device if kinds[numbers[0]][2] != "cpu" else torch.device("cpu")
            flat = torch.empty(sum(map(math.prod, shapes)), dtype=_real(like[0]).dtype, device=where)
        if world.size > 1:
            work = dist.broadcast(flat, group=world.group, group_src=source, async_op=True)
            world.await_on_device(work, "taking the state of the run from another worker")
        if world.rank != source:
            pieces = flat.split([math.prod(shape) for shape in shapes])
            for number, shape, piece in zip(numbers, shapes, pieces, strict=True):
                received[number] = piece.view(shape)
    world.await_device("taking the state of the run from another worker")
    return received


def _everything(module: nn.Module, optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[Tensor]:
    """All tensors of a run, in an order that is the same wherever the optimizer has the same state."""
    state = [optimizer.state.get(param, {}) for param in params]
    kept = [each[key] for each in state for key in sorted(each) if isinstance(each[key], Tensor)]
    return [*module.parameters(), *module.buffers(), *kept]


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _describe(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> dict[str, Any]:
    """Everything about the optimizer but the elements of its tensors."""
    tensors: list[tuple[int, str, tuple[int, ...], torch.dtype, str]] = []
    scalars: list[tuple[int, str, Any]] = []
    for number, param in enumerate(params):
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                tensors.append((number, key, tuple(value.shape), value.dtype, value.device.type))
            else:
                scalars.append((number, key, value))
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"tensors": tensors, "scalars": scalars, "groups": groups}


def _prepare(optimizer: torch.optim.Optimizer, params: list[Tensor], described: dict[str, Any]) -> None:
    """Make `optimizer` one that has room for what is described."""
    for group, stored in zip(optimizer.param_groups, described["groups"], strict=True):
        group.update(stored)
    for number, key, value in described["scalars"]:
        optimizer.state[params[number]][key] = value
    for number, key, shape, dtype, device in described["tensors"]:
        param, state = params[number], optimizer.state[params[number]]
        if isinstance(state.get(key), Tensor) and state[key].shape == shape and state[key].dtype == dtype:
            continue
        where = param.device if device != "cpu" else torch.device("cpu")
        is_like = param.shape == shape and param.dim() > 0
        state[key] = torch.empty_like(param, dtype=dtype) if is_like else torch.empty(shape, dtype=dtype, device=where)
