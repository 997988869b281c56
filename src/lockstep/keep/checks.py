"""Whether a checkpoint fits a model, asked before anything of the model is changed: it may come from a stranger.

Tensors of other sizes than this model's make could fill up memory; other settings could be anything.
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import CheckpointError
from lockstep.keep import json_tree, manifest
from lockstep.keep.checkpoint import Checkpoint

MODEL, OPTIMIZER, WIRE, STRATEGY, RANDOM = "model/", "optimizer/", "wire/", "strategy/", "random/"
"""How the names of tensors begin; see `state`."""

SCHEDULED = dict.fromkeys(("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"), 0.0)
"""What torch's schedulers add to an optimizer's groups: a run may go on without one, or make it after loading."""

_SMALL_NUMEL = 1 << 20
"""An optimizer or a wire may keep that many elements of anything, whatever the parameter's size."""


def check_model(checkpoint: Checkpoint, here: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError unless the checkpoint has parameters and buffers of these names and shapes."""
    there = {
        name.removeprefix(MODEL): tuple(entry.shape)
        for name, entry in checkpoint.tensors.items()
        if name.startswith(MODEL)
    }
    lacking = {"it lacks": here.keys() - there.keys(), "this model lacks": there.keys() - here.keys()}
    if any(lacking.values()):
        said = "; ".join(f"{what} {_first_of(names)}" for what, names in lacking.items() if names)
        raise CheckpointError(f"{checkpoint.path} is of another model: {said}. Build the model that was saved.")
    for name, shape in here.items():
        if there[name] != shape:
            raise CheckpointError(
                f"{checkpoint.path}: {name!r} has shape {list(there[name])} there and {list(shape)} here. Build the "
                "model that was saved."
            )


def check_tensors(checkpoint: Checkpoint, params: Mapping[str, nn.Parameter]) -> None:
    """Raise CheckpointError for a tensor that a parameter's optimizer, wire or strategy cannot have."""
    whole = sum(param.numel() for param in params.values())
    for name, entry in checkpoint.tensors.items():
        room, _, rest = name.partition("/")
        owner, _, kept = rest.partition("/")
        is_own = f"{room}/" in (WIRE, STRATEGY) and owner != "all"
        param = params.get(kept.partition(".")[2]) if is_own else _param_in(name, params)
        most = 4 * whole  # A model's own were compared; of a wire or strategy, errors and anchors.
        if f"{room}/" == OPTIMIZER:
            # A preconditioner is a square matrix of one of the parameter's sides.
            most = max(2 * param.numel(), max(param.shape, default=1) ** 2) if param is not None else -_SMALL_NUMEL - 1
        where = f"{checkpoint.path}/{manifest.NAME}: tensor {name!r}"
        if entry.numel > most + _SMALL_NUMEL:
            raise CheckpointError(
                f"{where} of shape {list(entry.shape)} belongs to no parameter of this model, or is too large for it. "
                "Build the model that was saved; nothing was loaded."
            )
        if f"{room}/" in (WIRE, STRATEGY) and param is not None:
            wanted = _wanted(kept, tuple(entry.shape), entry.dtype, param)
            if not wanted and kept.startswith("owner_error.") and not _has_its_place(checkpoint, name, param):
                wanted = "its `error` and an `owner_begin` inside it are"
            if wanted:
                raise CheckpointError(
                    f"{where} is {entry.dtype} of shape {list(entry.shape)}, and {wanted} expected for this model. "
                    "Build the model and the strategy that were saved; nothing was loaded."
                )


def _param_in(path: str, params: Mapping[str, nn.Parameter]) -> nn.Parameter | None:
    """The parameter whose name is in `path`, as in optimizer/NAME/KEY or strategy/all/outer/NAME/KEY."""
    words = path.split("/")
    runs = ("/".join(words[begin:end]) for begin in range(1, len(words)) for end in range(begin + 1, len(words) + 1))
    return next((params[run] for run in runs if run in params), None)


def _wanted(kept: str, shape: tuple[int, ...], dtype: torch.dtype, param: nn.Parameter) -> str:
    """What a tensor kept for `param` should be instead; empty if it may be what it is.

    kept: `error.NAME` and the like of a wire, or a path that ends with what an optimizer calls its tensor.
    """
    full = (*param.shape, 2) if param.is_complex() else tuple(param.shape)
    numel = prod(full)
    what = kept.partition(".")[0]
    if what == "error" and (prod(shape) != numel or not dtype.is_floating_point):
        return f"{numel} floating-point values are"
    if what == "owner_error" and (prod(shape) > numel or not dtype.is_floating_point):
        return f"at most {numel} floating-point values are"
    if what in ("owner_begin", "after") and (prod(shape) != 1 or dtype.is_floating_point):
        return "a whole number is"
    if "/" in kept and prod(shape) != 1:
        # Of the parameter's shape, summed up along some sides, flat, or a preconditioner of one side.
        is_summed = len(shape) == len(full) and all(a in (1, b) for a, b in zip(shape, full, strict=True))
        is_square = len(shape) == 2 and shape[0] == shape[1] and shape[0] in full
        if not dtype.is_floating_point or not (is_summed or is_square or shape == (numel,)):
            return f"floating-point values of shape {list(full)} are"
    return ""


def _has_its_place(checkpoint: Checkpoint, name: str, param: nn.Parameter) -> bool:
    """Whether a part of an error, `.../owner_error.NAME`, lies in the whole that is there too."""
    whole, begin = (name.replace("/owner_error.", f"/{kind}.") for kind in ("error", "owner_begin"))
    if whole not in checkpoint.tensors or begin not in checkpoint.tensors or checkpoint.tensors[begin].numel != 1:
        return False
    numel = param.numel() * (2 if param.is_complex() else 1)
    return 0 <= int(checkpoint.read_whole(begin)) <= numel - checkpoint.tensors[name].numel


def check_settings(
    checkpoint: Checkpoint,
    scalars: Mapping[str, Any],
    groups: Sequence[Any],
    params: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Raise CheckpointError for what an optimizer keeps besides tensors, and this one does not know."""
    where = f"{checkpoint.path}/{manifest.NAME}"
    for name, plain in scalars.items():
        if name not in params or type(plain) is not dict:
            raise CheckpointError(f"{where}: scalars[{name!r}] is of no parameter of this model. Nothing was loaded.")
        anything = {key: [None] if type(value) is list else None for key, value in plain.items()}
        json_tree.check_like(plain, anything, f"{where}: scalars[{name!r}]")
    live = optimizer.param_groups if optimizer is not None and groups else []
    if live and len(groups) != len(live):
        raise CheckpointError(
            f"{checkpoint.path}: the optimizer had {len(groups)} groups when it was saved and has {len(live)} now. "
            "Make the same groups."
        )
    for number, (stored, group) in enumerate(zip(groups, live, strict=False)):
        known = SCHEDULED | {key: value for key, value in group.items() if key != "params"}
        json_tree.check_like(stored, known, f"{where}: groups[{number}]", finite=True)


def check_random(checkpoint: Checkpoint, live: Sequence[Tensor], device: torch.device) -> None:
    """Raise CheckpointError for what is no state of a generator: torch would, in the middle of a step.

    All workers look at the states of all, so that all raise. live: the states that those are to take the place of; the
    first is of the host, others of `device`.
    """
    for name, entry in checkpoint.tensors.items():
        number = name.rpartition("/")[2]
        if not name.startswith(RANDOM) or number not in map(str, range(len(live))):
            continue
        try:
            state = live[int(number)]
            if (entry.dtype, entry.shape) != (state.dtype, tuple(state.shape)):
                raise RuntimeError(f"it is {entry.dtype} of shape {list(entry.shape)}")
            torch.Generator(device if int(number) else "cpu").set_state(checkpoint.read_whole(name))
        except RuntimeError as error:
            raise CheckpointError(
                f"{checkpoint.path}/{manifest.NAME}: tensor {name!r} is no state of a random generator here: {error}. "
                "Nothing was loaded."
            ) from error


def _first_of(names: set[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
