"""Lightning and Fabric on Lockstep: `Trainer(strategy="lockstep")`, `Fabric(strategy="lockstep")`.

    import lockstep.integrations.lightning                    # makes the name known
    trainer = Trainer(strategy="lockstep", devices=4)
    trainer = Trainer(strategy=LockstepStrategy(zero=3, wire="auto"), devices=4)
    fabric = Fabric(strategy=LockstepFabricStrategy(zero=1), devices=4)

A loader's `batch_size` is the global batch: loaders are sharded, so nothing is padded, and what uneven parts log with
`sync_dist=True` is averaged by their sizes. `Trainer(use_distributed_sampler=False)`, or a DistributedSampler of one's
own, leaves a loader as it is.

Works with the package `lightning`, and with `pytorch_lightning` where that one was imported first. What does not differ
between Trainer and Fabric is in `_Workers`: who starts the workers, where they meet, how numbers are reduced.
"""

import contextlib
import importlib
import os
import secrets
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

import lockstep
from lockstep import environment
from lockstep.data import tree
from lockstep.data.loader import ShardedLoader
from lockstep.errors import UsageError
from lockstep.integrations.evaluation import for_evaluation
from lockstep.integrations.optimizer_state import Groups, groups_of, restore_optimizer, whole_optimizer_state
from lockstep.replica.data_parallel import DataParallel
from lockstep.watching.watcher import Watcher
from lockstep.world import World, current


def _packages() -> tuple[str, str]:
    """The packages of Trainer and of Fabric: `lightning`, or the older pair where only that is in use."""
    is_old = "pytorch_lightning" in sys.modules and "lightning" not in sys.modules
    if is_old or importlib.util.find_spec("lightning") is None:
        return "pytorch_lightning", "lightning_fabric"
    return "lightning.pytorch", "lightning.fabric"


_TRAINER, _FABRIC = _packages()
_strategies: Any = importlib.import_module(f"{_TRAINER}.strategies")
_fabric: Any = importlib.import_module(f"{_FABRIC}.strategies")
_environments: Any = importlib.import_module(f"{_FABRIC}.plugins.environments")
_rank_zero: Any = importlib.import_module(f"{_FABRIC}.utilities.rank_zero")
_ForwardRedirection: Any = importlib.import_module(f"{_TRAINER}.strategies.strategy")._ForwardRedirection

SHARD_FILE = "lightning.ckpt"
"""What Lightning keeps besides model and optimizer, in the folder of a sharded checkpoint."""


class LockstepEnvironment(_environments.ClusterEnvironment):  # type: ignore[misc]
    """The place of a worker that Lockstep, torchrun, Slurm or Open MPI started, as Lightning asks for it."""

    def __init__(self, launch: environment.Launch) -> None:
        super().__init__()
        self.launch = launch
        self.local_size = launch.local_size or launch.size

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning is to start nothing."""
        return True

    @property
    def main_address(self) -> str:
        """Where the workers meet."""
        return self.launch.address

    @property
    def main_port(self) -> int:
        """Where the workers meet."""
        return self.launch.port

    @staticmethod
    def detect() -> bool:
        """Never by itself: the strategy brings it."""
        return False

    def world_size(self) -> int:
        """How many workers there are."""
        return self.launch.size

    def set_world_size(self, size: int) -> None:
        """The launcher has said."""

    def global_rank(self) -> int:
        """This worker's number."""
        return self.launch.rank

    def set_global_rank(self, rank: int) -> None:
        """The launcher has said."""

    def local_rank(self) -> int:
        """This worker's number on its host."""
        local = self.launch.local_rank
        return self.launch.rank % self.local_size if local is None else local

    def node_rank(self) -> int:
        """This host's number."""
        return self.launch.rank // self.local_size


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
def _set(environ: Any, said: Mapping[str, str]) -> Iterator[None]:
    """A block in which these variables are set."""
    before = {name: environ.get(name) for name in said}
    environ.update(said)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del environ[name]
            else:
                environ[name] = value


