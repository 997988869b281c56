"""`shm`, a torch.distributed backend for CPU workers of one host; and how it and `hosts` are made known to torch.

`import lockstep` makes the name known; then `dist.init_process_group("shm")`, `"cpu:shm,cuda:nccl"` and
`dist.new_group(backend="shm")` give a `ShmGroup`. A tensor of `allocate` is reduced where it lies. Any other is
staged through a window of fixed size.

To be known it must be registered, whichever of torch and lockstep is imported first, and `import lockstep` must not
import torch by itself: `lockstep run` would wait seconds for it before it starts a worker. So, where torch is not there
yet, the import system is asked to say when it has come; and this module imports torch only inside its functions.
"""

import functools
import importlib.abc
import importlib.machinery
import platform
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from lockstep.comm.flat_group import FlatGroup

__all__ = ["allocate", "allocate_common", "is_supported", "register", "release"]

NAME = "shm"
HOSTS = "hosts"


def is_supported() -> bool:
    """Whether workers of this host can share memory."""
    from lockstep.comm.shm.futex import SYSCALL_NUMBERS

    return platform.system() == "Linux" and platform.machine() in SYSCALL_NUMBERS


def allocate(group: "dist.ProcessGroup", numel: int, dtype: "torch.dtype") -> "torch.Tensor":
    """A zeroed flat tensor in shared memory, which `group` reduces where it lies; every worker of the group calls this.

    The memory is given back when all tensors over it and the group are gone, or after `release`.
    """
    return _checked(group, "allocate").allocate(numel, dtype)


def allocate_common(group: "dist.ProcessGroup", numel: int, dtype: "torch.dtype") -> "torch.Tensor":
    """A zeroed flat tensor that exists once: what one worker writes, all see. Every worker of the group calls this.

    Nothing orders those writes: put a barrier between writing and reading.
    """
    return _checked(group, "allocate_common").allocate_common(numel, dtype)


def release(group: "dist.ProcessGroup", tensor: "torch.Tensor") -> None:
    """Let go of memory from `allocate` before the group ends; it is freed when no tensor over it is left."""
    from lockstep.comm.flat_group import FlatGroup

    if isinstance(group, FlatGroup):
        group.release(tensor)


def _checked(group: "dist.ProcessGroup", name: str) -> "FlatGroup":
    from lockstep.comm.flat_group import FlatGroup
    from lockstep.errors import UsageError

    if not isinstance(group, FlatGroup):
        raise UsageError(f"shm.{name} needs a group of backend shm or hosts, not {type(group).__name__}.")
    return group


# --- Registration ---


def register() -> None:
    """Make `shm` and `hosts` known to torch.distributed; calling it again does nothing."""
    import torch.distributed as dist

    for name in (NAME, HOSTS) if dist.is_available() else ():
        if name not in dist.Backend.backend_list:
            create = functools.partial(_create, name)
            dist.Backend.register_backend(name, create, extended_api=True, devices=["cpu"])


def register_when_torch_is_there() -> None:
    """Register now if torch has been imported, else as soon as it is."""
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "distributed"):
        register()
    else:
        sys.meta_path.insert(0, _Watch())


def _create(name: str, options: Any, _: object) -> "FlatGroup":
    """What torch calls to make a group; of one host, `hosts` is `shm`."""
    import torch.distributed as dist

    from lockstep.errors import LaunchError

    if not is_supported():
        raise LaunchError(
            f"backend {name} needs Linux (memfd and futex) on a machine whose system calls it knows, and this is "
            f"{platform.system()} on {platform.machine()}. Use gloo: join(backend='gloo') or "
            "init_process_group('gloo')."
        )
    from lockstep.comm.hosts.group import HostsGroup
    from lockstep.comm.shm.group import ShmGroup
    from lockstep.comm.shm.segment import roll_call

    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group) or list(range(size))
    deadline = timeout if timeout is not None else dist.distributed_c10d.default_pg_timeout
    generation = options.store.add(f"joins/{rank}", 1)  # A store that outlives a group must not show the old one.
    store = dist.PrefixStore(f"{name}/{generation}", options.store)
    if name == HOSTS:
        peers = roll_call(store, rank, size, ranks, deadline)
        if len({peer.host for peer in peers}) > 1:
            return HostsGroup(store, rank, peers, deadline)
    return ShmGroup(store, rank, size, ranks, deadline)


class _Watch(importlib.abc.MetaPathFinder):
    """Waits for the import of torch, and steps aside."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find torch as if this were not here, but have its loader call `register` at the end."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
