"""Does an optimizer treat every element by itself? Then any cut of its tensors gives the same update.

Asked of the optimizer itself: a copy of it takes a few steps on a small matrix, and another on the same matrix cut
into pieces. No list of names could know a user's own classes.
"""

import enum
import inspect
import warnings
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError

SHAPE = (12, 16)
CUTS = (70, 74)
"""Within rows, so that neither rows nor columns stay whole."""
STEPS = 3
TOLERANCE = 1e-5
"""Kernels round differently at the ends of tensors; an optimizer that looks at norms or rows differs by far more."""


class Grain(enum.Enum):
    """The smallest thing that an optimizer may be given."""

    ELEMENT = enum.auto()
    TENSOR = enum.auto()


def grain_of(optimizer: torch.optim.Optimizer, device: torch.device) -> Grain:
    """How finely the tensors of `optimizer` may be cut; raises UsageError if it cannot be split at all.

    It is tried on `device`, where its parameters are or will be.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(SHAPE, generator=generator).to(device)
    grads = [torch.randn(SHAPE, generator=generator).to(device) for _ in range(STEPS)]
    try:
        whole = _train(optimizer, [start.clone()], [[grad] for grad in grads])
    except Exception as error:
        raise UsageError(
            f"{type(optimizer).__name__} cannot be split over the workers: a trial step on one matrix failed "
            f"({type(error).__name__}: {error}). Use zero=0 with this optimizer."
        ) from error
    try:
        cut = _train(optimizer, _pieces(start), [_pieces(grad) for grad in grads])
    except Exception:  # It refuses vectors, so it wants whole tensors.
        return Grain.TENSOR
    close = torch.allclose(torch.cat(cut), torch.cat(whole), rtol=TOLERANCE, atol=TOLERANCE)
    return Grain.ELEMENT if close else Grain.TENSOR


def may_be_cut(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether the tensors of `optimizer` may be cut anywhere; False where that cannot be found out."""
    try:
        return grain_of(optimizer, device) is Grain.ELEMENT
    except UsageError:
        return False


def _pieces(tensor: Tensor) -> list[Tensor]:
    return [piece.clone() for piece in tensor.flatten().tensor_split(CUTS)]


def _train(optimizer: torch.optim.Optimizer, starts: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
    """What a copy of `optimizer` makes of `starts`; the optimizer itself is left alone."""
    params = [nn.Parameter(start) for start in starts]
    trial = _copy(optimizer, params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in grads:
            for param, grad in zip(params, step, strict=True):
                param.grad = grad
            trial.step()
    return [param.detach().flatten() for param in params]


def _copy(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> Any:
    """An optimizer like this one for other parameters."""
    hyper = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    if optimizer.state:
        # Some, as Adagrad, make their state when they are constructed, so they have to be.
        accepted = inspect.signature(type(optimizer).__init__).parameters
        try:
            return type(optimizer)(params, **{name: value for name, value in hyper.items() if name in accepted})
        except (TypeError, ValueError):
            pass
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    trial.__dict__.pop("step", None)  # A scheduler counts the steps of the original there.
    trial.state = defaultdict(dict)
    trial.param_groups = [{**hyper, "params": params}]
    for name, value in optimizer.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, OrderedDict):
            setattr(trial, name, OrderedDict())
    return trial
