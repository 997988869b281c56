"""Accelerate on Lockstep: `LockstepAccelerator(zero=3)`, or `on_lockstep(accelerator, zero=3)` for one that is there.

    lockstep.join()                                   # before anything of Accelerate: on CPUs, shared memory
    accelerator = LockstepAccelerator(zero=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

What differs from Accelerate's own: models are wrapped in `lockstep.DataParallel`, with their optimizer if `zero` is
given; loaders are sharded, so that nothing is padded or repeated, and `gather_for_metrics` gives every sample once,
whatever the parts are. Batch sizes mean what they mean there: per worker, unless `split_batches=True`.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderStateMixin
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import GradientState
from accelerate.utils import SAFE_MODEL_NAME, recursively_apply
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lockstep
from lockstep.data.loader import ShardedLoader, is_split_by_node
from lockstep.errors import UsageError
from lockstep.integrations.evaluation import rebatched
from lockstep.integrations.optimizer_state import whole_state_of
from lockstep.replica.data_parallel import DataParallel
from lockstep.watching.watcher import Watcher

NO_TARGET = -100
"""What `labels` are where nothing is to be predicted, as torch's cross_entropy and transformers have it."""


class PreparedLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """A sharded loader as an Accelerator knows loaders: it says when its last batch is out, and what it is made of."""

    def __init__(self, loader: "ShardedLoader | DataLoader[Any]") -> None:
        self._loader = loader
        self.gradient_state = GradientState()
        self.num_samples: int | None = None
        """How many samples of the batch handed out last are this worker's; None where nobody knows."""
        self._skipped = 0
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def total_batch_size(self) -> int | None:
        """Over all workers."""
        size: int | None = self._loader.batch_size
        return size

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch number `epoch`."""
        self._epoch = epoch

    def skip(self, num_batches: int) -> None:
        """Have the next iteration begin after so many batches."""
        self._skipped = num_batches

    def __iter__(self) -> Iterator[Any]:
        sharded = self._loader if isinstance(self._loader, ShardedLoader) else None
        if sharded is not None and (self._skipped or self._epoch is not None):
            epoch = sharded.epoch if self._epoch is None else self._epoch
            sharded.load_state_dict({"epoch": epoch, "batches": self._skipped})
        self._skipped, self._epoch = 0, None
        self.begin()
        try:
            for batch, is_last in _with_last(self._loader):
                self.end_of_dataloader = is_last
                self.num_samples = sharded.num_samples if sharded is not None else None
                yield _without_targets(batch) if self.num_samples == 0 else batch
        finally:
            self.end()


def _with_last(loader: Any) -> Iterator[tuple[Any, bool]]:
    """What `loader` gives, and whether that is the last; a stream is read one batch ahead to know."""
    try:
        length = len(loader)
    except TypeError:
        batches = iter(loader)
        for batch in batches:
            for ahead in batches:
                yield batch, False
                batch = ahead
            yield batch, True
        return
    for number, batch in enumerate(loader, 1):
        yield batch, number == length


def _without_targets(batch: Any) -> Any:
    """A stand-in, whose sample is another worker's: nothing of it is to be counted."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return batch
    return type(batch)({**batch, "labels": torch.full_like(labels, NO_TARGET)})


class WholeStateOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An optimizer whose `state_dict` is whole, whatever is split over the workers: every worker calls it."""

    _state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """As torch's own would be were nothing split."""
        return self._state or whole_state_of(self.optimizer, lockstep.join()).state_dict()

    @contextlib.contextmanager
    def whole_state(self) -> Iterator[None]:
        """A block that every worker enters, in which any of them may ask for the `state_dict` by itself."""
        self._state = self.state_dict()
        try:
            yield
        finally:
            self._state = None

    def load_state_dict(self, state_dict: Any) -> None:
        """Take what `state_dict` gave, on any number of workers with any `zero`; every worker calls this."""
        whole_state_of(self.optimizer, lockstep.join()).load_state_dict(state_dict)


