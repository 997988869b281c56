"""`lockstep.save` and `lockstep.load`: a training run, to go on with on any number of workers."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from lockstep.errors import CheckpointError
from lockstep.keep import shelf
from lockstep.keep.checkpoint import open_checkpoint
from lockstep.keep.host_memory import HostMemory
from lockstep.keep.save import Saving, write, write_async
from lockstep.keep.state import State
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
    """What `load` found besides what it has restored."""

    step: int
    """The step after which it was saved."""
    extra: Any
    """What was given to `save` as `extra`."""
    path: Path
    """The checkpoint that was used."""


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
    extra: anything that JSON can hold (a scheduler's `state_dict()`, say), the same on all workers.
    keep_last: how many checkpoints to keep.
    wait: False copies what this worker owns, returns a handle at once, and writes while training goes on; its
        `wait()` raises what went wrong. `memory`, kept from one save to the next, spares allocating the copy.

    A crash at any moment leaves the checkpoint before whole. If writing fails, on whichever worker, every worker
    raises CheckpointError, nothing is left behind, and training can go on.
    """
    world = _world(model)
    if step is None:
        step = _next_step(Path(path), world)
    state = State(model, optimizer, world.rank, world.size)
    scalars: dict[str, Any] = {}
    for each in world.gather(state.scalars()):
        scalars |= each
    tree = {
        "optimizer": {"groups": state.hyper(), "scalars": scalars},
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
        has_lost=world.peers.has_lost,
    )


def load(
    path: str | PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loader: Resumable | None = None,
    fall_back: bool = False,
    check: Callable[[object, Any], None] | None = None,
) -> Resumed:
    """Set model, optimizer and loader to what the newest checkpoint in `path` has; every worker calls this.

    The number of workers and `zero` may differ from those it was saved with. `path` may also be one checkpoint of a
    folder. A damaged one raises CheckpointError naming the file; with `fall_back` the one before it is used. `check` is
    called with the checkpoint's path and its `extra` before anything is changed, and may raise.
    """
    world = _world(model)
    checkpoint = open_checkpoint(_chosen(path, world, fall_back))
    with checkpoint:
        tree = checkpoint.tree
        stored = tree.get("optimizer") if isinstance(tree, dict) else None
        if not isinstance(stored, dict):
            raise CheckpointError(f"{checkpoint.path} was not written by lockstep.save. Read it with lockstep.keep.")
        if check is not None:
            check(checkpoint.path, tree["extra"])
        if isinstance(model, DataParallel):
            model.before_load()
        State(model, optimizer, world.rank, world.size).restore(checkpoint, stored["scalars"], stored["groups"])
        if isinstance(model, DataParallel):
            model.after_load()
        if loader is not None and tree["loader"] is not None:
            loader.load_state_dict(tree["loader"])
        return Resumed(checkpoint.step, tree["extra"], checkpoint.path)


def _chosen(path: str | PathLike[str], world: World, fall_back: bool) -> Path:
    """The checkpoint that all workers use: worker 0 chooses."""
    found: str | CheckpointError = ""
    if world.rank == 0:
        try:
            with open_checkpoint(path, fall_back=fall_back) as checkpoint:
                found = str(checkpoint.path)
        except CheckpointError as error:
            found = error
    found = world.broadcast(found)
    if isinstance(found, CheckpointError):
        raise found
    return Path(found)


def _next_step(folder: Path, world: World) -> int:
    newest = -1
    if world.rank == 0:
        with contextlib.suppress(OSError):
            newest = max((one.step for one in shelf.standing(folder)), default=-1)
    return int(world.broadcast(newest)) + 1


def _world(model: nn.Module) -> World:
    return model.world if isinstance(model, DataParallel) else join()
