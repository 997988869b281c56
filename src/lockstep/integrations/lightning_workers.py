"""The workers of a Lightning run on Lockstep: who starts them, where they meet, what they share out and add up.

All that does not differ between Trainer's strategy and Fabric's. What Lightning's own DDPStrategy does as well, to
which a wrapped model is a DistributedDataParallel, is not here at all.
"""

import contextlib
import importlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lockstep
from lockstep import environment
from lockstep.data.loader import is_split_by_node
from lockstep.errors import UsageError
from lockstep.integrations.evaluation import for_evaluation
from lockstep.replica.data_parallel import DataParallel
from lockstep.world import World, current


def _packages() -> tuple[str, str]:
    """The packages of Trainer and of Fabric: `lightning`, or the older pair where only that is in use."""
    is_old = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    if is_old or importlib.util.find_spec("lightning") is None:
        return "pytorch_lightning", "lightning_fabric"
    return "lightning.pytorch", "lightning.fabric"


TRAINER, FABRIC = _packages()
_environments: Any = importlib.import_module(f"{FABRIC}.plugins.environments")

LIGHTNINGS = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "start_method")
"""Of a strategy's options, those that Lightning's own DDPStrategy takes, in both packages."""


class LockstepEnvironment(_environments.LightningEnvironment):  # type: ignore[misc]
    """The place of a worker that Lockstep, torchrun, Slurm or Open MPI started, as Lightning asks for it."""

    creates_processes_externally = True

    def __init__(self, launch: environment.Launch) -> None:
        super().__init__()
        self.launch = launch
        self.local_size = launch.local_size or launch.size

    def world_size(self) -> int:
        """How many workers there are."""
        return self.launch.size

    def global_rank(self) -> int:
        """This worker's number."""
        return self.launch.rank

    def local_rank(self) -> int:
        """This worker's number on its host."""
        local = self.launch.local_rank
        return self.launch.rank % self.local_size if local is None else local

    def node_rank(self) -> int:
        """This host's number."""
        return self.launch.rank // self.local_size

    def teardown(self) -> None:
        """Nothing: the variables are the launcher's."""


def _launch() -> environment.Launch | None:
    """How this process was started as a worker; None where it is for Lightning to start workers, or where it has."""
    world = current()
    if world is not None and world.size > 1:
        return environment.Launch("joined", world.rank, world.size, world.local_rank, world.local_size)
    if "NODE_RANK" in os.environ and "RANK" not in os.environ:  # A process that Lightning's own launcher started.
        return None
    launch = environment.read(os.environ)
    return launch if launch.launcher != "alone" else None


@contextlib.contextmanager
def _variables(said: Mapping[str, str]) -> Iterator[None]:
    """A block in which these environment variables are set."""
    before = {name: os.environ[name] for name in said if name in os.environ}
    os.environ.update(said)
    try:
        yield
    finally:
        for name in said:
            del os.environ[name]
        os.environ.update(before)


