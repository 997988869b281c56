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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.keep import checks
from lockstep.keep.checkpoint import Checkpoint
from lockstep.keep.checks import MODEL, OPTIMIZER, RANDOM, STRATEGY, WIRE
from lockstep.keep.held import Held, Part, flattened, in_reals, real_shape, together
from lockstep.keep.pieces import Piece
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.local_params import local_part
from lockstep.seeds import Generators
from lockstep.torch_private import as_dtensor, is_dtensor
from lockstep.wire.error_feedback import shared_out
from lockstep.world import World


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
        self._world = replica.world if replica is not None else world
        """The workers that each have one replica, or a part of it that no other has."""
        self._holders = world
        """All that hold a part of the model."""
        engine = replica._engine if replica is not None else None
        self._mesh = engine.mesh.world if engine is not None and engine.mesh is not None else None
        """Those that together hold one replica, in parts that optimizer and buckets take for whole."""
        self._split = engine.split_world if engine is not None and parts is not None else None
        """Those over which what the optimizer has is split."""
        self._is_copy = engine is not None and engine.is_copy
        """Whether others, that speak for it, have all of what this worker has."""
        self._writes = self._mesh is None or self._mesh.rank == 0
        """Whether this worker writes what all workers of a mesh have."""
        speaks: Callable[[Tensor], bool] = engine.speaks_for if engine is not None else lambda _: True
        self._named = dict(self._module.named_parameters())
        self._is_split = parts is not None
        names = {id(param): name for name, param in self._named.items()}
        held: list[tuple[nn.Parameter, Tensor, int, tuple[int, ...]]] = (
            [(part.param, part.own, part.offset, part.strides) for part in parts]
            if parts is not None
            else [(param, param, 0, local_part(param).stride()) for param in self._named.values()]
        )
        self._held = [
            Held(names[id(whole)], whole, key, offset, strides, speaks(whole)) for whole, key, offset, strides in held
        ]

    # Writing

    def pieces(self) -> list[Piece]:
        """What this worker writes; every worker calls this."""
        found: list[Piece] = []
        scattered: dict[str, Part] = {}
        for held in self._held if self._is_split else self._dealt(self._held):
            for name, value in self._tensors(held):
                if not _is_like(value, held.own):
                    found.append(Piece.whole(name, in_reals(value)))
                elif held.is_scattered:
                    is_ordered = held.own.dim() == len(held.strides)
                    scattered[name] = Part(held.name, held.box, held.offset, held.strides, is_ordered, value)
                else:
                    found.append(Piece(name, held.shape, held.begin, flattened(value)))
        found.extend(self._put_together(scattered))
        if self._writes:
            found.extend(Piece.whole(MODEL + name, in_reals(buffer)) for name, buffer in self._dealt(self._buffers()))
        own = f"{self._holders.rank}/"
        if self._wire is not None:
            found.extend(Piece.whole(WIRE + own + name, value) for name, value in self._wire.state_dict().items())
        if self._strategy is not None:
            for name, value in self._dealt(list(self._strategy.common_tensors().items())):
                found.append(Piece.whole(f"{STRATEGY}all/{name}", in_reals(value)))
            for name, value in self._strategy.own_tensors().items():
                found.append(Piece.whole(STRATEGY + own + name, value))
        if self._writes:
            found.extend(Piece.whole(name, state) for name, state in self._random_states().items())
        return found

    def optimizer_values(self) -> dict[str, Any]:
        """The optimizer's groups and what else it keeps besides tensors, as JSON can hold it; every worker calls this.

        groups: the same on all workers. scalars: by parameter, from the worker that has its first element.
        """
        own = {}
        for held in self._held:
            plain = {k: v for k, v in self._state_of(held).items() if not isinstance(v, Tensor)}
            if plain and held.is_first:
                own[held.name] = {key: _as_json(key, value) for key, value in plain.items()}
        scalars: dict[str, Any] = {}
        for theirs in self._holders.gather_json(own):
            scalars |= theirs
        return {"groups": settings_of(self._optimizer) if self._optimizer is not None else [], "scalars": scalars}

    def _dealt(self, everything: Sequence[Any]) -> Sequence[Any]:
        """What this worker writes of what all have."""
        return everything[self._world.rank :: self._world.size]

    def _tensors(self, held: Held) -> Iterator[tuple[str, Tensor]]:
        """What this worker has of a parameter, and of its state, by name; what exists once, where it is to speak."""
        if not held.speaks:
            return
        yield MODEL + held.name, held.own
        for key, value in self._state_of(held).items():
            if not isinstance(value, Tensor):
                continue
            mine = local_part(value)
            if is_dtensor(value) and not _is_like(mine, held.own):
                raise UsageError(
                    f"the optimizer's {key!r} of {held.name!r} is a DTensor of another shape than the parameter's, "
                    "which cannot be cut for another mesh. Save with an optimizer that works element by element."
                )
            if _is_like(mine, held.own) or held.is_first:
                yield f"{OPTIMIZER}{held.name}/{key}", mine

    def _put_together(self, scattered: Mapping[str, Part]) -> Iterator[Piece]:
        """Whole tensors of the parts of all workers, one at a time, so that memory suffices.

        Of what is split, those who split it exchange theirs; then, of each tensor, one row of workers of the mesh does.
        """
        asked = self._holders if self._is_split else self._mesh
        names = sorted(set().union(*asked.gather_json(list(scattered)))) if asked is not None else ()
        if self._is_copy:
            return
        for number, name in enumerate(names):
            parts: Sequence[Part] = [scattered[name]] if name in scattered else []
            if self._split is not None:
                parts = Part.exchange(self._split, parts)
                if self._split.rank != number % self._split.size:
                    continue
            parts = Part.exchange(self._mesh, parts)
            if self._writes:
                param = self._named[parts[0].param]
                yield Piece(name, real_shape(param), 0, together(param, parts))

    def _state_of(self, held: Held) -> dict[str, Any]:
        state: Mapping[Any, dict[str, Any]] = self._optimizer.state if self._optimizer is not None else {}
        return state.get(held.key, {})

    def _buffers(self) -> list[tuple[str, Tensor]]:
        saved = set(self._module.state_dict(keep_vars=True))
        return [(name, local_part(buffer)) for name, buffer in self._module.named_buffers() if name in saved]

    # Reading

    def wanted(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Which elements of a stored tensor `restore` will read on this worker."""
        numel = math.prod(shape)
        param = name.removeprefix(MODEL) if name.startswith(MODEL) else name.removeprefix(OPTIMIZER).rpartition("/")[0]
        held = [each for each in self._held if each.name == param and each.shape == shape]
        if any(each.is_scattered for each in held) or not self._is_split or param not in self._named:
            return 0, numel
        if self._named[param].shape and not held and real_shape(self._named[param]) == shape:
            return 0, 0  # Nothing of this parameter is this worker's.
        if not held:
            return 0, numel
        return min(each.offset for each in held), max(each.offset + flattened(each.own).numel() for each in held)

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
            own = self._own(checkpoint, WIRE, self._holders)
            self._wire.load_state_dict(own or shared_out(everyone, self._holders.size))
        if self._strategy is not None:
            self._strategy.load_common_tensors(_with_prefix(checkpoint, f"{STRATEGY}all/"))
            self._strategy.load_own_tensors(self._own(checkpoint, STRATEGY, self._holders))
        if self._numbers is not None:
            self._restore_random(self._numbers, checkpoint)

    def _restore_random(self, numbers: Generators, checkpoint: Checkpoint) -> None:
        """Let the model's numbers go on; where they were not saved for so many workers, they stay where they are."""
        stored = self._own(checkpoint, RANDOM, self._world)
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
        group = next((g for g in optimizer.param_groups if any(p is held.key for p in g["params"])), {})
        for name in [name for name in checkpoint.tensors if name.startswith(prefix)]:
            key = name.removeprefix(prefix)
            on_device = key != "step" or group.get("capturable") or group.get("fused")
            device = held.own.device if on_device else torch.device("cpu")
            if tuple(checkpoint.tensors[name].shape) == held.shape and held.shape != ():
                mine = _shaped(held.stored(checkpoint, name), held.own).to(device)
                state[key] = as_dtensor(mine, held.key) if is_dtensor(held.key) else mine
            else:
                state[key] = checkpoint.read_whole(name).to(device)
        if state:
            optimizer.state[held.key] = state
        else:
            optimizer.state.pop(held.key, None)

    def _own(self, checkpoint: Checkpoint, room: str, world: World) -> dict[str, Tensor]:
        """What this worker kept of its own; nothing on another number of workers, and what waited there is lost."""
        is_same = len(self._owners(checkpoint, room)) == world.size
        return _with_prefix(checkpoint, f"{room}{world.rank}/") if is_same else {}

    def _owners(self, checkpoint: Checkpoint, room: str) -> set[str]:
        return {name.split("/")[1] for name in checkpoint.tensors if name.startswith(room)} - {"all"}

    def check(self, checkpoint: Checkpoint, scalars: Mapping[str, Any], groups: Sequence[Any]) -> None:
        """Raise CheckpointError, before any change, unless `checkpoint` fits: it may come from elsewhere."""
        checks.check_model(checkpoint, {n: real_shape(value) for n, value in (*self._named.items(), *self._buffers())})
        checks.check_tensors(checkpoint, self._named)
        checks.check_settings(checkpoint, scalars, groups, self._named, self._optimizer)
        checks.check_random(checkpoint, list(self._random_states().values()), self._world.device)


def _with_prefix(checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    names = [name for name in checkpoint.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): checkpoint.read_whole(name) for name in names}


def _set(tensor: Tensor, stored: Tensor) -> None:
    real = in_reals(tensor)
    real.copy_(stored.view(real.shape))


def _shaped(value: Tensor, like: Tensor) -> Tensor:
    """`value`, which lies row by row, in the shape and memory format of `like`."""
    shaped = torch.view_as_complex(value.view(*like.shape, 2)) if like.is_complex() else value.view(like.shape)
    return torch.empty_like(like, dtype=shaped.dtype, device=shaped.device).copy_(shaped)


def _is_like(value: Tensor, own: Tensor) -> bool:
    return value.shape == own.shape and value.dim() > 0


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Its groups without their parameters, as JSON can hold them."""
    return [{k: _as_json(k, v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


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
