"""`shm`, a torch.distributed backend for CPU workers of one host.

`register` makes the name known; then `dist.init_process_group("shm")`, `"cpu:shm,cuda:nccl"` and
`dist.new_group(backend="shm")` give a `ShmGroup`. A tensor of `allocate` is reduced where it lies. Any other is
staged through a window of fixed size.
"""

import platform

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.futex import SYSCALL_NUMBERS
from lockstep.comm.registration import register
from lockstep.comm.shm.group import ShmGroup
from lockstep.errors import UsageError

__all__ = ["allocate", "allocate_common", "is_supported", "register", "release"]


def is_supported() -> bool:
    """Whether workers of this host can share memory."""
    return platform.system() == "Linux" and platform.machine() in SYSCALL_NUMBERS


def allocate(group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> Tensor:
    """A zeroed flat tensor in shared memory, which `group` reduces where it lies; every worker of the group calls this.

    The memory is given back when all tensors over it and the group are gone, or after `release`.
    """
    if not isinstance(group, ShmGroup):
        raise UsageError(f"shm.allocate needs a group of backend shm, not {type(group).__name__}.")
    return group.allocate(numel, dtype)


def allocate_common(group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> Tensor:
    """A zeroed flat tensor that exists once: what one worker writes, all see. Every worker of the group calls this.

    Nothing orders those writes: put a barrier between writing and reading.
    """
    if not isinstance(group, ShmGroup):
        raise UsageError(f"shm.allocate_common needs a group of backend shm, not {type(group).__name__}.")
    return group.allocate_common(numel, dtype)


def release(group: dist.ProcessGroup, tensor: Tensor) -> None:
    """Let go of memory from `allocate` before the group ends; it is freed when no tensor over it is left."""
    if isinstance(group, ShmGroup):
        group.release(tensor)