class _Workers:
    """What both strategies share; both are made from a DDPStrategy, for its launching and its place in Lightning."""

    cluster_environment: Any
    root_device: torch.device
    world_size: int
    num_processes: int
    world: World

    def _prepare(
        self,
        zero: int,
        seed: int | None,
        backend: str | None,
        timeout: timedelta | float | None,
        wrapping: dict[str, Any],
    ) -> None:
        self._zero = zero
        self._joining: dict[str, Any] = {"seed": seed, "backend": backend, "timeout": timeout}
        self._wrapping = wrapping
        self._groups: Groups = []
        """Which parameters the optimizer had before it was split."""
        self._is_in_step = False
        launch = _launch() if self.cluster_environment is None else None
        if launch is not None:
            self.cluster_environment = LockstepEnvironment(launch)

    # Starting and meeting

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """One for each worker of this host; as many as the launcher started, where that is not Lightning."""
        return self._parallel_devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device] | None) -> None:
        if devices and isinstance(self.cluster_environment, LockstepEnvironment):
            size = self.cluster_environment.local_size
            kind = devices[0].type
            devices = [torch.device(kind, each) if kind != "cpu" else torch.device(kind) for each in range(size)]
        self._parallel_devices = devices

    @property
    def num_nodes(self) -> int:
        """How many hosts."""
        place = self.cluster_environment
        if isinstance(place, LockstepEnvironment):
            return place.launch.size // place.local_size
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    def _configure_launcher(self) -> None:
        place = self.cluster_environment
        if not place.creates_processes_externally and self.num_nodes == 1:
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
                "LOCAL_WORLD_SIZE": str(self.num_processes),
                "MASTER_ADDR": place.main_address,
                "MASTER_PORT": str(place.main_port),
            }
        with _set(os.environ, said):
            self.world = lockstep.join(device=self.root_device, **self._joining)
        if self.world.size != size:
            raise UsageError(
                f"this process is in a world of {self.world.size} workers, and Lightning was asked for {size}. Call "
                "lockstep.join() nowhere before the Trainer or Fabric starts the workers, or start the script with "
                f"`lockstep run -n {size}`."
            )

    # Wrapping

    def _wrap(self, module: nn.Module, optimizers: Sequence[Any], *, trains: bool = True) -> DataParallel:
        zero = self._zero if trains else 0
        if zero and len(optimizers) != 1:
            raise UsageError(
                f"zero={zero} splits one optimizer, and there are {len(optimizers)}: make one of them, with groups."
            )
        if zero:
            self._groups = groups_of(optimizers[0], module)
        device_ids = [self.root_device] if self.root_device.type != "cpu" else None
        optimizer = optimizers[0] if len(optimizers) == 1 else None
        wrapping = self._wrapping if trains else {}
        return DataParallel(module, device_ids, optimizer=optimizer, zero=zero, **wrapping)

    # Loaders

    def _sharded(self, loader: Any, *, evaluates: bool) -> Any:
        """`loader` with global batches, of which this worker gets its part; what is no plain DataLoader as it is."""
        if not isinstance(loader, DataLoader) or isinstance(loader.sampler, DistributedSampler):
            return loader
        if evaluates:
            loader = for_evaluation(loader, self.world.size)
        return lockstep.shard(loader, world=self.world, device=False)

    # Numbers

    @contextlib.contextmanager
    def _step(self, batch: Any, *, sees: bool) -> Iterator[None]:
        """A block that works on one batch; what is averaged in it counts by this worker's part of the batch."""
        if sees:  # No wrapped model will be called with it.
            tensors = [leaf for leaf in tree.leaves(batch) if isinstance(leaf, Tensor)]
            self.world.hand_outs.find(tensors, trains=False)
        self._is_in_step = True
        try:
            yield
        finally:
            self._is_in_step = False

    def _reduce(self, value: Any, group: Any, reduce_op: Any, other: Any) -> Any:
        """`value` over all workers. The mean is weighted in a step, by the parts of the batch, and plain elsewhere."""
        name = str(reduce_op).rpartition(".")[2].lower()
        if not isinstance(value, Tensor) or group is not None or name not in ("mean", "avg", "sum"):
            return other(value, group, reduce_op)
        if name == "sum":
            return self.world.all_reduce(value)
        weight = self.world.hand_outs.in_use if self._is_in_step else None
        if weight is not None and not weight.is_explicit:
            return self.world.mean(value, weight=weight.value)
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


