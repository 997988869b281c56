"""`lockstep.save` and `lockstep.load`: a training run, to go on with on any number of workers."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from lockstep.data.loader import ShardedLoader
from lockstep.errors import CheckpointError, UsageError
from lockstep.keep import folder as folders
from lockstep.keep import json_tree, manifest
from lockstep.keep.checkpoint import has_checkpoint, open_checkpoint
from lockstep.keep.manifest import TensorEntry
from lockstep.keep.pieces import HostMemory
from lockstep.keep.state import TrainingState
from lockstep.keep.writing import Saving, write, write_async
from lockstep.replica.data_parallel import DataParallel
from lockstep.world import World, join


class Resumable(Protocol):
    """A loader that can say where it is: what `lockstep.shard` returns, or torchdata's."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What `load` found besides what it has restored; false if there was nothing to load (`missing="ok"`)."""

    step: int
    """The step after which it was saved; 0 if nothing was loaded."""
    extra: Any
    """What was given to `save` as `extra`; None if nothing was loaded."""
    path: Path | None
    """The checkpoint that was used; None if nothing was loaded."""

    def __bool__(self) -> bool:
        return self.path is not None


def save(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int | None = None,
    loader: Resumable | None = None,
    extra: Any = None,
    keep_last: int | None = None,
    wait: bool = True,
    memory: HostMemory | None = None,
) -> Saving | Path:
    """Write a checkpoint into the folder `path`; every worker calls this, and each writes what it owns.

    step: after how many steps this is; the folder has one checkpoint per step. If not given, one more than the newest.
    loader: what `lockstep.shard` returned, so that `load` goes on at the next batch.
    extra: plain values (a scheduler's `state_dict()`, say), the same on all workers: dicts, lists, tuples, Counters of
        text, numbers (numpy's too), booleans and None come back as they were; other types are refused by name.
    keep_last: how many checkpoints to keep.
    wait: False copies what this worker owns, returns a handle at once, and writes while training goes on; its
        `wait()` raises what went wrong. `memory`, kept from one save to the next, spares allocating the copy.

    A crash at any moment leaves the checkpoint before whole. If writing fails, on whichever worker, every worker
    raises CheckpointError, nothing is left behind, and training can go on.
    """
    world = _world(model)
    world.meet("lockstep.save()")
    if step is None:
        step = _next_step(Path(path), world)
    state = TrainingState(model, optimizer, world)
    tree = {
        "optimizer": state.optimizer_values(),
        "loader": loader.state_dict() if loader is not None else None,
        "extra": extra,
    }
    if wait:
        return write(path, step=step, pieces=state.pieces(), tree=tree, world=world, keep_last=keep_last)
    return write_async(
        path,
        step=step,
        pieces=state.pieces(),
        tree=tree,
        world=world,
        keep_last=keep_last,
        memory=memory,
        patience=world.timeout,
        has_lost=world.peers.has_lost,
    )


def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loader: Resumable | None = None,
    fall_back: bool = False,
    missing: Literal["raise", "ok"] = "raise",
    check: Callable[[object, Any], None] | None = None,
) -> Resumed:
    """Set model, optimizer and loader to what the newest checkpoint in `path` has; every worker calls this.

    The number of workers and `zero` may differ from those it was saved with. `path` may also be one checkpoint of a
    folder. A damaged one raises CheckpointError naming the file; with `fall_back` the one before it is used. A folder
    that is not there, or has no checkpoint, raises it too; with `missing="ok"`, for a script that is started first and
    resumed later, what is returned is then false, its `step` 0, and nothing was changed. `check` is called with the
    manifest's path and `extra` before anything is changed, and may raise.

    A checkpoint may come from a stranger: only regular files of its folder are read, sizes are those of this model, and
    settings those of this optimizer. What else it says raises CheckpointError naming file and field, before any change.
    """
    world = _world(model)
    world.meet("lockstep.load()")
    chosen = _chosen(path, world, fall_back, missing)
    if chosen is None:
        return Resumed(0, None, None)
    with open_checkpoint(chosen) as checkpoint:
        content = checkpoint.tree
        if not isinstance(content, dict) or not isinstance(content.get("optimizer"), dict):
            raise CheckpointError(f"{checkpoint.path} was not written by lockstep.save. Read it with lockstep.keep.")
        where = checkpoint.path / manifest.NAME
        scalars = json_tree.field(content["optimizer"], "scalars", (dict,), where)
        groups = json_tree.field(content["optimizer"], "groups", (list,), where)
        position = json_tree.field(content, "loader", (dict, type(None)), where)
        if "extra" not in content:
            raise CheckpointError(f"{where}: 'extra' is missing. The manifest is damaged; nothing was loaded.")
        if check is not None:
            check(where, content["extra"])
        if isinstance(loader, ShardedLoader) and position is not None:
            for name in loader.state_dict():
                json_tree.field(position, name, (int,), f"{where}: loader")
        state = TrainingState(model, optimizer, world)
        state.check(checkpoint, scalars, groups)
        if isinstance(model, DataParallel):
            model._engine.before_load()
        state.restore(checkpoint, scalars, groups)
        if isinstance(model, DataParallel):
            model._engine.after_load()
        if loader is not None and position is not None:
            loader.load_state_dict(position)
        return Resumed(checkpoint.step, content["extra"], checkpoint.path)


