"""Records what a training script does in each step, from hooks that the script does not see.

Phases of a step: forward passes (which samples, which random state), backward passes (the loss, its weight, this
worker's own gradients), the optimizer's step (gradients before it; weights and buffers after it).

Lives in a worker's process that was started to verify a script, and in no other.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep import weight as weights
from lockstep import world as worlds
from lockstep.replica import grad_weight as weighted
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.data_parallel import DataParallel
from lockstep.verify import switched_off, tensors
from lockstep.verify.forwards import ForwardRecorder
from lockstep.verify.worker_record import Backward, RecordedStep, WorkerRecord


class Enough(BaseException):
    """As many steps as were asked for have been made: the script need not go on."""


class TrainingRecorder:
    """The record of this worker, as it grows."""

    def __init__(self, rank: int, num_steps: int, *, syncs_batch_norm: bool = False, in_float64: bool = False) -> None:
        """Record `num_steps` steps.

        syncs_batch_norm: convert every batch norm to SyncBatchNorm, to see whether that was the cause.
        in_float64: make models, and what goes into them, float64, to see whether rounding was the cause.
        """
        self.record = WorkerRecord(rank)
        self._num_steps = num_steps
        self._syncs_batch_norm = syncs_batch_norm
        self._in_float64 = in_float64
        self._step = RecordedStep()
        self._forwards = ForwardRecorder(self.record, self._models, in_float64=in_float64)
        self._wrapped: list[weakref.ref[DataParallel]] = []
        self._outside: dict[int, tensors.TensorPlace] = {}
        """By id: where parameters belong that are in no wrapped model."""
        self._given: tuple[Tensor, float] | None = None
        """The loss and the weight that are in `lockstep.backward` now."""
        self._depth = 0
        """Whether what an optimizer does now is part of something else: optimizers may call others."""

    def install(self) -> None:
        """Put the hooks in place; called once, before the script runs."""
        if self._in_float64:
            torch.set_default_dtype(torch.float64)
        switched_off.without_dropout(self._forwards.see_dropout)
        switched_off.without_compiling(self._see_compile)
        switched_off.watch_seeding(self._see_seed)
        self._around_wrapping()
        self._around_backward()
        self._around_clipping()
        self._forwards.install()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def _models(self) -> list[DataParallel]:
        """The wrapped models that the script still has: a module may be wrapped anew."""
        return [model for each in self._wrapped if (model := each()) is not None]

    # What is noticed once

    def _see_compile(self) -> None:
        self.record.is_compiled = True

    def _see_seed(self) -> None:
        self.record.is_seeded |= not self._models()  # Later on, the Trainer seeds every shard.

    def _around_wrapping(self) -> None:
        wrap = DataParallel.__init__

        @functools.wraps(wrap)
        def init(model: DataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self.record.is_sharded |= kwargs.get("shards") is not None
            if self._syncs_batch_norm and isinstance(module, nn.Module) and not self.record.is_sharded:
                module = SyncBatchNorm.convert(module)
            if self._in_float64 and isinstance(module, nn.Module):
                module = module.double()
            self._depth += 1  # Where parameters are split, wrapping tries a copy of the optimizer.
            try:
                wrap(model, module, *args, **kwargs)
            finally:
                self._depth -= 1
            self._see_model(model)

        DataParallel.__init__ = init  # type: ignore[method-assign, assignment]

    def _see_model(self, model: DataParallel) -> None:
        number = len(self._models())
        self._wrapped.append(weakref.ref(model))
        self.record.is_wrapped = True
        self._forwards.see_model(model)
        for name, param in tensors.named_params(number, model):
            if param.is_floating_point():
                self.record.see_epsilon(torch.finfo(param.dtype).eps)
            if param.requires_grad:  # Before the reducer's own hook, which comes with the first forward pass.
                param.register_post_accumulate_grad_hook(functools.partial(self._see_local, name))

    # Backward

    def _around_backward(self) -> None:
        backward, with_weight = Tensor.backward, weighted.backward

        @functools.wraps(backward)
        def tensor_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
            self._backward(loss)
            backward(loss, *args, **kwargs)

        @functools.wraps(with_weight)
        def weighted_backward(loss: Tensor, weight: float | Tensor | None = None, **kwargs: Any) -> None:
            is_plain = weight is None or not isinstance(loss, Tensor)
            self._given = None if is_plain else (loss, float(weight))  # type: ignore[arg-type]
            try:
                with_weight(loss, weight, **kwargs)
            finally:
                self._given = None

        Tensor.backward = tensor_backward  # type: ignore[method-assign, assignment]
        weighted.backward = weighted_backward

    def _backward(self, loss: Tensor) -> None:
        self._forwards.see_backward()
        given, self._given = self._given, None
        loss, weight, total = (*given, None) if given else (loss, *self._weight_in_force())
        value = float(loss.detach().real) if loss.numel() == 1 else None
        syncs = all(model.require_backward_grad_sync for model in self._models())
        self._step.backwards.append(Backward(value, weight, total, syncs))

    def _weight_in_force(self) -> tuple[float, float | None]:
        world = worlds.current()
        if world is None:
            return 1.0, 1.0
        weight = weights.in_force(world.accumulation.in_force, self._forwards.batch_weight)
        if weight is None:
            return 1.0, float(world.size)
        counted = weight.value if weight.counted is None else weight.counted
        return float(counted), weight.total

    def _see_local(self, name: str, param: Tensor) -> None:
        if param.grad is not None:
            self._step.local[name] = local = tensors.sample_of(param.grad)
            if len(self._step.backwards) == 1:
                self._step.opening[name] = local

    def _around_clipping(self) -> None:
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            clipped = self._clipping(getattr(nn.utils, name))
            setattr(nn.utils, name, clipped)
            setattr(nn.utils.clip_grad, name, clipped)

    def _clipping(self, clip: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(clip)
        def clipped(*args: Any, **kwargs: Any) -> Any:
            passes = self._step.backwards
            self._step.clips_early |= bool(passes) and not any(each.syncs for each in passes)
            given = next(iter(args), kwargs.get("parameters", ()))
            params = [given] if isinstance(given, Tensor) else list(given)
            self._step.clips_nothing |= bool(passes and params) and all(param.grad is None for param in params)
            return clip(params, *args[1:], **{name: each for name, each in kwargs.items() if name != "parameters"})

        return clipped

    # The optimizer's step

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        world = worlds.current()
        self.record.is_joined = world is not None or dist.is_initialized()
        self.record.is_seeded |= world is not None and world.is_seeded  # By join(seed=...).
        self.record.is_split |= any(model._engine.parts is not None for model in self._models())
        step, owned = self._step, self._owned(optimizer)
        step.rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        step.settings = [_settings(group) for group in optimizer.param_groups]
        step.grads = tensors.sketches_of([(place, param.grad) for place, param in owned if param.grad is not None])
        for name, before in tensors.sketches_of(owned).items():
            self.record.initial.setdefault(name, before)
        self._see_hooks()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        step, self._step = self._step, RecordedStep()
        unwrapped = self._forwards.end_step(step)
        if len(step.backwards) == 1:
            step.opening = {}
        step.weights = tensors.sketches_of(self._owned(optimizer))
        if unwrapped is not None:
            named = unwrapped.named_buffers()
            step.buffers |= {tensors.unprefixed(name): tensors.sketch_of(each) for name, each in named}
        for number, model in enumerate(self._models()):
            step.buffers |= {name: tensors.sketch_of(each) for name, each in tensors.named_buffers(number, model)}
            step.hidden |= {name: tensors.sketch_of(each) for name, each in tensors.hidden_state(number, model)}
        self.record.steps.append(step)
        if len(self.record.steps) >= self._num_steps:
            raise Enough

    def _owned(self, optimizer: Optimizer) -> list[tuple[tensors.TensorPlace, Tensor]]:
        known = tensors.places(self._models())
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return [(known.get(id(param)) or self._place_outside(param, n), param) for n, param in enumerate(params)]

    def _place_outside(self, param: Tensor, number: int) -> tensors.TensorPlace:
        place = self._outside.get(id(param))
        if place is None:
            place = self._outside[id(param)] = tensors.place_outside(param, number)
            self.record.foreign.append(place.name)
        return place

    def _see_hooks(self) -> None:
        for number, model in enumerate(self._models()):
            for name, param in tensors.named_params(number, model):
                if param._backward_hooks and name not in self.record.hooked:
                    self.record.hooked.append(name)


def _settings(group: dict[str, Any]) -> str:
    kept = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
    return repr({name: float(value) if isinstance(value, Tensor) else value for name, value in kept.items()})
