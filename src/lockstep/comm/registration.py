"""Makes the backend `shm` known to torch.distributed, whichever of torch and lockstep is imported first.

`import lockstep` must be enough for `dist.init_process_group("shm")`, and must not import torch by itself: `lockstep
run` would wait seconds for it before it starts a worker. So, where torch is not there yet, the import system is asked
to say when it has come.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NAME = "shm"


def register() -> None:
    """Make `shm` known to torch.distributed; calling it again does nothing."""
    import torch.distributed as dist

    if dist.is_available() and NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def register_when_torch_is_there() -> None:
    """Register now if torch has been imported, else as soon as it is."""
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "distributed"):
        register()
    else:
        sys.meta_path.insert(0, _Watch())


def _create(options: Any, _: object) -> Any:
    """What torch calls to make a group."""
    import torch.distributed as dist

    from lockstep.comm.shm.group import ShmGroup

    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group) or list(range(size))
    deadline = timeout if timeout is not None else dist.distributed_c10d.default_pg_timeout
    generation = options.store.add(f"joins/{rank}", 1)  # A store that outlives a group must not show the old one.
    return ShmGroup(dist.PrefixStore(f"shm/{generation}", options.store), rank, size, ranks, deadline)


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
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads torch, then registers the backend."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """As the loader does, and then the registration."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        register()
