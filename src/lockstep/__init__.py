"""Data-parallel training for PyTorch: exact, fast, unbreakable, plain.

    world  = lockstep.join()
    model  = lockstep.DataParallel(net.to(world.device))
    loader = lockstep.shard(loader)
"""

from lockstep.errors import (
    LaunchError,
    LockstepError,
    ModelMismatch,
    StepVoid,
    UsageError,
    WorkerFailed,
    WorkerLost,
)
from lockstep.world import World, join

__version__ = "0.1.0"

__all__ = [
    "LaunchError",
    "LockstepError",
    "ModelMismatch",
    "StepVoid",
    "UsageError",
    "WorkerFailed",
    "WorkerLost",
    "World",
    "join",
]
