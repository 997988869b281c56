"""A model and its optimizer as named pieces, and back: who owns what, whatever is split.

Names are `model/NAME` for parameters and buffers, `optimizer/NAME/KEY` for the optimizer's tensors of a parameter,
`wire/RANK/NAME` for what a worker's wire remembers, `strategy/all/NAME` and `strategy/RANK/NAME` for what a strategy
keeps, alike or of its own on every worker, `random/RANK/NUMBER` for where the numbers stand that a worker's model draws
(`join(seed=)`). What is split is written by its owners, part by part; what every worker has is dealt out, so that all
write about as much. Both are read by ranges of elements, so nothing of a model and its optimizer depends on how many
workers wrote, or on what was split then.

Elements are numbered row by row, whatever a parameter's memory format is: files are the same for all, and for other
tools. A part of a parameter that lies otherwise (channels_last, say) is no run of those numbers, so its parts are put
together before they are written, and it is read whole.
"""

import math
import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.keep import checks
from lockstep.keep.checkpoint import Checkpoint
from lockstep.keep.checks import MODEL, OPTIMIZER, RANDOM, STRATEGY, WIRE
from lockstep.keep.pieces import Piece
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.layout import in_memory_order, view_like
from lockstep.seeds import Generators
from lockstep.wire.error_feedback import shared_out
from lockstep.world import World


