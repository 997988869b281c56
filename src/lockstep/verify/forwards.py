"""Records the forward passes of a step: which samples each saw, and from which random numbers it drew.

Lives in a worker's process that was started to verify a script, and in no other.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lockstep import weight as weights
from lockstep import world as worlds
from lockstep.data import tree
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.data_parallel import DataParallel
from lockstep.verify import switched_off, tensors
from lockstep.verify.worker_record import Forward, RecordedStep, WorkerRecord


class ForwardRecorder:
    """Sees every forward pass of a model that is trained. Phases: install; see_model for each; end_step after each."""

    def __init__(self, record: WorkerRecord, models: Callable[[], Sequence[DataParallel]], *, in_float64: bool) -> None:
        """`models`: the wrapped models that the script still has."""
        self.batch_weight: weights.Weight | None = None
        """The weight of the batch that the last forward pass saw."""
        self._record = record
        self._models = models
        self._in_float64 = in_float64
        self._step = RecordedStep()
        """What the forward passes of this step are recorded in."""
        self._callers: list[nn.Module | None] = []
        """Of each pass the module, where no model is wrapped: a script may wrap on several workers only."""
        self._drops_inside = False
        """Whether a model has dropout inside its recurrent networks."""
        self._begun: tuple[torch.device, tuple[str, str]] | None = None
        """The device of the last forward pass, and the random states when it began."""
        self._begun_inside: tuple[str, str] | None = None
        """The random states that a wrapped model draws from, when its forward pass began."""
        self._outermost: nn.Module | None = None
        """The wrapper, or the trained module without one, that is in its forward pass."""

    def install(self) -> None:
        """Put the hooks in place: for all modules, since a hook of one would go into copies and pickles of it."""
        register_module_forward_pre_hook(self._before_module)
        register_module_forward_hook(self._after_module, always_call=True)

    def see_model(self, model: DataParallel) -> None:
        """A model has been wrapped."""
        if not self._record.is_sharded:
            self._drops_inside |= switched_off.without_recurrent_dropout(model.module)
        model.register_forward_pre_hook(self._before_wrapper, prepend=True, with_kwargs=True)
        model.register_forward_hook(self._after_wrapper, always_call=True)

    def see_dropout(self) -> bool:
        """Dropout is about to do something; returns whether it has to be off."""
        self._step.drops |= not self._record.is_sharded
        return not self._record.is_sharded

    def see_backward(self) -> None:
        """A backward pass begins: what was drawn until now, the forward pass and the loss have drawn."""
        if self._begun is not None:
            device, states = self._begun
            self._step.draws |= _random_states(device) != states

    def end_step(self, step: RecordedStep) -> nn.Module | None:
        """Note in `step`, which ends here, the passes of wrapped models; or those of the largest where none is wrapped.

        Returns that one: its parts may have been called by themselves.
        """
        sizes = {each: len(list(each.parameters())) for each in self._callers if each is not None}
        model = None if None in self._callers else max(sizes, key=lambda each: sizes[each], default=None)
        passes = zip(self._step.forwards, self._callers, strict=True)
        step.forwards = [forward for forward, caller in passes if caller is model]
        step.drops, step.draws = self._step.drops, self._step.draws
        self._step, self._callers = RecordedStep(), []
        return model

    def _before_wrapper(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        self._outermost = model
        if torch.is_grad_enabled():
            assert isinstance(model, DataParallel)
            with model._engine.own_numbers:
                self._begun_inside = _random_states(model.world.device)
            self._see(model.world.device, (args, kwargs), self._begun_inside[1])
            self._see_batch_norms(model)
        return _as_float64((args, kwargs)) if self._in_float64 else None

    def _after_wrapper(self, model: nn.Module, *_: Any) -> None:
        self._outermost = None
        before, self._begun_inside = self._begun_inside, None
        if before is not None:
            assert isinstance(model, DataParallel)
            with model._engine.own_numbers:
                self._step.draws |= _random_states(model.world.device) != before

    def _before_module(self, module: nn.Module, args: Any) -> Any:
        if self._outermost is not None or isinstance(module, DataParallel):
            return None
        models = self._models()
        if not models:
            self._before_unwrapped(module, args)
        elif torch.is_grad_enabled():
            for model in models:
                if model.module is module:
                    device = model.world.device
                    self._see(device, args, _random_states(device)[1], bypassed=True)
        return _as_float64(args) if self._in_float64 else None

    def _before_unwrapped(self, module: nn.Module, args: Any) -> None:
        """A model that nobody has wrapped, maybe since there is one worker: its samples count all the same."""
        trained = [param for param in module.parameters() if param.requires_grad]
        if trained:  # Not a loss, say.
            self._outermost = module
            if torch.is_grad_enabled():
                device = trained[0].device
                self._see(device, args, _random_states(device)[1], caller=module)

    def _after_module(self, module: nn.Module, *_: Any) -> None:
        if module is self._outermost and not isinstance(module, DataParallel):
            self._outermost = None

    def _see(
        self,
        device: torch.device,
        inputs: Any,
        random_state: str,
        *,
        bypassed: bool = False,
        caller: nn.Module | None = None,
    ) -> None:
        world = worlds.current()
        given = [leaf for leaf in tree.leaves(inputs) if isinstance(leaf, Tensor)]
        self.batch_weight = world.hand_outs.find(given, trains=True) if world is not None else None
        weight = self.batch_weight
        size = int(weight.value) if weight is not None and weight.total is not None else None
        self._begun = device, _random_states(device)
        self._step.drops |= self._drops_inside
        self._step.forwards.append(Forward(tensors.digests(inputs, size), random_state, bypassed))
        self._callers.append(caller)
        self._see_precision(device)

    def _see_precision(self, device: torch.device) -> None:
        if torch.is_autocast_enabled(device.type):
            self._record.see_epsilon(torch.finfo(torch.get_autocast_dtype(device.type)).eps)
        if device.type == "cuda" and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
            self._record.see_epsilon(2.0**-11)

    def _see_batch_norms(self, model: DataParallel) -> None:
        if self._record.is_sharded:
            return  # They use the statistics of each shard, on any number of workers.
        known = self._record.batch_norms
        for name, module in model.module.named_modules():
            if not module.training:
                continue
            if isinstance(module, SyncBatchNorm | nn.SyncBatchNorm):
                self._record.is_coupled = True
            elif isinstance(module, nn.modules.batchnorm._BatchNorm):
                known += {name or type(module).__name__} - set(known)


def _random_states(device: torch.device) -> tuple[str, str]:
    """Of the generators of host and device."""
    return switched_off.random_state(torch.device("cpu")), switched_off.random_state(device)


def _as_float64(node: Any) -> Any:
    """A model's inputs with every tensor of floating-point numbers made float64."""
    held = tree.children(node)
    if held is not None:
        return tree.rebuild(node, [_as_float64(child) for child in held])
    return node.double() if isinstance(node, Tensor) and node.is_floating_point() else node
