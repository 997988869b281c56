"""Does an optimizer treat every element by itself? Then any cut of its tensors gives the same update.

Asked of the optimizer itself: a copy of it takes a few steps on a small matrix, and another on the same matrix cut
into pieces. No list of names could know a user's own classes.
"""

import copy
import enum
import inspect
import warnings
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError

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
        hyper["lr"] = max(hyper["lr"], LEAST_RATE) if not isinstance(hyper["lr"], Tensor) else _raised(hyper["lr"])
    return hyper


def _raised(rate: Tensor) -> Tensor:
    return rate.detach().clone().clamp_(min=LEAST_RATE)


def may_be_cut(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the tensors of `optimizer` may be cut anywhere; False where that cannot be found out."""
    try:
        return grain_of(optimizer, device) is Grain.ELEMENT
    except UsageError:
        return False


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
