"""Lightning and Fabric on Lockstep: `Trainer(strategy="lockstep")`, `Fabric(strategy="lockstep")`.

    import lockstep.integrations.lightning                    # makes the name known
    trainer = Trainer(strategy="lockstep", devices=4)
    trainer = Trainer(strategy=LockstepStrategy(zero=3, wire="auto"), devices=4)
    fabric = Fabric(strategy=LockstepFabricStrategy(zero=1), devices=4)

A loader's `batch_size` is the global batch: loaders are sharded, so nothing is padded, and what uneven parts log with
`sync_dist=True` is averaged by their sizes. `Trainer(use_distributed_sampler=False)`, or a DistributedSampler of one's
own, leaves a loader as it is. With `pytorch_lightning` it works where that is imported first.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lockstep
from lockstep.data.loader import ShardedLoader
from lockstep.errors import UsageError
from lockstep.integrations.lightning_workers import FABRIC, LIGHTNINGS, TRAINER, Workers
from lockstep.integrations.optimizer_state import whole_state_of
from lockstep.replica.data_parallel import DataParallel
from lockstep.watching.watcher import Watcher

_strategies: Any = importlib.import_module(f"{TRAINER}.strategies")
_fabric: Any = importlib.import_module(f"{FABRIC}.strategies")
_callbacks: Any = importlib.import_module(f"{TRAINER}.callbacks")
_ForwardRedirection: Any = importlib.import_module(f"{TRAINER}.strategies.strategy")._ForwardRedirection

SHARD_FILE = "lightning.ckpt"
"""What Lightning keeps besides model and optimizer, in the folder of a sharded checkpoint."""


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
        self._is_new = True
        self.dataset = sharded.dataset

    def __len__(self) -> int:
        return len(self._sharded)

    def __iter__(self) -> Iterator[Any]:
        self._is_new = False
        for batch in self._sharded:
            self._state = self._sharded.state_dict()
            yield batch

    @property
    def sampler(self) -> "_Epochs":
        """What Lightning calls `set_epoch` of, before each epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Begin with this epoch; a loader that was read or has a state counts by itself."""
        if self._is_new:
            self._sharded.set_epoch(epoch)
            self._state = self._sharded.state_dict()

    def state_dict(self) -> dict[str, int]:
        """Where it is; after the last batch of an epoch, at the beginning of the next one."""
        if self._state["batches"] >= self._num_batches():
            return {"epoch": self._state["epoch"] + 1, "batches": 0}
        return self._state

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from there."""
        self._is_new, self._state = False, dict(state)
        self._sharded.load_state_dict(state)


