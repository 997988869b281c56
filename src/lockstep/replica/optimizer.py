"""The user's optimizer: how finely its tensors may be cut, how it is pointed at a worker's part, and one that is idle.

`grain_of` asks the optimizer itself whether it treats every element by itself, so that any cut of its tensors gives the
same update: a copy of it takes a few steps on a small matrix, and another on the same matrix cut into pieces. No list
of names could know a user's own classes.

`SplitOptimizer` re-points it in place at the parts that this worker owns. Its groups, hyper-parameters, hooks and
schedulers stay as they are; only the tensors in its groups change, from whole parameters to this worker's fragments of
them. A group of which this worker owns nothing stays as an empty group.

`IdleOptimizers` warns where an optimizer steps and none of its parameters has a gradient, so that it trains nothing.
"""

import copy
import enum
import functools
import inspect
import warnings
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from lockstep.errors import UsageError
from lockstep.replica.layout import Fragment, in_memory_order
from lockstep.replica.local_params import local_part, whole_param
from lockstep.replica.params import BucketPart
from lockstep.torch_private import has_backward_steps, take_over_backward_steps

SHAPE = (12, 16)
CUTS = (70, 74)
"""Within rows, so that neither rows nor columns stay whole."""
STEPS = 3
LEAST_RATE = 0.01
"""Learning rates are raised to this: in a warm-up nothing would move."""
TOLERANCE = 1e-3
"""Of the way that the weights go: kernels round differently at the ends of tensors; an optimizer that looks at norms or
rows differs by far more."""
ROUNDING = 1e-5
"""A way no longer than this says nothing."""


class BackwardSteps:
    """Optimizers of single parameters that are to step within the backward pass: here, when it has averaged."""

    def __init__(self, params: Sequence[Tensor], *, are_split: bool) -> None:
        """are_split: whether gradients are split over the workers, so that such an optimizer would see none."""
        self._params, self._are_split = params, are_split
        self._of_param: dict[int, Sequence[torch.optim.Optimizer]] = {}
        self._has_looked = False

    def find(self) -> None:
        """Called when a backward pass begins, before any gradient is there: they may be attached at any time."""
        if self._has_looked and not has_backward_steps():
            return  # As nearly always.
        for index, param in enumerate(self._params):
            if optimizers := take_over_backward_steps(whole_param(param)):
                self._of_param[index] = optimizers
        self._has_looked = not (self._of_param and self._are_split)
        if not self._has_looked:
            raise UsageError(
                f"a {type(next(iter(self._of_param.values()))[0]).__name__} was attached to a parameter by torch's "
                "_apply_optimizer_in_backward, and gradients are split over the workers here (zero=1 to 3), so it "
                "would train nothing. Give DataParallel one optimizer of all parameters, or use zero=0."
            )

    def step(self) -> None:
        """Gradients are averages now: update by them, and drop them."""
        for index, optimizers in self._of_param.items():
            param = self._params[index]
            if param.grad is not None:
                for optimizer in optimizers:
                    optimizer.step()
                param.grad = None


class Grain(enum.Enum):
    """The smallest thing that an optimizer may be given."""

    ELEMENT = enum.auto()
    TENSOR = enum.auto()


def grain_of(optimizer: torch.optim.Optimizer, device: torch.device) -> Grain:
    """How finely the tensors of `optimizer` may be cut; raises UsageError if it cannot be split at all.

    It is tried on `device`, where its parameters are or will be.
    """
    groups = {repr(_hyper(group)): group for group in optimizer.param_groups}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # One that draws is not to draw from those.
        grains = {_grain_in(optimizer, group, device) for group in groups.values()}
    return Grain.TENSOR if Grain.TENSOR in grains else Grain.ELEMENT


