"""`shm`, a torch.distributed backend for CPU workers of one host.

`register` makes the name known; then `dist.init_process_group("shm")`, `"cpu:shm,cuda:nccl"` and
`dist.new_group(backend="shm")` give a `ShmGroup`. A tensor of `allocate` is reduced where it lies. Any other is
staged through a window of fixed size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm.group import NAME, ShmGroup
from lockstep.errors import UsageError


def register() -> None:
    """Make `shm` known to torch.distributed; calling it again does nothing."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def allocate(group: dist.ProcessGroup, numel: int, dtype: torch.dtype) -> Tensor:
    """A zeroed flat tensor in shared memory, which `group` reduces where it lies; every worker of the group calls this.

    The memory is given back when the group and all tensors over it are gone.
    """
    if not isinstance(group, ShmGroup):
        raise UsageError(f"shm.allocate needs a group of backend shm, not {type(group).__name__}.")
    return group.allocate(numel, dtype)


def _create(options: Any, _: object) -> "ShmGroup":
    """What torch calls to make a group."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group) or list(range(size))
    deadline = timeout if timeout is not None else dist.distributed_c10d.default_pg_timeout
    generation = options.store.add(f"joins/{rank}", 1)  # A store that outlives a group must not show the old one.
    return ShmGroup(dist.PrefixStore(f"shm/{generation}", options.store), rank, size, ranks, deadline)