class _Epochs:
    """A sharded loader that begins an epoch with its first batch: Lightning makes iterators that it never reads.

    It remembers where it was left, also when Lightning has dropped its iterator. It has no `batch_sampler`, since the
    indices that one sees are those of global batches.
    """

    def __init__(self, sharded: ShardedLoader, num_batches: Callable[[], float]) -> None:
        """num_batches: after how many Lightning ends an epoch."""
        self._sharded = sharded
        self._num_batches = num_batches
        self._state = sharded.state_dict()
        self.dataset = sharded.dataset

    def __len__(self) -> int:
        return len(self._sharded)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._sharded:
            self._state = self._sharded.state_dict()
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where it is; after the last batch of an epoch, at the beginning of the next one."""
        if self._state["batches"] >= self._num_batches():
            return {"epoch": self._state["epoch"] + 1, "batches": 0}
        return self._state

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self._state = dict(state)
        self._sharded.load_state_dict(state)


class LockstepStrategy(_Workers, _strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's Trainer on Lockstep.

    zero, wire and what else DataParallel takes: as there; zero=1 to 3 needs `configure_optimizers` to give one
        optimizer. seed, backend, timeout: as of `lockstep.join`.
    sharded_checkpoints: True makes a checkpoint a folder into which each worker writes what it owns (see
        docs/checkpoints.md); else it is one file as Lightning's own, with any `zero`. Both can be gone on with on
        another number of workers.

    What else DDPStrategy takes (accelerator, cluster_environment, precision_plugin, ...) is taken here.
    """

    strategy_name = "lockstep"
    model: Any
    _layer_sync: Any

    def __init__(
        self,
        *,
        zero: int = 0,
        seed: int | None = None,
        backend: str | None = None,
        timeout: timedelta | float | None = None,
        sharded_checkpoints: bool = False,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        start_method: Any = "popen",
        **wrapping: Any,
    ) -> None:
        self.cluster_environment = cluster_environment
        self._prepare(zero, seed, backend, timeout, wrapping)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=self.cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            start_method=start_method,
        )
        self._forward_redirection = _ForwardRedirection()
        self._saves_shards = sharded_checkpoints
        self._shards: bool | None = None
        """Whether loaders are sharded; None until the trainer has said."""
        self._shards_to_load: Path | None = None
        self._replica: DataParallel | None = None
        """The wrapped model, also after a fit: its trainer may be asked for a checkpoint then."""

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: what is split has to be split before it is loaded."""
        return True

    def setup_distributed(self) -> None:
        """Join the world."""
        self.set_world_ranks()
        self._join()

    def setup(self, trainer: Any) -> None:
        """Wrap the model, with its optimizers where it is to be trained."""
        connector = trainer._accelerator_connector
        if self._shards is None:
            # Lightning would put a DistributedSampler into every loader before this strategy sees it.
            self._shards, connector.use_distributed_sampler = connector.use_distributed_sampler, False
        trains = trainer.state.fn == "fit"
        self.accelerator.setup(trainer)
        if trains and self._layer_sync is not None:  # Torch's own needs GPUs.
            self.model, self._layer_sync = lockstep.SyncBatchNorm.convert(self.model), None
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trains:
            self.setup_optimizers(trainer)
        self.model = self._replica = self._wrap(self.model, self.optimizers if trains else [], trains=trains)
        if trains and self._zero:
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm
        self.setup_precision_plugin()

    def _clip_by_norm(self, _optimizer: Any, clip_val: float) -> None:
        """In place of the precision plugin's, which would see this worker's part alone."""
        self.model.clip_grad_norm_(clip_val)

    def process_dataloader(self, dataloader: Any) -> Any:
        """Share its batches out."""
        if not self._shards:
            return dataloader
        trainer = self.lightning_module.trainer
        sharded = self._sharded(dataloader, evaluates=not trainer.training)
        return _Epochs(sharded, lambda: trainer.num_training_batches) if isinstance(sharded, ShardedLoader) else sharded

    # The loop

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of this worker. With manual optimization, gradients are sent when an optimizer steps."""
        is_manual = not self.lightning_module.automatic_optimization
        with self._step(args, sees=False), self.model.no_sync() if is_manual else contextlib.nullcontext():
            output = super().training_step(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(self.world.watcher, Watcher) and isinstance(loss, Tensor):
            self.world.watcher.log(loss=loss)
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of this worker."""
        with self._step(args, sees=False):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """One batch of this worker."""
        with self._step(args, sees=False):
            return super().test_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """The precision plugin's."""
        if not self.lightning_module.automatic_optimization:
            self.model.sync_gradients()
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing: hooks are on the output already."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing."""

    @contextlib.contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Accumulate, and send nothing."""
        with self.model.no_sync():
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean over all workers: weighted by the parts of the batch, where it is of a step; or the sum."""
        return self._reduce(tensor, group, reduce_op, super().reduce)

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model; every worker calls this."""
        if self._saves_shards:
            return {}
        if self._replica is None or not self._zero:
            return super().lightning_module_state_dict()  # type: ignore[no-any-return]
        return {name.removeprefix("module."): value for name, value in self._replica.state_dict().items()}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As torch's own `state_dict`, whatever is split; every worker calls this."""
        if self._saves_shards:
            return {}
        if not self._zero or self._replica is None:
            return super().optimizer_state(optimizer)  # type: ignore[no-any-return]
        return whole_optimizer_state(self._replica, self.optimizers[0], self._groups)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """One file, by worker 0; or a folder, by all."""
        if not self._saves_shards:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        optimizer = self.optimizers[0] if len(self.optimizers) == 1 else None
        if optimizer is None and self.optimizers:
            raise UsageError("sharded checkpoints hold one optimizer: leave out sharded_checkpoints=True.")
        assert self._replica is not None
        lockstep.save(filepath, self._replica, optimizer, step=checkpoint["global_step"], keep_last=1)
        super().save_checkpoint(checkpoint, Path(filepath) / SHARD_FILE, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What Lightning keeps; of a sharded checkpoint, model and optimizer follow."""
        path = Path(str(checkpoint_path))
        self._shards_to_load = path if path.is_dir() else None
        file = path / SHARD_FILE if path.is_dir() else checkpoint_path
        return super().load_checkpoint(file, weights_only)  # type: ignore[no-any-return]

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Set the model; every worker calls this."""
        if self._shards_to_load is not None:
            lockstep.load(self._shards_to_load, self.model, self.optimizers[0] if self.optimizers else None)
        elif not self._zero or not self.optimizers:
            super().load_model_state_dict(checkpoint, strict=strict)
        else:
            state = {f"module.{name}": value for name, value in checkpoint["state_dict"].items()}
            self.model.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Set the optimizers; every worker calls this."""
        if self._shards_to_load is not None:
            return
        if not self._zero:
            super().load_optimizer_state_dict(checkpoint)
            return
        weights, state = checkpoint["state_dict"], checkpoint["optimizer_states"][0]
        restore_optimizer(self.model, self.optimizers[0], self._groups, weights, state)

    # The end

    def teardown(self) -> None:
        """Unwrap the model. The world stays: the script may train on."""
        if self._zero and isinstance(self.model, DataParallel):
            self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        self.model = self.lightning_module
        super(_strategies.DDPStrategy, self).teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Errors say by themselves what to do."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the names known."""
        strategy_registry.register("lockstep", cls, description="Data parallelism by Lockstep", override=True)
        for stage in (1, 2, 3):
            strategy_registry.register(
                f"lockstep_zero{stage}", cls, description=f"Lockstep, zero={stage}", override=True, zero=stage
            )


class _SyncControl(_fabric.strategy._BackwardSyncControl):  # type: ignore[misc]
    """How Fabric accumulates."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        """A block that sends nothing."""
        assert isinstance(module, DataParallel)
        return module.no_sync() if enabled else contextlib.nullcontext()


class LockstepFabricStrategy(_Workers, _fabric.DDPStrategy):  # type: ignore[misc]
    """Fabric on Lockstep; takes what LockstepStrategy takes, but sharded checkpoints: use `lockstep.save` for those."""

    def __init__(
        self,
        *,
        zero: int = 0,
        seed: int | None = None,
        backend: str | None = None,
        timeout: timedelta | float | None = None,
        accelerator: Any = None,
        parallel_devices: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        start_method: Any = "popen",
        **wrapping: Any,
    ) -> None:
        self.cluster_environment = cluster_environment
        self._prepare(zero, seed, backend, timeout, wrapping)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=self.cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            start_method=start_method,
        )
        self._backward_sync_control = _SyncControl()
        self._replica: DataParallel | None = None
        """The model that was wrapped together with its optimizer."""

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """None: loaders are sharded, and need no sampler."""
        return None

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        self._join()

    def setup_module(self, module: nn.Module) -> DataParallel:
        """Wrap a model that has no optimizer with it."""
        return self._wrap(module, [], trains=not self._zero)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> Any:
        """Wrap a model with its optimizers."""
        self._replica = self._wrap(module, optimizers)
        return self._replica, optimizers, scheduler

    def process_dataloader(self, dataloader: Any) -> Any:
        """Share its batches out."""
        return self._sharded(dataloader, evaluates=False)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean or the sum over all workers."""
        return self._reduce(tensor, group, reduce_op, super().all_reduce)

    def clip_gradients_norm(
        self, module: Any, optimizer: Any, max_norm: Any, norm_type: Any = 2.0, error_if_nonfinite: bool = True
    ) -> Tensor:
        """By the norm of the whole model."""
        self.precision.unscale_gradients(optimizer)
        assert isinstance(module, DataParallel)
        return module.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """The whole model; every worker calls this."""
        if not isinstance(module, DataParallel):
            return module.state_dict()
        return {name.removeprefix("module."): value for name, value in module.state_dict().items()}

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Set the model; every worker calls this."""
        if isinstance(module, DataParallel):
            state_dict = {f"module.{name}": value for name, value in state_dict.items()}
        module.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As torch's own `state_dict`, whatever is split; every worker calls this."""
        model = self._split_model(optimizer)
        if model is None:
            return optimizer.state_dict()  # type: ignore[no-any-return]
        return whole_optimizer_state(model, optimizer, self._groups)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None) -> Any:
        """Set what `state` names; of what is split, model and optimizer together."""
        split = {}
        if isinstance(state, dict):
            split = {name: each for name, each in state.items() if self._split_model(each) is not None}
        rest = {name: each for name, each in state.items() if name not in split} if split else state
        left = super().load_checkpoint(path, rest, strict and not split, weights_only)
        for name, optimizer in split.items():
            model = self._split_model(optimizer)
            assert model is not None
            with model.whole_params():
                weights = {key: value.clone() for key, value in model.module.state_dict().items()}
            restore_optimizer(model, optimizer, self._groups, weights, left.pop(name))
        if split:
            state.update(rest)
        return left

    def _split_model(self, optimizer: Any) -> DataParallel | None:
        """The model that was split with this optimizer; None where it was not."""
        if self._replica is None or not self._zero or not isinstance(optimizer, torch.optim.Optimizer):
            return None
        return self._replica

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make the names known."""
        strategy_registry.register("lockstep", cls, description="Data parallelism by Lockstep", override=True)
        for stage in (1, 2, 3):
            strategy_registry.register(
                f"lockstep_zero{stage}", cls, description=f"Lockstep, zero={stage}", override=True, zero=stage
            )


LockstepStrategy.register_strategies(_strategies.StrategyRegistry)
LockstepFabricStrategy.register_strategies(_fabric.STRATEGY_REGISTRY)