def _grain_in(optimizer: torch.optim.Optimizer, group: dict[str, Any], device: torch.device) -> Grain:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SHAPE, generator=generator).to(device)
    grads = [torch.randn(SHAPE, generator=generator).to(device) for _ in range(STEPS)]
    try:
        whole = torch.cat(_train(optimizer, group, [start.clone()], [[grad] for grad in grads]))
    except Exception as error:
        raise UsageError(
            f"{type(optimizer).__name__} cannot be split over the workers: a trial step on one matrix failed "
            f"({type(error).__name__}: {error}). Use zero=0 with this optimizer."
        ) from error
    try:
        cut = torch.cat(_train(optimizer, group, _pieces(start), [_pieces(grad) for grad in grads]))
    except Exception:  # It refuses vectors, so it wants whole tensors.
        return Grain.TENSOR
    way = (whole - start.flatten()).abs().max().item()
    is_close = (cut - whole).abs().max().item() <= TOLERANCE * way
    return Grain.ELEMENT if is_close and way > ROUNDING else Grain.TENSOR


def _hyper(group: dict[str, Any]) -> dict[str, Any]:
    """All but the parameters, with a rate at which something moves."""
    hyper = {name: value for name, value in group.items() if name != "params"}
    if "lr" in hyper:
        rate = hyper["lr"]
        is_tensor = isinstance(rate, Tensor)
        hyper["lr"] = rate.detach().clone().clamp_(min=LEAST_RATE) if is_tensor else max(rate, LEAST_RATE)
    return hyper


def _pieces(tensor: Tensor) -> list[Tensor]:
    return [piece.clone() for piece in tensor.flatten().tensor_split(CUTS)]


def _train(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], starts: list[Tensor], grads: list[list[Tensor]]
) -> list[Tensor]:
    """What a copy of `optimizer` makes of `starts` as it does in `group`; the optimizer itself is left alone."""
    params = [nn.Parameter(start) for start in starts]
    trial = _copy(optimizer, _hyper(group), params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad
            trial.step()
    return [param.detach().flatten() for param in params]


def _copy(optimizer: torch.optim.Optimizer, hyper: dict[str, Any], params: list[nn.Parameter]) -> Any:
    """An optimizer like this one for other parameters."""
    if optimizer.state:
        # Some, as Adagrad, make their state when they are constructed, so they have to be.
        accepted = inspect.signature(type(optimizer).__init__).parameters
        try:
            return type(optimizer)(params, **{name: value for name, value in hyper.items() if name in accepted})
        except (TypeError, ValueError):
            pass
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__.update({name: _of_its_own(value) for name, value in optimizer.__dict__.items()})
    trial.__dict__.pop("step", None)  # A scheduler counts the steps of the original there.
    trial.state = defaultdict(dict)
    trial.param_groups = [{**hyper, "params": params}]
    for name, value in optimizer.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, OrderedDict):
            setattr(trial, name, OrderedDict())
    return trial


def _of_its_own(value: Any) -> Any:
    """What an optimizer keeps beside its state, so that steps of the copy do not count for the original."""
    if type(value) is Tensor:
        return value.clone()
    return copy.copy(value) if isinstance(value, dict | list | set | deque) else value


