"""How the workers' steps become one training: what a stepper is, and what all of them have in common.

    TrainerOptions   what a trainer was made of
    Strategy         chosen when the trainer is made; opens a stepper
    Stepper          makes the steps of one worker, and knows what it must keep
    ShardLoss        what `loss_fn` said of one shard
    StepResult       what a step returns

Without a strategy every step is that of one worker on the whole batch (`Synchronous`, in step.py).
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.comm.tree import ShardTree
from lockstep.data.source import GlobalBatch
from lockstep.errors import UsageError
from lockstep.replica.data_parallel import DataParallel
from lockstep.train.batches import BatchSource, LoaderOptions, check_data
from lockstep.watching.watcher import Watcher
from lockstep.weight import checked
from lockstep.wire.plain import DTYPES, Half
from lockstep.world import World

LossFn = Callable[[nn.Module, Any], Any]
"""Takes the model and a shard; returns the mean loss of the shard, or that and what it is the mean over."""


class Determinism:
    """Has torch use its deterministic algorithms where there is a choice, within `with determinism():`.

    On a GPU an operation that has none raises torch's error, which names it: a warning would not do, since some kernels
    (cuDNN's attention) take the other algorithm then. On the CPU with one thread there is no choice to make.
    """

    def __init__(self, device: torch.device, threads: int, *, is_wanted: bool) -> None:
        self._is_on = is_wanted and (device.type != "cpu" or threads > 1)
        if self._is_on and device.type == "cuda":
            # cuBLAS reads this when it is first used, and torch refuses to call it deterministic without.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Outside the block everything is as the user has set it."""
        if not self._is_on:
            yield
            return
        before = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        settings = torch.utils.deterministic
        fills = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # It would cost a pass each time.
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)
            settings.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """What a trainer was made of; its arguments under their names."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    world: World
    tree: ShardTree
    """Which shards there are, and who has which."""
    clip: float | None
    zero: int
    blocks: Any
    bucket_cap_mb: float | None
    wire: Any
    scheduler: Any
    scaler: Any
    determinism: Determinism
    check_every: int
    on_difference: str
    cuda_graph: bool
    recheck_every: int
    wants_change: Callable[[], bool]
    """Whether this worker knows a reason why the world should change before the next step."""

    @property
    def shard_range(self) -> tuple[int, int]:
        """The first of this worker's shards, and the one behind its last."""
        return self.tree.runs[self.world.rank]

    @property
    def keeps_bits(self) -> bool:
        """Whether gradients are added along the tree, so that bits do not depend on the number of workers."""
        return self.wire is None or isinstance(self.wire, Half)

    @property
    def rounds_to(self) -> torch.dtype | None:
        """What they are rounded to there, and every sum of them; None if not at all."""
        return DTYPES[self.wire.dtype] if isinstance(self.wire, Half) else None

    @property
    def lr(self) -> float | Tensor:
        """The learning rate of the optimizer's first group."""
        return self.optimizer.param_groups[0]["lr"] if self.optimizer.param_groups else 0.0


@dataclass(frozen=True, slots=True)
class ShardLoss:
    """The loss of one shard."""

    value: Tensor
    """The mean over what was counted."""
    weight: float | Tensor
    """How much was counted; a tensor on a GPU."""
    is_weighted: bool
    """Whether `loss_fn` gave the weight; else it is the number of samples."""

    @classmethod
    def of(cls, returned: Any, size: int) -> "ShardLoss":
        """What `loss_fn` returned for a shard of `size` samples; raises UsageError if that is no loss."""
        is_weighted = isinstance(returned, tuple) and len(returned) == 2
        loss, weight = returned if is_weighted else (returned, float(size))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            is_tensor = isinstance(returned, Tensor)
            found = f"tensor of shape {list(returned.shape)}" if is_tensor else type(returned).__name__
            raise UsageError(
                "loss_fn(model, shard) must return the mean loss of the shard, a tensor with one element, or (loss, "
                f"weight); it returned a {found}."
            )
        return cls(loss, checked(weight, "loss_fn"), is_weighted)

    def backward(self, total: int, scaler: Any, scale: float = 1.0) -> None:
        """The backward pass, weighted by this shard's share of `total`, times `scale`."""
        factor = self.weight * scale / total
        weighted = self.value if isinstance(factor, float) and factor == 1.0 else self.value * factor
        (weighted if scaler is None else scaler.scale(weighted)).backward()


