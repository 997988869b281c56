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
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep import weight as weights
from lockstep import world as worlds
from lockstep.replica import backward as weighted
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.data_parallel import DataParallel
from lockstep.verify import compiler, naming, quiet, samples
from lockstep.verify.record import Backward, Forward, Record, Sketches, Step
from lockstep.verify.sketch import Sketch, joined
from lockstep.verify.tensor import sample_of, sketch_of


class Enough(BaseException):
    """As many steps as were asked for have been made: the script need not go on."""


class Recorder:
    """The record of this worker, as it grows."""

    def __init__(self, rank: int, num_steps: int, *, syncs_batch_norm: bool = False) -> None:
        self.record = Record(rank)
        self._num_steps = num_steps
        self._syncs_batch_norm = syncs_batch_norm
        """Whether every batch norm is converted to SyncBatchNorm, to see whether that was the cause."""
        self._step = Step()
        self._wrapped: list[weakref.ref[DataParallel]] = []
        self._drops_inside = False
        """Whether a model has dropout inside its recurrent networks."""
        self._optimizers: list[Optimizer] = []
        self._outside: dict[int, naming.Place] = {}
        self._weight: weights.Weight | None = None
        """Of the batch that the last forward pass saw."""
        self._given: tuple[Tensor, float] | None = None
        """The loss and the weight that are in `lockstep.backward` now."""
        self._random_states: tuple[str, str] | None = None
        """Of host and device, when the last forward pass began."""
        self._device = torch.device("cpu")
        self._is_inside_wrapper = False
        self._depth = 0
        """Whether what an optimizer does now is part of something else: optimizers may call others."""

    def install(self) -> None:
        """Put the hooks in place; called once, before the script runs."""
        quiet.without_dropout(self._see_dropout)
        compiler.without_compiling(self._see_compile)
        quiet.watch_seeding(self._see_seed)
        self._around_wrapping()
        self._around_backward()
        self._around_clipping()
        # For all modules, since a hook of one would go into copies and pickles of it.
        register_module_forward_pre_hook(self._before_module)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    @property
    def _models(self) -> list[DataParallel]:
        """The wrapped models that the script still has: a module may be wrapped anew."""
        return [model for each in self._wrapped if (model := each()) is not None]

    # What is noticed once

    def _see_dropout(self) -> bool:
        """Whether it has to be off."""
        self._step.drops |= not self.record.is_sharded
        return not self.record.is_sharded

    def _see_compile(self) -> None:
        self.record.is_compiled = True

    def _see_seed(self) -> None:
        self.record.is_seeded |= not self._models  # Later on, the Trainer seeds every shard.

    def _around_wrapping(self) -> None:
        wrap = DataParallel.__init__

        @functools.wraps(wrap)
        def init(model: DataParallel, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            self.record.is_sharded |= kwargs.get("shards") is not None
            if self._syncs_batch_norm and isinstance(module, nn.Module) and not self.record.is_sharded:
                module = SyncBatchNorm.convert(module)
            self._depth += 1  # Where parameters are split, wrapping tries a copy of the optimizer.
            try:
                wrap(model, module, *args, **kwargs)
            finally:
                self._depth -= 1
            self._see_model(model)

        DataParallel.__init__ = init  # type: ignore[method-assign, assignment]

    def _see_model(self, model: DataParallel) -> None:
        number = len(self._models)
        self._wrapped.append(weakref.ref(model))
        self.record.is_wrapped = True
        if not self.record.is_sharded:
            self._drops_inside |= quiet.without_recurrent_dropout(model.module)
        for name, param in naming.named_params(number, model):
            if param.is_floating_point():
                self._see_epsilon(torch.finfo(param.dtype).eps)
            if param.requires_grad:  # Before the reducer's own hook, which comes with the first forward pass.
                param.register_post_accumulate_grad_hook(functools.partial(self._see_local, name))
        model.register_forward_pre_hook(self._before_wrapper, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._after_wrapper, always_call=True)

    def _see_epsilon(self, epsilon: float) -> None:
        self.record.epsilon = max(self.record.epsilon, epsilon)

    # Forward

    def _before_wrapper(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._is_inside_wrapper = True
        if torch.is_grad_enabled():
            assert isinstance(model, DataParallel)
            self._forward(model.world.device, (args, kwargs), bypassed=False)
            self._see_batch_norms(model)

    def _after_wrapper(self, *_: Any) -> None:
        self._is_inside_wrapper = False

    def _before_module(self, module: nn.Module, args: Any) -> None:
        if self._is_inside_wrapper or not torch.is_grad_enabled():
            return
        for model in self._models:
            if model.module is module:
                self._forward(model.world.device, args, bypassed=True)

    def _forward(self, device: torch.device, inputs: Any, *, bypassed: bool) -> None:
        world = worlds.current()
        self._weight = world.weight if world is not None else None
        size = self._weight.value if self._weight is not None and self._weight.total is not None else None
        state = quiet.random_state(device)
        self._device, self._random_states = device, (quiet.random_state(torch.device("cpu")), state)
        self._step.drops |= self._drops_inside
        seen = samples.digests(inputs, None if size is None else int(size))
        self._step.forwards.append(Forward(seen, state, bypassed))
        if torch.is_autocast_enabled(device.type):
            self._see_epsilon(torch.finfo(torch.get_autocast_dtype(device.type)).eps)
        if device.type == "cuda" and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
            self._see_epsilon(2.0**-11)

    def _see_batch_norms(self, model: DataParallel) -> None:
        known = self.record.batch_norms
        if self.record.is_sharded:
            return  # They use the statistics of each shard, on any number of workers.
        self.record.is_coupled |= naming.has_synced_batch_norm(model)
        known.extend(name for name in naming.batch_norms(model) if name not in known)

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
        if self._random_states is not None:
            now = (quiet.random_state(torch.device("cpu")), quiet.random_state(self._device))
            self._step.draws |= now != self._random_states
        given, self._given = self._given, None
        loss, weight, total = (*given, None) if given else (loss, *self._weight_in_force())
        value = float(loss.detach().real) if loss.numel() == 1 else None
        syncs = all(model.require_backward_grad_sync for model in self._models)
        self._step.backwards.append(Backward(value, weight, total, syncs))

    def _weight_in_force(self) -> tuple[float, float | None]:
        world = worlds.current()
        if world is None:
            return 1.0, 1.0
        weight = weights.in_force(world.weight, self._weight)
        if weight is None:
            return 1.0, float(world.size)
        counted = weight.value if weight.counted is None else weight.counted
        return float(counted), weight.total

    def _see_local(self, name: str, param: Tensor) -> None:
        if param.grad is not None:
            self._step.local[name] = local = sample_of(param.grad)
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
            return clip(*args, **kwargs)

        return clipped

    # The optimizer's step

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if not any(each is optimizer for each in self._optimizers):
            self._optimizers.append(optimizer)
        self.record.is_joined = worlds.current() is not None or dist.is_initialized()
        step = self._step
        step.optimizer = next(n for n, each in enumerate(self._optimizers) if each is optimizer)
        step.rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        step.settings = [_settings(group) for group in optimizer.param_groups]
        self.record.is_split |= any(model.parts is not None for model in self._models)
        owned = self._owned(optimizer)
        step.grads = _sketches([(place, param.grad) for place, param in owned if param.grad is not None])
        for name, before in _sketches(owned).items():
            self.record.initial.setdefault(name, before)
        self._see_hooks()

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._depth -= 1
        if self._depth > 0:
            return
        step, self._step = self._step, Step()
        if len(step.backwards) == 1:
            step.opening = {}
        step.weights = _sketches(self._owned(optimizer))
        for number, model in enumerate(self._models):
            step.buffers |= {name: sketch_of(each) for name, each in naming.named_buffers(number, model)}
            step.hidden |= {name: sketch_of(each) for name, each in naming.hidden_state(number, model)}
        self.record.steps.append(step)
        if len(self.record.steps) >= self._num_steps:
            raise Enough

    def _owned(self, optimizer: Optimizer) -> list[tuple[naming.Place, Tensor]]:
        known = naming.places(self._models)
        params = [param for group in optimizer.param_groups for param in group["params"]]
        return [(known.get(id(param)) or self._place_outside(param, n), param) for n, param in enumerate(params)]

    def _place_outside(self, param: Tensor, number: int) -> naming.Place:
        place = self._outside.get(id(param))
        if place is None:
            place = self._outside[id(param)] = naming.place_outside(param, number)
            self.record.foreign.append(place.name)
        return place

    def _see_hooks(self) -> None:
        for number, model in enumerate(self._models):
            for name, param in naming.named_params(number, model):
                if param._backward_hooks and name not in self.record.hooked:
                    self.record.hooked.append(name)


def _sketches(owned: list[tuple[naming.Place, Tensor]]) -> Sketches:
    pieces: dict[str, list[Sketch]] = {}
    for place, tensor in owned:
        pieces.setdefault(place.name, []).append(sketch_of(tensor, place.offset, place.numel))
    return {name: joined(found) for name, found in pieces.items()}


def _settings(group: dict[str, Any]) -> str:
    kept = {name: value for name, value in group.items() if name not in ("params", "lr", "initial_lr")}
    return repr({name: float(value) if isinstance(value, Tensor) else value for name, value in kept.items()})