def _chosen(path: str | PathLike[str], world: World, fall_back: bool, missing: str) -> Path | None:
    """The checkpoint that all workers use, if there is one and there need not be: worker 0 chooses."""
    if missing not in ("raise", "ok"):
        raise UsageError(f'missing={missing!r}: give "raise", or "ok" to start anew where there is no checkpoint.')
    found, failure = "", ""
    if world.rank == 0:
        try:
            if missing == "raise" or has_checkpoint(path):
                with open_checkpoint(path, fall_back=fall_back) as checkpoint:
                    found = str(checkpoint.path)
        except CheckpointError as error:
            failure = str(error)
    found, failure = world.gather_json([found, failure])[0]
    if failure:
        raise CheckpointError(failure)
    return Path(found) if found else None


def _next_step(folder: Path, world: World) -> int:
    newest = -1
    if world.rank == 0:
        with contextlib.suppress(OSError):
            newest = max(folders.checkpoints(folder), default=-1)
    return int(world.gather_json(newest)[0]) + 1


def _world(model: nn.Module) -> World:
    return model._engine.holders if isinstance(model, DataParallel) else join()


def whole_state(model: DataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Tensors by name, as a checkpoint has them, and the optimizer's plain values; every worker calls this."""
    state = TrainingState(model, optimizer, model.world)
    mine = list(state.pieces())
    places = model.world.gather_json([[piece.name, piece.shape, piece.begin] for piece in mine])
    everything = model.world.gather_tensors([piece.flat for piece in mine])
    tensors: dict[str, Tensor] = {}
    for of_worker, datas in zip(places, everything, strict=True):
        for (name, shape, begin), data in zip(of_worker, datas, strict=True):
            if name not in tensors:
                tensors[name] = torch.zeros(shape, dtype=data.dtype)
            tensors[name].view(-1)[begin : begin + data.numel()] = data.view(-1)
    return {"tensors": tensors, "optimizer": state.optimizer_values()}


def restore_state(model: DataParallel, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Set model and optimizer to what `whole_state` gave, on however many workers; every worker calls this."""
    held: Any = _InMemory(state["tensors"])
    stored = state["optimizer"]
    TrainingState(model, optimizer, model.world).check(held, stored["scalars"], stored["groups"])
    restore_from(held, model, optimizer, stored)


def restore_from(
    checkpoint: Any, model: DataParallel, optimizer: torch.optim.Optimizer, plain: Mapping[str, Any]
) -> None:
    """Set model and optimizer to what `checkpoint`, and the optimizer's `plain` values, are known to fit with."""
    state = TrainingState(model, optimizer, model.world)
    model._engine.before_load()
    state.restore(checkpoint, plain["scalars"], plain["groups"])
    model._engine.after_load()


@dataclass(frozen=True, slots=True)
class _InMemory:
    """What `TrainingState` reads of a checkpoint."""

    whole: Mapping[str, Tensor]
    world_size: int = 0
    """Of the workers that it is from: it does not say."""

    @property
    def path(self) -> str:
        return "the state"

    @property
    def tensors(self) -> dict[str, TensorEntry]:
        return {name: TensorEntry(tuple(value.shape), value.dtype) for name, value in self.whole.items()}

    def read(self, name: str, begin: int, end: int) -> Tensor:
        return self.whole[name].reshape(-1)[begin:end].clone()

    def read_whole(self, name: str) -> Tensor:
        return self.whole[name].clone()