class Workers:
    """What both strategies share; both are made from a DDPStrategy, for its launching and its place in Lightning."""

    cluster_environment: Any
    root_device: torch.device
    num_nodes: int
    parallel_devices: Any
    _launcher: Any
    world: World
    _takes: tuple[str, ...]
    """The names of the options that Lightning's DDPStrategy takes; all others are DataParallel's."""

    def __init__(
        self,
        *,
        zero: int = 0,
        seed: int | None = None,
        backend: str | None = None,
        timeout: timedelta | float | None = None,
        **options: Any,
    ) -> None:
        self._zero = zero
        self._joining: dict[str, Any] = {"seed": seed, "backend": backend, "timeout": timeout}
        launch = _launch() if options.get("cluster_environment") is None else None
        if launch is not None:
            options["cluster_environment"] = LockstepEnvironment(launch)
        super().__init__(**{name: options.pop(name) for name in self._takes if name in options})
        self._wrapping = options

    # Starting and meeting

    def _configure_launcher(self) -> None:
        place = self.cluster_environment
        if isinstance(place, LockstepEnvironment):  # There are as many as were started, whatever `devices` says.
            first, numbers = self.parallel_devices[0], range(place.local_size)
            self.parallel_devices = [first if first.type == "cpu" else torch.device(first.type, n) for n in numbers]
            self.num_nodes = place.launch.size // place.local_size
        elif not place.creates_processes_externally and self.num_nodes == 1:
            os.environ.setdefault(environment.SECRET, secrets.token_hex(16))  # For the workers that are started here.
        super()._configure_launcher()  # type: ignore[misc]

    def _join(self) -> None:
        """Meet the other workers: where Lightning's own environment says, or where the launcher's does."""
        place = self.cluster_environment
        size = place.world_size()
        said = {}
        if not isinstance(place, LockstepEnvironment) and size > 1 and current() is None:
            said = {
                "RANK": str(place.global_rank()),
                "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(place.local_rank()),
                "LOCAL_WORLD_SIZE": str(len(self.parallel_devices)),
                "MASTER_ADDR": place.main_address,
                "MASTER_PORT": str(place.main_port),
            }
        with _variables(said):
            self.world = lockstep.join(device=self.root_device, **self._joining)
        if self._launcher is not None:
            # Lightning looks every 5 s whether a worker it started has died, and then kills all others, this one too,
            # before it can say what the world has found in the meantime: which worker, and what became of it.
            watched, self._launcher.procs = self._launcher.procs, [*self._launcher.procs]
            watched.clear()
        if self.world.size != size:
            raise UsageError(
                f"this process is in a world of {self.world.size} workers, and Lightning was asked for {size}. Call "
                "lockstep.join() nowhere before the Trainer or Fabric starts the workers, or start the script with "
                f"`lockstep run -n {size}`."
            )

    # Model and loaders

    def _wrap(self, module: nn.Module, optimizers: Sequence[Any], *, trains: bool = True) -> DataParallel:
        zero = self._zero if trains else 0
        if zero and len(optimizers) != 1:
            raise UsageError(
                f"zero={zero} splits one optimizer, and there are {len(optimizers)}: make one of them, with groups."
            )
        device_ids = [self.root_device] if self.root_device.type != "cpu" else None
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        return DataParallel(module, device_ids, optimizer=optimizer, zero=zero, **(self._wrapping if trains else {}))

    def _sharded(self, loader: Any, *, evaluates: bool) -> Any:
        """`loader` with global batches, of which this worker gets its part; what is no plain DataLoader as it is."""
        if not isinstance(loader, DataLoader) or isinstance(loader.sampler, DistributedSampler):
            return loader
        if is_split_by_node(loader.dataset):
            return loader
        if evaluates:
            loader = for_evaluation(loader, self.world.size)
        return lockstep.shard(loader, world=self.world, device=False)

    # Numbers

    def _reduce(self, value: Any, group: Any, reduce_op: Any, other: Callable[..., Any], weight: Any = None) -> Any:
        """The sum or mean of `value` over all workers, by the world, which names who is missing; else `other`'s."""
        name = str(reduce_op).rpartition(".")[2].lower()
        if not isinstance(value, Tensor) or group is not None or name not in ("mean", "avg", "sum"):
            return other(value, group, reduce_op)
        if name == "sum":
            return self.world.all_reduce(value)
        if weight is not None:
            return self.world.mean(value, weight=weight)
        return self.world.all_reduce(value if value.is_floating_point() else value.float()) / self.world.size

    def barrier(self, *_args: Any, **_kwargs: Any) -> None:
        """Return when every worker has called this."""
        if hasattr(self, "world"):
            self.world.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Worker `src`'s object, on every worker."""
        if not hasattr(self, "world"):
            return obj
        return self.world.broadcast(obj) if src == 0 else self.world.gather(obj)[src]

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the names known."""
        strategy_registry.register("lockstep", cls, description="Data parallelism by Lockstep", override=True)
        for stage in (1, 2, 3):
            name, words = f"lockstep_zero{stage}", f"Lockstep, zero={stage}"
            strategy_registry.register(name, cls, description=words, override=True, zero=stage)
