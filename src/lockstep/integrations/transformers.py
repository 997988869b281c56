"""Hugging Face's Trainer on Lockstep: `LockstepTrainer` in Trainer's place, or `LockstepMixin` before a subclass.

    lockstep.join()                                            # first: on CPUs, shared memory
    trainer = LockstepTrainer(model=model, args=args, train_dataset=data, zero=3)

    class MyTrainer(LockstepMixin, Seq2SeqTrainer): ...

`num_items_in_batch` weights tokens over all workers, as transformers means it; losses that do not know it are weighted
by samples. Evaluation sees every sample once. Checkpoints are transformers' own files, whatever `zero` is, and can be
gone on with on another number of workers.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import transformers
from torch import Tensor, nn
from transformers import trainer as trainer_module

import lockstep
from lockstep.integrations.accelerate import LockstepAccelerator, PreparedLoader, WholeStateOptimizer, on_lockstep
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.grad_weight import evenly

ALL_SPLIT = 3
"""The `zero` at which a worker has no whole parameters of its own."""


class LockstepMixin:
    """Stands before transformers.Trainer, or a subclass, in the bases of one's own.

    zero: 1 to 3 splits the optimizer, gradients, parameters. wrapping: what else DataParallel takes (`wire`, ...).
    """

    accelerator: LockstepAccelerator
    args: Any
    optimizer: Any

    def __init__(self, *args: Any, zero: int = 0, wrapping: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._zero, self._wrapping = zero, wrapping
        self._world = lockstep.join()
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's accelerator, on Lockstep."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        on_lockstep(self.accelerator, zero=self._zero, wrapping=self._wrapping)
        gathers_objects = self.args.eval_use_gather_object
        self.gather_function = functools.partial(self.accelerator.gather_for_metrics, use_gather_object=gathers_objects)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward of one micro-batch."""
        is_share = num_items_in_batch is not None and self._shares_losses()
        with evenly(self._world) if is_share else contextlib.nullcontext():
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc, no-any-return]

    def _prepare_input(self, data: Any) -> Any:
        if isinstance(data, Tensor) and data.device.type == self.args.device.type == "cpu":
            return data  # To "cpu:0", as Accelerate calls it, it would be copied, and its weight lost.
        return super()._prepare_input(data)  # type: ignore[misc]

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """One batch of an evaluation; its loss is that of all workers' parts where it was made as a share of that."""
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if loss is not None and self._shares_losses() and "labels" in inputs:
            loss = self._world.all_reduce(loss) / self._world.size
        return loss, logits, labels

    def _shares_losses(self) -> bool:
        """Whether Trainer divides a worker's loss by the tokens of all workers, and multiplies by their number."""
        trainer: Any = self
        knows = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        return bool(knows and self.args.average_tokens_across_devices)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        with _own_skipping():
            return super()._run_epoch(*args, **kwargs)  # type: ignore[misc]

    # Checkpoints

    def _whole_params(self) -> contextlib.AbstractContextManager[None]:
        model = self.accelerator.split_model
        if model is None or self._zero < ALL_SPLIT:
            return contextlib.nullcontext()
        return model.whole_params()

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As Trainer's; with zero=3 every worker calls this."""
        with self._whole_params():
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        model = self.accelerator.split_model
        # Over shared memory all workers look at the same parameters.
        with model.whole_params() if model is not None else contextlib.nullcontext():
            super()._load_best_model()  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        split = isinstance(self.optimizer, WholeStateOptimizer)
        with self.optimizer.whole_state() if split else contextlib.nullcontext():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _wrap_model(self, model: Any, training: bool = True, **kwargs: Any) -> Any:
        if isinstance(model, DataParallel):
            return model
        return super()._wrap_model(model, training, **kwargs)  # type: ignore[misc]


class LockstepTrainer(LockstepMixin, transformers.Trainer):  # type: ignore[misc]
    """transformers.Trainer on Lockstep; takes `zero` and `wrapping` besides."""


@contextlib.contextmanager
def _own_skipping() -> Iterator[None]:
    """A block in which transformers skips batches of a sharded loader as that wants it.

    Trainer calls Accelerate's function by its name, and that would make a new loader of the whole data set.
    """
    before = trainer_module.skip_first_batches

    def skip(loader: Any, num_batches: int = 0) -> Any:
        if not isinstance(loader, PreparedLoader):
            return before(loader, num_batches)
        loader.skip(num_batches)
        return loader

    trainer_module.skip_first_batches = skip
    try:
        yield
    finally:
        trainer_module.skip_first_batches = before