class _Step(_ForwardRedirection):  # type: ignore[misc]
    """How Lightning calls `training_step` and the like: by way of the wrapped model."""

    is_under_way = False
    """Whether one batch is being worked on: what is averaged then counts by this worker's part of it."""

    def __call__(self, model: DataParallel, module: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        """With manual optimization, gradients are sent when an optimizer steps."""
        self.is_under_way = True
        try:
            with contextlib.nullcontext() if module.automatic_optimization else model.no_sync():
                output = super().__call__(model, module, method, *args, **kwargs)
        finally:
            self.is_under_way = False
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if method == "training_step" and isinstance(model.world.watcher, Watcher) and isinstance(loss, Tensor):
            model.world.watcher.log(loss=loss)
        return output


class LockstepStrategy(Workers, _strategies.DDPStrategy):  # type: ignore[misc]
    """Lightning's Trainer on Lockstep.

    zero, wire and what else DataParallel takes: as there; zero=1 to 3 needs `configure_optimizers` to give one
        optimizer. seed, backend, timeout: as of `lockstep.join`.
    sharded_checkpoints: True makes a checkpoint a folder into which each worker writes what it owns (see
        docs/checkpoints.md); else it is one file as Lightning's own, with any `zero`. Both can be gone on with on
        another number of workers.

    accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin, start_method: as DDPStrategy's.
    """

    strategy_name = "lockstep"
    restore_checkpoint_after_setup = True  # What is split has to be split before it is loaded.
    model: Any
    _layer_sync: Any
    _takes = (*LIGHTNINGS, "precision_plugin")

    def __init__(self, *, sharded_checkpoints: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self._forward_redirection = _Step()
        self._saves_shards = sharded_checkpoints
        self._shards_to_load: Path | None = None
        self._shards_loaders = False
        self._loader_states: list[Any] = []
        """Of the checkpoint that is gone on from: Lightning itself drops them where that was at the end of an epoch."""
        self._replica: DataParallel | None = None
        """The wrapped model, also after a fit: its trainer may be asked for a checkpoint then."""

    def setup_distributed(self) -> None:
        """Join the world."""
        self.set_world_ranks()
        self._join()

    def setup(self, trainer: Any) -> None:
        """Wrap the model, with its optimizers where it is to be trained."""
        connector = trainer._accelerator_connector
        # Lightning would put a DistributedSampler into every loader before this strategy sees it.
        self._shards_loaders |= connector.use_distributed_sampler
        connector.use_distributed_sampler = False
        trains, self._loader_states = trainer.state.fn == "fit", []
        if trains and self._zero and any(isinstance(each, _callbacks.BaseFinetuning) for each in trainer.callbacks):
            raise UsageError(
                f"zero={self._zero} gives the optimizer parts of parameters, and Lightning's BaseFinetuning looks for "
                "whole ones in it. Use zero=0 with this callback, or freeze parameters in a hook of the module."
            )
        self.accelerator.setup(trainer)
        if trains and self._layer_sync is not None:  # Torch's own needs GPUs.
            self.model, self._layer_sync = lockstep.SyncBatchNorm.convert(self.model), None
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trains:
            self.setup_optimizers(trainer)
        self.model = self._replica = self._wrap(self.model, self.optimizers if trains else [], trains=trains)
        if trains and self._zero:  # The plugin's own would see this worker's part alone.
            self.precision_plugin.clip_grad_by_norm = lambda _, clip_val: self.model.clip_grad_norm_(clip_val)
        self.setup_precision_plugin()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Share its batches out."""
        if not self._shards_loaders:
            return dataloader
        trainer = self.lightning_module.trainer
        sharded = self._sharded(dataloader, evaluates=not trainer.training)
        if not isinstance(sharded, ShardedLoader):
            return sharded
        loader = _Epochs(sharded, lambda: trainer.num_training_batches)
        if trainer.training and self._loader_states:
            loader.load_state_dict(self._loader_states.pop(0))
        return loader

    # The loop

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """The precision plugin's."""
        if not self.lightning_module.automatic_optimization:
            self.model.sync_gradients()
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean over all workers: weighted by the parts of the batch, where it is of a step; or the sum."""
        weight = self.world.hand_outs.in_use if self._forward_redirection.is_under_way else None
        counts = weight.value if weight is not None and not weight.is_explicit else None
        return self._reduce(tensor, group, reduce_op, super().reduce, counts)

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
        return {} if self._saves_shards else super().optimizer_state(whole_state_of(optimizer, self.world))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """One file, by worker 0; or a folder, by all."""
        if self._saves_shards:
            if len(self.optimizers) > 1:
                raise UsageError("sharded checkpoints hold one optimizer: leave out sharded_checkpoints=True.")
            assert self._replica is not None
            optimizer = self.optimizers[0] if self.optimizers else None
            lockstep.save(filepath, self._replica, optimizer, step=checkpoint["global_step"], keep_last=1)
            filepath = Path(filepath) / SHARD_FILE
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What Lightning keeps; of a sharded checkpoint, model and optimizer follow."""
        path = Path(str(checkpoint_path))
        self._shards_to_load = path if path.is_dir() else None
        file = path / SHARD_FILE if path.is_dir() else checkpoint_path
        found: dict[str, Any] = super().load_checkpoint(file, *args, **kwargs)
        fit_loop = found.get("loops", {}).get("fit_loop", {})
        self._loader_states = list(fit_loop.get("state_dict", {}).get("combined_loader", []))
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Set the model; every worker calls this."""
        if self._shards_to_load is not None:
            lockstep.load(self._shards_to_load, self.model, self.optimizers[0] if self.optimizers else None)
        else:
            with self.model.whole_params():
                super().load_model_state_dict(checkpoint, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Set the optimizers; every worker calls this."""
        states = checkpoint["optimizer_states"] if self._shards_to_load is None else ()
        for optimizer, state in zip(self.optimizers, states, strict=False):
            whole_state_of(optimizer, self.world).load_state_dict(state)

    # The end

    def teardown(self) -> None:
        """Unwrap the model. The world stays: the script may train on."""
        self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
        self.model = self.lightning_module
        super().teardown()


class LockstepFabricStrategy(Workers, _fabric.DDPStrategy):  # type: ignore[misc]
    """Fabric on Lockstep; takes what LockstepStrategy takes, but sharded checkpoints: use `lockstep.save` for those."""

    distributed_sampler_kwargs = None  # Loaders are sharded.
    _takes = (*LIGHTNINGS, "precision")

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        self._join()

    def setup_module(self, module: nn.Module) -> DataParallel:
        """Wrap a model that has no optimizer with it."""
        return self._wrap(module, [], trains=not self._zero)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> Any:
        """Wrap a model with its optimizers."""
        return self._wrap(module, optimizers), optimizers, scheduler

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
        prefix = "module." if isinstance(module, DataParallel) else ""
        return {name.removeprefix(prefix): value for name, value in module.state_dict().items()}

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Set the model; every worker calls this."""
        with module.whole_params() if isinstance(module, DataParallel) else contextlib.nullcontext():
            super().load_module_state_dict(module, state_dict, strict)

    def get_optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As torch's own `state_dict`, whatever is split; every worker calls this."""
        return super().get_optimizer_state(whole_state_of(optimizer, self.world))  # type: ignore[no-any-return]

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Set what `state` names: models, optimizers, split or not, and plain values."""
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, *args, **kwargs)
        optimizers = {name: each for name, each in state.items() if isinstance(each, torch.optim.Optimizer)}
        state |= {name: whole_state_of(each, self.world) for name, each in optimizers.items()}
        try:
            return super().load_checkpoint(path, state, *args, **kwargs)
        finally:
            state |= optimizers


LockstepStrategy.register_strategies(_strategies.StrategyRegistry)
LockstepFabricStrategy.register_strategies(_fabric.STRATEGY_REGISTRY)
