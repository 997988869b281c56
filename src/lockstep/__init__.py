"""Data-parallel training for PyTorch: exact, fast, unbreakable, plain.

world  = lockstep.join()
model  = lockstep.DataParallel(net.to(world.device))
loader = lockstep.shard(loader)
"""

from lockstep.data.loader import shard
from lockstep.errors import (
    LaunchError,
    LockstepError,
    ModelMismatch,
    StepVoid,
    UsageError,
    WorkerFailed,
    WorkerLost,
)
from lockstep.replica.backward import backward
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.data_parallel import DataParallel
from lockstep.start.function import launch
from lockstep.train.learning_rate import scale_lr
from lockstep.world import World, join

__version__ = "0.1.0"

__all__ = [
    "DataParallel",
    "LaunchError",
    "LockstepError",
    "ModelMismatch",
    "StepVoid",
    "SyncBatchNorm",
    "UsageError",
    "WorkerFailed",
    "WorkerLost",
    "World",
    "backward",
    "join",
    "launch",
    "scale_lr",
    "shard",
]