def mean_loss(losses: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The mean over shards of these losses and weights, and the sum of the weights."""
    weight = weights.sum()
    counted = torch.where(weights == 0, 0.0, losses * weights)  # A loss over nothing may be nan.
    return counted.sum() / torch.where(weight == 0, 1.0, weight), weight


def scale_grads(grads: Sequence[Tensor], ratio: Tensor | None, norm: Tensor, clip: float | None) -> None:
    """Multiply `grads` by `ratio`, and so that their `norm` after that is at most `clip`, where these are given."""
    factor = ratio if ratio is not None else torch.ones_like(norm)
    if clip is not None:
        factor = factor * torch.clamp(clip / (norm + 1e-6), max=1.0)
    if factor.device.type == "cpu" and factor.item() == 1.0:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        by_dtype.setdefault(grad.dtype, []).append(grad)
    for dtype, alike in by_dtype.items():
        torch_private.foreach_("mul", alike, factor.to(dtype.to_real()) if factor.is_cuda else factor.item())


def step_optimizer(optimizer: torch.optim.Optimizer, scaler: Any) -> None:
    """Update the weights by their gradients."""
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step, the same on every worker; with a strategy, what this worker made of its own shards.

    On a GPU the numbers are read when they are asked for, and not before.
    """

    step: int
    """How many steps have been made, this one included."""
    _is_scaled: bool
    _loss: Tensor
    _grad_norm: Tensor
    _weight: Tensor
    _lr: float | Tensor
    _staleness: Callable[[], int] | None = None

    @property
    def loss(self) -> float:
        """The mean loss over the global batch, by weight."""
        return float(self._loss)

    @property
    def grad_norm(self) -> float:
        """The norm of the gradient of that loss over all parameters, before clipping."""
        return float(self._grad_norm)

    @property
    def weight(self) -> float:
        """What the loss is the mean over: samples, or what `loss_fn` gave as weights."""
        return float(self._weight)

    @property
    def lr(self) -> float:
        """The learning rate of the optimizer's first group in this step."""
        return float(self._lr)

    @property
    def staleness(self) -> int:
        """With `Async`, how many updates of others came between reading the parameters and this one, at most.

        Waits until the gradient is applied, if it is asked for before the next step. 0 without `Async`.
        """
        return self._staleness() if self._staleness is not None else 0

    @property
    def skipped(self) -> bool:
        """Whether a gradient scaler found a gradient that is not finite, and left the weights as they were."""
        return self._is_scaled and not math.isfinite(self.grad_norm)

    def log_to(self, watcher: Watcher) -> None:
        """Let `watcher` record the step; a GPU is not waited for."""
        watcher.log(loss=self._loss, grad_norm=self._grad_norm, lr=self._lr)  # type: ignore[arg-type]  # Or a tensor.

    def __repr__(self) -> str:
        return f"StepResult(step={self.step}, loss={self.loss:.6g}, grad_norm={self.grad_norm:.6g})"


class Stepper:
    """Makes the steps of one worker. What stands here is right where replicas are equal after every step."""

    is_independent = False
    """Whether workers make their steps each for itself, some more than others."""

    def __init__(self, options: TrainerOptions, model: DataParallel) -> None:
        self._options = options
        self.model = model
        """The wrapped module, as `loss_fn` gets it."""

    def check_data(self, dataset: Any, loading: LoaderOptions) -> None:
        """Raise UsageError for what `batches` could not read; called when a user gives it."""
        check_data(dataset, loading)

    def batches(self, dataset: Any, loading: LoaderOptions, seed: int) -> BatchSource:
        """Where this worker's batches of `dataset` come from."""
        options = self._options
        return BatchSource(dataset, loading, run=options.shard_range, shards=options.tree.shards, seed=seed)

    def step(self, batch: GlobalBatch, seed: int, number: int) -> StepResult:
        """Make step `number`; if that raises, the step has not happened."""
        raise NotImplementedError

    @property
    def shard_times(self) -> list[float]:
        """How long the forward pass of a shard took each worker in the last step; 0 where that is not known."""
        return [0.0] * self._options.world.size

    @property
    def is_change_due(self) -> bool:
        """Whether the workers have agreed that their world changes before the next step."""
        return False

    def check(self, steps: int) -> None:
        """So many steps have taken effect: raise if something is found to be wrong with the replicas."""

    def end_batches(self, steps: int) -> int:
        """A loop over batches has ended on this worker, which has counted `steps`; returns how many all have made."""
        return steps

    def before_save(self, steps: int) -> int:
        """All workers are about to save, or to evaluate: make their replicas equal; returns as `end_batches` does."""
        return steps

    def after_load(self) -> None:
        """Model and optimizer have been set to something else: go on from there."""

    def release(self) -> None:
        """The world has ended: let go of what belongs to it."""
        self._options.world.replicas.forget(self.model)
        self.model._engine.release()

    def state_dict(self) -> dict[str, Any]:
        """What is to be kept besides model and optimizer; plain values, the same on all workers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, perhaps on another number of workers."""


class Strategy(Protocol):
    """How the workers' steps become one training."""

    def open(self, options: TrainerOptions) -> Stepper:
        """What makes the steps of a trainer; raises UsageError for options it cannot work with."""
