"""Data-parallel training for PyTorch: exact, fast, unbreakable, plain.

    world  = lockstep.join()
    model  = lockstep.DataParallel(net.to(world.device))
    loader = lockstep.shard(loader)

Names are loaded when first used, so that `lockstep run` need not wait for torch before it starts its workers.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from lockstep import environment, events
from lockstep.comm.shm import register_when_torch_is_there

if TYPE_CHECKING:
    from lockstep import wire as wire
    from lockstep.data.loader import shard
    from lockstep.errors import (
        CheckpointError,
        LaunchError,
        LockstepError,
        ModelMismatch,
        ReplicaDiffers,
        StepVoid,
        UsageError,
        WorkerFailed,
        WorkerLost,
    )
    from lockstep.keep.save_load import load, save
    from lockstep.plan.outcome import plan as plan
    from lockstep.replica.batch_norm import SyncBatchNorm
    from lockstep.replica.data_parallel import DataParallel
    from lockstep.replica.grad_weight import backward
    from lockstep.replica.precision import Precision
    from lockstep.start.elastic import Elastic
    from lockstep.start.function import launch
    from lockstep.train.asynchronous import Async
    from lockstep.train.learning_rate import scale_lr
    from lockstep.train.local import DiLoCo, LocalSGD
    from lockstep.train.trainer import Trainer
    from lockstep.watching.watcher import watch
    from lockstep.world import World, join

__version__ = "0.1.0"

__all__ = [
    "Async",
    "CheckpointError",
    "DataParallel",
    "DiLoCo",
    "Elastic",
    "LaunchError",
    "LocalSGD",
    "LockstepError",
    "ModelMismatch",
    "Precision",
    "ReplicaDiffers",
    "StepVoid",
    "SyncBatchNorm",
    "Trainer",
    "UsageError",
    "WorkerFailed",
    "WorkerLost",
    "World",
    "backward",
    "join",
    "launch",
    "load",
    "plan",
    "save",
    "scale_lr",
    "shard",
    "watch",
]

_ROOMS = {"plan", "wire"}
"""Parts of the package with names of their own, as `lockstep.wire.Int8`; `lockstep.plan` can be called, too."""

_HOMES = {
    "Async": "train.asynchronous",
    "DataParallel": "replica.data_parallel",
    "DiLoCo": "train.local",
    "Elastic": "start.elastic",
    "LocalSGD": "train.local",
    "Precision": "replica.precision",
    "SyncBatchNorm": "replica.batch_norm",
    "Trainer": "train.trainer",
    "World": "world",
    "backward": "replica.grad_weight",
    "join": "world",
    "launch": "start.function",
    "load": "keep.save_load",
    "save": "keep.save_load",
    "scale_lr": "train.learning_rate",
    "shard": "data.loader",
    "watch": "watching.watcher",
}


def _watch_where_asked(world: Any) -> None:
    """Watch every model of a world that is joined where the environment asks for it: `lockstep run --watch=FOLDER`."""
    folder = environment.watched_in(os.environ)
    if folder is not None:
        from lockstep.watching.watcher import watch_wrapped

        watch_wrapped(world, folder)


register_when_torch_is_there()
events.ON_JOIN.append(_watch_where_asked)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"lockstep.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    home = importlib.import_module(f"lockstep.{_HOMES.get(name, 'errors')}")
    value = globals()[name] = getattr(home, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