class LockstepAccelerator(accelerate.Accelerator):  # type: ignore[misc]
    """An Accelerator on Lockstep.

    zero: 1 to 3 splits the optimizer that is prepared together with a model. wrapping: what else DataParallel takes
    (`wire`, `blocks`, ...). All else is Accelerator's own.
    """

    def __init__(self, *args: Any, zero: int = 0, wrapping: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        world = lockstep.join()  # Before Accelerate opens a group of its own.
        if world.device.type == "cpu":
            kwargs.setdefault("cpu", True)  # Without it, Accelerate sees one worker where there is no GPU.
        super().__init__(*args, **kwargs)
        self.take_over(zero, wrapping)

    def take_over(self, zero: int, wrapping: Mapping[str, Any] | None) -> None:
        """Begin to be one; for an accelerator that was made otherwise."""
        self.world = lockstep.join()
        self.zero = zero
        self._wrapping = dict(wrapping or {})
        self._to_split: torch.optim.Optimizer | None = None
        self._loss = torch.zeros((), device=self.device)
        """Of the step under way, so far."""
        self.register_load_state_pre_hook(self._load_split)
        if self.num_processes != self.world.size:
            raise UsageError(
                f"Accelerate counts {self.num_processes} workers, and Lockstep {self.world.size}. Start the script "
                "with `lockstep run` or torchrun, and call lockstep.join() before Accelerate is used."
            )

    @property
    def split_model(self) -> DataParallel | None:
        """The model that is split over the workers with its optimizer, if any."""
        models = (each for each in self._models if isinstance(each, DataParallel))
        return next((each for each in models if each._engine.split is not None), None)

    # Preparing

    def prepare(self, *args: Any, device_placement: Any = None) -> Any:
        """As Accelerator's; with `zero`, model and optimizer are given together."""
        optimizers = [each for each in args if isinstance(each, torch.optim.Optimizer)]
        self._to_split = optimizers[0] if len(optimizers) == 1 else None
        try:
            return super().prepare(*args, device_placement=device_placement)
        finally:
            self._to_split = None

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Move, autocast and compile as Accelerator does, and wrap."""
        is_done = getattr(model, "_is_accelerate_prepared", False)
        prepared = super().prepare_model(model, device_placement, evaluation_mode=True)
        if is_done or evaluation_mode or not any(param.requires_grad for param in model.parameters()):
            return prepared
        del prepared._is_accelerate_prepared  # It may be prepared again, when this wrapper is gone.
        optimizer = self._to_split
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        if self.zero and optimizer is None:
            raise UsageError(
                f"zero={self.zero} splits the optimizer with its model: give both to one call, "
                "accelerator.prepare(model, optimizer, ...), and one optimizer of each."
            )
        device_ids = [self.device] if self.device.type != "cpu" else None
        handler = self.ddp_handler.to_kwargs() if self.ddp_handler is not None else {}
        options = {**handler, **self._wrapping}
        split = optimizer if self.zero else None
        wrapped = DataParallel(prepared, device_ids, optimizer=split, zero=self.zero, **options)
        wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models[-1] = wrapped
        return wrapped

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """As Accelerator's; its state stays whole for who asks."""
        if not self.zero or getattr(optimizer, "_is_accelerate_prepared", False):
            return super().prepare_optimizer(optimizer, device_placement)
        prepared = WholeStateOptimizer(optimizer, device_placement=False, scaler=self.scaler)
        prepared._is_accelerate_prepared = True
        self._optimizers.append(prepared)
        return prepared

    def prepare_data_loader(self, data_loader: Any, device_placement: bool | None = None, **options: Any) -> Any:
        """Share its batches out; one of a data set that was split by node already is left as it is."""
        if getattr(data_loader, "_is_accelerate_prepared", False) or not isinstance(data_loader, DataLoader):
            return super().prepare_data_loader(data_loader, device_placement, **options)
        device = False if device_placement is False or not self.device_placement else self.world.device
        if not is_split_by_node(data_loader.dataset):
            if not self.split_batches:
                data_loader = _times(data_loader, self.world.size)
            data_loader = lockstep.shard(data_loader, world=self.world, device=device)
        prepared = PreparedLoader(data_loader)
        prepared._is_accelerate_prepared = True
        self._dataloaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """The loader, whose next epoch begins after so many batches."""
        if not isinstance(dataloader, PreparedLoader):
            return super().skip_first_batches(dataloader, num_batches)
        dataloader.skip(num_batches)
        return dataloader

    def unwrap_model(self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        """The module itself."""
        module = model.module if isinstance(model, DataParallel) else model
        return super().unwrap_model(module, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The whole model; of one that is split, each tensor in memory of its own, as safetensors wants it."""
        if not isinstance(model, DataParallel) or model is not self.split_model:
            return super().get_state_dict(model, unwrap)
        state = model.state_dict()
        return {name.removeprefix("module.") if unwrap else name: value.clone() for name, value in state.items()}

    def _load_split(self, models: list[Any], folder: Any) -> None:
        """Load what is split: safetensors would have every parameter alone in its memory. Called by `load_state`."""
        model = self.split_model
        number = models.index(model) if model in models else -1
        path = Path(folder) / (SAFE_MODEL_NAME + (f"_{number}" if number else "") + ".safetensors")
        if model is not None and number >= 0 and path.exists():
            model.load_state_dict(load_file(path))
            models.remove(model)

    # Training

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As Accelerator's; who watches is told the loss of each step."""
        super().backward(loss, **kwargs)
        watcher = self.world.watcher
        if isinstance(watcher, Watcher):
            self._loss = self._loss + loss.detach() / self.gradient_accumulation_steps
            if self.sync_gradients:
                watcher.log(loss=self._loss)
                self._loss = torch.zeros_like(self._loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Scale the gradients of a whole model; of one that is split, all of it."""
        model = self.split_model
        if model is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        self.unscale_gradients()
        return model.clip_grad_norm_(max_norm, norm_type)

    # Gathering

    def gather(self, tensor: Any) -> Any:
        """All workers' tensors one after another; they may differ in length."""
        return tensor if self.world.size == 1 else recursively_apply(self._gather, tensor, error_on_other_type=True)

    def _gather(self, tensor: Tensor) -> Tensor:
        rows = tensor.reshape(1) if not tensor.ndim else tensor
        parts = [part for (part,) in self.world.gather_tensors([rows])]
        return torch.cat(parts).to(tensor.device)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, of this worker's samples alone: a stand-in is left out. Nothing was padded."""
        loader = self.gradient_state.active_dataloader
        num_samples = loader.num_samples if isinstance(loader, PreparedLoader) else None

        def own(tensor: Tensor) -> Tensor:
            return tensor[:num_samples] if tensor.ndim else tensor

        if use_gather_object:
            mine = input_data if isinstance(input_data, list) else [input_data]
            return [each for part in self.world.gather(mine[:num_samples]) for each in part]
        try:
            return self.gather(recursively_apply(own, input_data, error_on_other_type=True))
        except TypeError:
            return self.gather_for_metrics(input_data, use_gather_object=True)


def on_lockstep(accelerator: Any, *, zero: int = 0, wrapping: Mapping[str, Any] | None = None) -> LockstepAccelerator:
    """Make an Accelerator that has prepared nothing yet one on Lockstep; returns itself."""
    if type(accelerator) is not accelerate.Accelerator or accelerator._models:
        raise UsageError(
            "on_lockstep takes an accelerate.Accelerator that has prepared nothing yet, not a "
            f"{type(accelerator).__name__} with {len(getattr(accelerator, '_models', []))} models. Call it right after "
            "Accelerator()."
        )
    accelerator.__class__ = LockstepAccelerator
    accelerator.take_over(zero, wrapping)
    assert isinstance(accelerator, LockstepAccelerator)
    return accelerator


def _times(loader: DataLoader[Any], size: int) -> DataLoader[Any]:
    """`loader` with batches of as many samples for all workers together as it had for one."""
    if loader.batch_size is None or size == 1:
        return loader
    order = {} if isinstance(loader.dataset, IterableDataset) else {"sampler": loader.sampler}
    return rebatched(loader, batch_size=loader.batch_size * size, drop_last=loader.drop_last, **order)