class SplitOptimizer:
    """Keeps an optimizer pointed at fragments."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        # Weak, since the optimizer holds this by its hooks: together they would wait for the garbage collector.
        self._reference = weakref.ref(optimizer)
        self._owned: dict[Tensor, list[tuple[Fragment, nn.Parameter]]] = {}
        """By parameter, as the optimizer was given it."""
        self.whole_groups: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        """What the optimizer's groups would hold were nothing split."""
        self._step_hooks: list[RemovableHandle] = []

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The user's own, who holds it."""
        optimizer = self._reference()
        assert optimizer is not None, "asked for by the optimizer itself, or while a model is wrapped with it"
        return optimizer

    def point_at(self, params: Sequence[Tensor], parts: Sequence[BucketPart]) -> None:
        """Replace `params` in the optimizer's groups by the fragments that `parts` have of them."""
        self._owned = {whole_param(param): [] for param in params}
        for part in parts:
            for fragment, own in zip(part.fragments, part.params, strict=True):
                own.requires_grad_(True)
                self._owned[whole_param(params[fragment.index])].append((fragment, own))
        for group in self.optimizer.param_groups:
            group["params"] = self._fragments_of(group["params"])
        self._cut_state()
        add = type(self.optimizer).add_param_group
        self.optimizer.add_param_group = functools.partial(self._add_param_group, add)  # type: ignore[method-assign]

    def around_step(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Have `before` and `after` called around every step of the optimizer."""
        self._step_hooks.append(self.optimizer.register_step_pre_hook(lambda *_: before()))
        self._step_hooks.append(self.optimizer.register_step_post_hook(lambda *_: after()))

    def point_back(self) -> None:
        """Give the optimizer the whole parameters again, and no state: what follows sets it, or splits it anew."""
        optimizer = self.optimizer
        for hook in self._step_hooks:
            hook.remove()
        vars(optimizer).pop("add_param_group", None)
        for group, params in zip(optimizer.param_groups, self.whole_groups, strict=True):
            group["params"] = params
        optimizer.state.clear()

    def _add_param_group(self, add: Callable[..., None], group: dict[str, Any]) -> None:
        """As the optimizer's own, with whole parameters of the model or of no model."""
        given = group["params"]
        params = [given] if isinstance(given, Tensor) else list(given)
        fragments = self._fragments_of(params)
        if fragments:
            add(self.optimizer, {**group, "params": fragments})
        else:  # torch refuses an empty group, and groups must have the same numbers on all workers.
            stand_in = nn.Parameter(torch.zeros(0))
            add(self.optimizer, {**group, "params": [stand_in]})
            self.optimizer.param_groups[-1]["params"] = []
        self.whole_groups.append(params)

    def _fragments_of(self, params: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for param in params:
            if param not in self._owned:
                raise UsageError(
                    f"{no_parameter(param)}, so it cannot be split over the workers. Give DataParallel the model that "
                    "holds it, or use zero=0."
                )
            found.extend(own for _, own in self._owned[param])
        return found

    def _cut_state(self) -> None:
        """Give fragments their elements of the state that the optimizer has already."""
        state: Any = self.optimizer.state
        for param in [key for key in state if key in self._owned]:
            values = state.pop(param)
            for fragment, own in self._owned[param]:
                state[own] = {name: _cut(value, param, fragment, own) for name, value in values.items()}


def is_split(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has been pointed at fragments."""
    return "add_param_group" in vars(optimizer)


def no_parameter(param: Tensor) -> str:
    """Words for a tensor that an optimizer has, and the model has not."""
    return f"the optimizer has a tensor of shape {list(param.shape)} that is no parameter of this model"


def _cut(value: Any, param: Tensor, fragment: Fragment, own: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    value, param = local_part(value), local_part(param)
    if value.shape != param.shape or value.dim() == 0:
        return value.clone()
    piece = in_memory_order(value, fragment.strides)[fragment.offset : fragment.offset + fragment.span.numel]
    return piece.as_strided(own.shape, own.stride(), piece.storage_offset()).clone()


NUM_LOOKS = 64
"""Steps that are looked at, of whichever optimizers."""
NUM_IDLE = 2
"""So many idle steps of one optimizer are no accident: some scripts make one before they train."""


class IdleOptimizers:
    """Looks at the first steps of all optimizers of this process, and holds none of them.

    One that was made from another copy of the model, or before the model was moved, would run to the end without a
    word. torch calls a hook after every step of every optimizer. It cannot take itself out while torch walks through
    its hooks, so it then does nothing until the world is left.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._num_left = NUM_LOOKS
        self._num_idle: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._hook = register_optimizer_step_post_hook(self._see)

    def release(self) -> None:
        """Look no more."""
        self._hook.remove()

    def _see(self, optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        if not self._num_left:
            return
        self._num_left -= 1
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not params or is_split(optimizer):  # Of what is split a worker may own no more than was not used.
            return
        if any(param.grad is not None for param in params):
            self._num_idle[optimizer] = -NUM_LOOKS
            return
        self._num_idle[optimizer] = self._num_idle.get(optimizer, 0) + 1
        if self._num_idle[optimizer] == NUM_IDLE:
            warnings.warn(
                f"worker {self._rank}: {type(optimizer).__name__} has made {NUM_IDLE} steps, and none of its "
                f"{len(params)} parameters (the first of shape {list(params[0].shape)}) had a gradient: it trains "
                "nothing. Make it from the parameters of the very model that computes the loss, after net.to(...): "
                f"torch.optim.{type(optimizer).__name__}(net.parameters(), ...).",
                stacklevel=2,
            )
