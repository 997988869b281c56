"""A model and its optimizer as named pieces, and back: who owns what, whatever is split.

Names are `model/NAME` for parameters and buffers, `optimizer/NAME/KEY` for the optimizer's tensors of a parameter,
`wire/RANK/NAME` for what a worker's wire remembers, `strategy/all/NAME` and `strategy/RANK/NAME` for what a strategy
keeps, alike or of its own on every worker. What is split is written by its owners, part by part; what every worker has
is dealt out, so that all write about as much. Both are read by ranges of elements, so nothing here depends on how many
workers wrote, or on what was split then.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import CheckpointError, UsageError
from lockstep.keep.checkpoint import Checkpoint
from lockstep.keep.piece import Piece
from lockstep.replica.companion import Companion
from lockstep.replica.data_parallel import DataParallel

MODEL, OPTIMIZER, WIRE, STRATEGY = "model/", "optimizer/", "wire/", "strategy/"


@dataclass(frozen=True, slots=True)
class Held:
    """What this worker holds of one parameter: elements from `offset` on."""

    name: str
    whole: nn.Parameter
    """The parameter itself, for its shape."""
    own: Tensor
    """What the optimizer works on: the parameter, or a fragment of it."""
    offset: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter, in real numbers."""
        return (*self.whole.shape, 2) if self.whole.is_complex() else tuple(self.whole.shape)

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks for the parameter where something exists once."""
        return self.offset == 0


class State:
    """The tensors of a model and its optimizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, rank: int, size: int) -> None:
        self._module = model.module if isinstance(model, DataParallel) else model
        self._optimizer = optimizer
        self._coded = model.coded if isinstance(model, DataParallel) else None
        self._companion = model.companion if isinstance(model, DataParallel) else None
        self._rank, self._size = rank, size
        self._named = dict(self._module.named_parameters())
        parts = model.parts if isinstance(model, DataParallel) else None
        self._is_split = parts is not None
        self._held = list(self._held_parts(parts)) if parts is not None else self._held_whole()

    def _held_parts(self, parts: Sequence[tuple[nn.Parameter, nn.Parameter, int]]) -> Iterator[Held]:
        names = {id(param): name for name, param in self._named.items()}
        for whole, own, offset in parts:
            yield Held(names[id(whole)], whole, own, offset)

    def _held_whole(self) -> list[Held]:
        return [Held(name, param, param, 0) for name, param in self._named.items()]

    # Writing

    def pieces(self) -> list[Piece]:
        """What this worker writes."""
        found: list[Piece] = []
        for number, held in enumerate(self._held):
            if self._is_split or self._is_dealt(number):
                found.append(Piece(MODEL + held.name, held.shape, held.offset, _flat(held.own)))
                found.extend(self._optimizer_pieces(held))
        for number, (name, buffer) in enumerate(self._buffers()):
            if self._is_dealt(number):
                found.append(Piece.whole(MODEL + name, _real(buffer)))
        if self._coded is not None:
            found.extend(Piece.whole(f"{WIRE}{self._rank}/{n}", value) for n, value in self._coded.state_dict().items())
        if self._companion is not None:
            found.extend(self._companion_pieces(self._companion))
        return found

    def _companion_pieces(self, companion: Companion) -> Iterator[Piece]:
        for number, (name, value) in enumerate(companion.common_tensors().items()):
            if self._is_dealt(number):
                yield Piece.whole(f"{STRATEGY}all/{name}", _real(value))
        for name, value in companion.own_tensors().items():
            yield Piece.whole(f"{STRATEGY}{self._rank}/{name}", value)

    def _is_dealt(self, number: int) -> bool:
        """Whether this worker writes a tensor that all have."""
        return number % self._size == self._rank

    def _optimizer_pieces(self, held: Held) -> Iterator[Piece]:
        for key, value in self._state_of(held).items():
            if not isinstance(value, Tensor):
                continue
            name = f"{OPTIMIZER}{held.name}/{key}"
            if _is_like(value, held.own):
                yield Piece(name, held.shape, held.offset, _flat(value))
            elif held.is_first:
                yield Piece.whole(name, _real(value))

    def hyper(self) -> list[dict[str, Any]]:
        """The optimizer's groups without their tensors, as JSON can hold them; the same on all workers."""
        if self._optimizer is None:
            return []
        plain = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        return [{name: _as_json(name, value) for name, value in group.items()} for group in plain]

    def scalars(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps for a parameter besides tensors, of the parameters that this worker speaks for."""
        found = {}
        for held in self._held:
            plain = {k: v for k, v in self._state_of(held).items() if not isinstance(v, Tensor)}
            if plain and held.is_first:
                found[held.name] = {key: _as_json(key, value) for key, value in plain.items()}
        return found

    def _state_of(self, held: Held) -> dict[str, Any]:
        state: Mapping[Any, dict[str, Any]] = self._optimizer.state if self._optimizer is not None else {}
        return state.get(held.own, {})

    def _buffers(self) -> list[tuple[str, Tensor]]:
        saved = set(self._module.state_dict(keep_vars=True))
        return [(name, buffer) for name, buffer in self._module.named_buffers() if name in saved]

    # Reading

    def restore(self, checkpoint: Checkpoint, scalars: Mapping[str, Mapping[str, Any]], hyper: Sequence[Any]) -> None:
        """Set everything to what `checkpoint` has; raises CheckpointError, before any change, if that does not fit."""
        self._check(checkpoint, hyper)
        with torch.no_grad():
            for held in self._held:
                self._read(checkpoint, MODEL + held.name, held.offset, held.own)
            for name, buffer in self._buffers():
                self._read(checkpoint, MODEL + name, 0, buffer)
        if self._optimizer is not None and hyper:
            for group, stored in zip(self._optimizer.param_groups, hyper, strict=True):
                group.update({key: _like(group.get(key), value) for key, value in stored.items()})
            for held in self._held:
                self._restore_optimizer(checkpoint, held, scalars.get(held.name, {}))
        if self._coded is not None:
            self._coded.load_state_dict(self._own(checkpoint, WIRE) or self._share_of_errors(checkpoint))
        if self._companion is not None:
            self._companion.load_common_tensors(_with_prefix(checkpoint, f"{STRATEGY}all/"))
            self._companion.load_own_tensors(self._own(checkpoint, STRATEGY))

    def _share_of_errors(self, checkpoint: Checkpoint) -> dict[str, Tensor]:
        """This worker's equal share of all that waited on any worker, where there were more or fewer of them.

        It is the sum of all errors that counts, whoever holds them. What else a wire remembers is alike on all.
        """
        found: dict[str, Tensor] = {}
        for name in sorted(checkpoint.tensors):
            if not name.startswith(WIRE):
                continue
            where, _, what = name.removeprefix(WIRE).partition("/")[2].partition(".")
            if where == "error":
                error = checkpoint.read_whole(name) / self._size
                found[f"error.{what}"] = found[f"error.{what}"] + error if f"error.{what}" in found else error
            elif not where.startswith("owner_"):
                found.setdefault(f"{where}.{what}", checkpoint.read_whole(name))
        for name in checkpoint.tensors:
            if name.startswith(WIRE) and "/owner_error." in name:
                part = checkpoint.read_whole(name).view(-1) / self._size
                begin = int(checkpoint.read_whole(name.replace("/owner_error.", "/owner_begin.")))
                found["error." + name.partition("/owner_error.")[2]].view(-1)[begin : begin + part.numel()] += part
        return found

    def _own(self, checkpoint: Checkpoint, room: str) -> dict[str, Tensor]:
        """What this worker kept of its own; nothing on another number of workers, and what waited there is lost."""
        owners = {name.split("/")[1] for name in checkpoint.tensors if name.startswith(room)} - {"all"}
        return _with_prefix(checkpoint, f"{room}{self._rank}/") if len(owners) == self._size else {}

    def _check(self, checkpoint: Checkpoint, hyper: Sequence[Any]) -> None:
        here = {MODEL + held.name: held.shape for held in self._held}
        here |= {MODEL + name: tuple(_real(buffer).shape) for name, buffer in self._buffers()}
        there = {name: info.shape for name, info in checkpoint.tensors.items() if name.startswith(MODEL)}
        expected = {MODEL + name for name in self._named} | {MODEL + name for name, _ in self._buffers()}
        missing, surplus = sorted(expected - there.keys()), sorted(there.keys() - expected)
        if missing or surplus:
            raise CheckpointError(
                f"{checkpoint.path} is of another model: "
                + "; ".join(
                    f"{what} {', '.join(name.removeprefix(MODEL) for name in names[:3])}"
                    + (f" and {len(names) - 3} more" if len(names) > 3 else "")
                    for what, names in (("it lacks", missing), ("this model lacks", surplus))
                    if names
                )
                + ". Build the model that was saved."
            )
        for name, shape in here.items():
            if tuple(there[name]) != shape:
                raise CheckpointError(
                    f"{checkpoint.path}: {name.removeprefix(MODEL)!r} has shape {list(there[name])} there and "
                    f"{list(shape)} here. Build the model that was saved."
                )
        if self._optimizer is not None and hyper and len(hyper) != len(self._optimizer.param_groups):
            raise CheckpointError(
                f"{checkpoint.path}: the optimizer had {len(hyper)} groups when it was saved and has "
                f"{len(self._optimizer.param_groups)} now. Make the same groups."
            )

    def _read(self, checkpoint: Checkpoint, name: str, begin: int, out: Tensor) -> None:
        flat = _flat(out)
        stored = checkpoint.read(name, begin, begin + flat.numel())
        out_real = _real(out)
        out_real.copy_(stored.view(out_real.shape))

    def _restore_optimizer(self, checkpoint: Checkpoint, held: Held, scalars: Mapping[str, Any]) -> None:
        assert self._optimizer is not None
        prefix = f"{OPTIMIZER}{held.name}/"
        state: dict[str, Any] = dict(scalars)
        group = next((g for g in self._optimizer.param_groups if any(p is held.own for p in g["params"])), {})
        for name in [name for name in checkpoint.tensors if name.startswith(prefix)]:
            key = name.removeprefix(prefix)
            info = checkpoint.tensors[name]
            on_device = key != "step" or group.get("capturable") or group.get("fused")
            device = held.own.device if on_device else torch.device("cpu")
            if tuple(info.shape) == held.shape and held.shape != ():
                value = checkpoint.read(name, held.offset, held.offset + _flat(held.own).numel())
                state[key] = _shaped(value, held.own).to(device)
            else:
                state[key] = checkpoint.read_whole(name).to(device)
        if state:
            self._optimizer.state[held.own] = state
        else:
            self._optimizer.state.pop(held.own, None)


def _with_prefix(checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): checkpoint.read_whole(name) for name in names}


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(tensor: Tensor) -> Tensor:
    return _real(tensor).reshape(-1)


def _shaped(value: Tensor, like: Tensor) -> Tensor:
    return torch.view_as_complex(value.view(*like.shape, 2)) if like.is_complex() else value.view(like.shape)


def _is_like(value: Tensor, own: Tensor) -> bool:
    return value.shape == own.shape and value.dim() > 0


def _as_json(name: str, value: Any) -> Any:
    """A hyper-parameter as JSON can hold it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_as_json(name, each) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(
        f"the optimizer's {name!r} is a {type(value).__name__}; a checkpoint holds numbers, texts and lists of them."
    )


def _like(current: Any, stored: Any) -> Any:
    """A stored hyper-parameter in the form that the optimizer has it in now."""
    if isinstance(current, tuple):
        return tuple(stored)
    if isinstance(current, Tensor):
        return torch.full_like(current, stored)
    return stored