@dataclass(frozen=True, slots=True)
class Held:
    """What this worker holds of one parameter: elements from `offset` on."""

    name: str
    whole: nn.Parameter
    """The parameter itself, for its shape."""
    own: Tensor
    """What the optimizer works on: the parameter, or a fragment of it."""
    offset: int
    strides: tuple[int, ...]
    """How the parameter lies in memory; what it shows now may be a stand-in (zero=3)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter, in real numbers."""
        return _real_shape(self.whole)

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks for the parameter where something exists once."""
        return self.offset == 0

    @property
    def is_scattered(self) -> bool:
        """Whether the elements of a fragment do not follow one another row by row."""
        return self.own.dim() < len(self.strides) and not self._like().is_contiguous()

    def together(self, flat: Tensor) -> Tensor:
        """All elements, which lie in `flat` as in memory, row by row."""
        return _flat(view_like(flat, 0, self._like()))

    def stored(self, checkpoint: Checkpoint, name: str) -> Tensor:
        """What `checkpoint` has under `name` for what this worker holds, flat."""
        if not self.is_scattered:
            return checkpoint.read(name, self.offset, self.offset + _flat(self.own).numel())
        whole = checkpoint.read_whole(name)
        shaped = torch.view_as_complex(whole) if self.whole.is_complex() else whole
        return in_memory_order(shaped, self.strides)[self.offset : self.offset + self.own.numel()]

    def _like(self) -> Tensor:
        return torch.empty_strided(self.whole.shape, self.strides, dtype=self.whole.dtype, device="meta")


class TrainingState:
    """The tensors of a model and its optimizer, of its wire and of its strategy."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, world: World) -> None:
        # All that is read of the engine's own.
        replica = model if isinstance(model, DataParallel) else None
        self._module = replica.module if replica is not None else model
        self._wire = replica._engine.wire if replica is not None else None
        self._strategy = replica._engine.strategy if replica is not None else None
        numbers = replica._engine.own_numbers if replica is not None else None
        self._numbers = numbers if isinstance(numbers, Generators) else None
        parts = replica._engine.parts if replica is not None else None
        self._optimizer = optimizer
        self._world = world
        self._named = dict(self._module.named_parameters())
        self._is_split = parts is not None
        names = {id(param): name for name, param in self._named.items()}
        self._held = (
            [Held(names[id(part.param)], part.param, part.own, part.offset, part.strides) for part in parts]
            if parts is not None
            else [Held(name, param, param, 0, param.stride()) for name, param in self._named.items()]
        )

    # Writing

    def pieces(self) -> list[Piece]:
        """What this worker writes; every worker calls this."""
        found: list[Piece] = []
        scattered: dict[str, tuple[Held, Tensor]] = {}
        for held in self._held if self._is_split else self._dealt(self._held):
            for name, value in self._tensors(held):
                if not _is_like(value, held.own):
                    found.append(Piece.whole(name, _real(value)))
                elif held.is_scattered:
                    scattered[name] = held, value
                else:
                    found.append(Piece(name, held.shape, held.offset, _flat(value)))
        if self._is_split:
            found.extend(self._put_together(scattered))
        found.extend(Piece.whole(MODEL + name, _real(buffer)) for name, buffer in self._dealt(self._buffers()))
        own = f"{self._world.rank}/"
        if self._wire is not None:
            found.extend(Piece.whole(WIRE + own + name, value) for name, value in self._wire.state_dict().items())
        if self._strategy is not None:
            for name, value in self._dealt(list(self._strategy.common_tensors().items())):
                found.append(Piece.whole(f"{STRATEGY}all/{name}", _real(value)))
            for name, value in self._strategy.own_tensors().items():
                found.append(Piece.whole(STRATEGY + own + name, value))
        found.extend(Piece.whole(name, state) for name, state in self._random_states().items())
        return found

    def optimizer_values(self) -> dict[str, Any]:
        """The optimizer's groups and what else it keeps besides tensors, as JSON can hold it; every worker calls this.

        groups: the same on all workers. scalars: by parameter, from the worker that has its first element.
        """
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        own = {}
        for held in self._held:
            plain = {k: v for k, v in self._state_of(held).items() if not isinstance(v, Tensor)}
            if plain and held.is_first:
                own[held.name] = {key: _as_json(key, value) for key, value in plain.items()}
        scalars: dict[str, Any] = {}
        for theirs in self._world.gather_json(own):
            scalars |= theirs
        settings = [{k: _as_json(k, v) for k, v in group.items() if k != "params"} for group in groups]
        return {"groups": settings, "scalars": scalars}

    def _dealt(self, everything: Sequence[Any]) -> Sequence[Any]:
        """What this worker writes of what all have."""
        return everything[self._world.rank :: self._world.size]

    def _tensors(self, held: Held) -> Iterator[tuple[str, Tensor]]:
        """What this worker has of a parameter, and of its state, by name; what exists once, where it is to speak."""
        yield MODEL + held.name, held.own
        for key, value in self._state_of(held).items():
            if isinstance(value, Tensor) and (_is_like(value, held.own) or held.is_first):
                yield f"{OPTIMIZER}{held.name}/{key}", value

    def _put_together(self, scattered: Mapping[str, tuple[Held, Tensor]]) -> Iterator[Piece]:
        """Whole tensors, each on the worker that has its first element; one at a time, so that memory suffices."""
        for name in sorted(set().union(*self._world.gather_json(list(scattered)))):
            held, value = scattered.get(name, (None, None))
            offsets = self._world.gather_json(held.offset if held is not None else None)
            parts = self._world.gather_tensors([value] if value is not None else [])
            if held is not None and held.is_first:
                everyone = [(offset, part) for offset, own in zip(offsets, parts, strict=True) for part in own]
                flat = torch.cat([part for _, part in sorted(everyone, key=operator.itemgetter(0))])
                yield Piece(name, held.shape, 0, held.together(flat))

    def _state_of(self, held: Held) -> dict[str, Any]:
        state: Mapping[Any, dict[str, Any]] = self._optimizer.state if self._optimizer is not None else {}
        return state.get(held.own, {})

    def _buffers(self) -> list[tuple[str, Tensor]]:
        saved = set(self._module.state_dict(keep_vars=True))
        return [(name, buffer) for name, buffer in self._module.named_buffers() if name in saved]

    # Reading

    def wanted(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Which elements of a stored tensor `restore` will read on this worker."""
        numel = math.prod(shape)
        param = name.removeprefix(MODEL) if name.startswith(MODEL) else name.removeprefix(OPTIMIZER).rpartition("/")[0]
        held = [each for each in self._held if each.name == param and each.shape == shape]
        if any(each.is_scattered for each in held) or not self._is_split or param not in self._named:
            return 0, numel
        if self._named[param].shape and not held and _real_shape(self._named[param]) == shape:
            return 0, 0  # Nothing of this parameter is this worker's.
        if not held:
            return 0, numel
        return min(each.offset for each in held), max(each.offset + _flat(each.own).numel() for each in held)

    def restore(self, checkpoint: Checkpoint, scalars: Mapping[str, Mapping[str, Any]], groups: Sequence[Any]) -> None:
        """Set everything to what `checkpoint` has, which `check` has found to fit."""
        with torch.no_grad():
            for held in self._held:
                _set(held.own, held.stored(checkpoint, MODEL + held.name))
            for name, buffer in self._buffers():
                _set(buffer, checkpoint.read_whole(MODEL + name))
        if self._optimizer is not None and groups:
            for group, stored in zip(self._optimizer.param_groups, groups, strict=True):
                group.update({key: _like(group.get(key), value) for key, value in stored.items()})
            for held in self._held:
                self._restore_optimizer(self._optimizer, checkpoint, held, scalars.get(held.name, {}))
        if self._wire is not None:
            owners = self._owners(checkpoint, WIRE)
            everyone = (_with_prefix(checkpoint, f"{WIRE}{owner}/") for owner in sorted(owners))
            self._wire.load_state_dict(self._own(checkpoint, WIRE) or shared_out(everyone, self._world.size))
        if self._strategy is not None:
            self._strategy.load_common_tensors(_with_prefix(checkpoint, f"{STRATEGY}all/"))
            self._strategy.load_own_tensors(self._own(checkpoint, STRATEGY))
        if self._numbers is not None:
            self._restore_random(self._numbers, checkpoint)

    def _restore_random(self, numbers: Generators, checkpoint: Checkpoint) -> None:
        """Let the model's numbers go on; where they were not saved for so many workers, they stay where they are."""
        stored = self._own(checkpoint, RANDOM)
        numbers.states = [stored.get(name.rpartition("/")[2], state) for name, state in self._random_states().items()]
        if not stored and checkpoint.world_size == self._world.size and self._world.rank == 0:
            warnings.warn(
                f"{checkpoint.path} does not say how far the random numbers were that the model draws (dropout): it "
                "was saved by an earlier version, or without join(seed=). They begin anew from the seed.",
                stacklevel=2,
            )

    def _random_states(self) -> dict[str, Tensor]:
        """Where the numbers stand that this worker's model draws, by name."""
        states = self._numbers.states if self._numbers is not None else []
        return {f"{RANDOM}{self._world.rank}/{number}": state for number, state in enumerate(states)}

    def _restore_optimizer(
        self, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint, held: Held, scalars: Mapping[str, Any]
    ) -> None:
        prefix = f"{OPTIMIZER}{held.name}/"
        state: dict[str, Any] = dict(scalars)
        group = next((g for g in optimizer.param_groups if any(p is held.own for p in g["params"])), {})
        for name in [name for name in checkpoint.tensors if name.startswith(prefix)]:
            key = name.removeprefix(prefix)
            on_device = key != "step" or group.get("capturable") or group.get("fused")
            device = held.own.device if on_device else torch.device("cpu")
            if tuple(checkpoint.tensors[name].shape) == held.shape and held.shape != ():
                state[key] = _shaped(held.stored(checkpoint, name), held.own).to(device)
            else:
                state[key] = checkpoint.read_whole(name).to(device)
        if state:
            optimizer.state[held.own] = state
        else:
            optimizer.state.pop(held.own, None)

    def _own(self, checkpoint: Checkpoint, room: str) -> dict[str, Tensor]:
        """What this worker kept of its own; nothing on another number of workers, and what waited there is lost."""
        is_same = len(self._owners(checkpoint, room)) == self._world.size
        return _with_prefix(checkpoint, f"{room}{self._world.rank}/") if is_same else {}

    def _owners(self, checkpoint: Checkpoint, room: str) -> set[str]:
        return {name.split("/")[1] for name in checkpoint.tensors if name.startswith(room)} - {"all"}

    def check(self, checkpoint: Checkpoint, scalars: Mapping[str, Any], groups: Sequence[Any]) -> None:
        """Raise CheckpointError, before any change, unless `checkpoint` fits: it may come from elsewhere."""
        checks.check_model(checkpoint, {n: _real_shape(value) for n, value in (*self._named.items(), *self._buffers())})
        checks.check_tensors(checkpoint, self._named)
        checks.check_settings(checkpoint, scalars, groups, self._named, self._optimizer)
        checks.check_random(checkpoint, list(self._random_states().values()), self._world.device)


def _with_prefix(checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): checkpoint.read_whole(name) for name in names}


def _set(tensor: Tensor, stored: Tensor) -> None:
    real = _real(tensor)
    real.copy_(stored.view(real.shape))


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _real_shape(tensor: Tensor) -> tuple[int, ...]:
    return (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)


def _flat(tensor: Tensor) -> Tensor:
    return _real(tensor).reshape(-1)


def _shaped(value: Tensor, like: Tensor) -> Tensor:
    """`value`, which lies row by row, in the shape and memory format of `like`."""
    shaped = torch.view_as_complex(value.view(*like.shape, 2)) if like.is_complex() else value.view(like.shape)
    return torch.empty_like(like, dtype=shaped.dtype, device=shaped.device).copy_(shaped)


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
