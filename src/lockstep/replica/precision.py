"""Mixed precision with master weights: compute in one dtype, reduce in another, update in a third."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.data import tree
from lockstep.errors import UsageError


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a training step; only of what is floating-point."""

    params: torch.dtype = torch.bfloat16
    """Of the parameters that the model computes with; inputs are cast to it."""
    grads: torch.dtype = torch.float32
    """In which gradients are summed over the workers."""
    master: torch.dtype = torch.float32
    """Of the weights that the optimizer updates, and of its state; parameters are rounded from them after each step."""

    def __post_init__(self) -> None:
        for name in ("params", "grads", "master"):
            dtype = getattr(self, name)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise UsageError(f"Precision({name}={dtype!r}): a floating-point torch.dtype is needed.")


def cast(value: object, dtype: torch.dtype) -> object:
    """`value` with every floating-point tensor in it in `dtype`."""
    held = tree.children(value)
    if held is not None:
        return tree.rebuild(value, [cast(child, dtype) for child in held])
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Masters:
    """Master weights of a lone worker: the optimizer is re-pointed at them, in place."""

    def __init__(self, params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, precision: Precision) -> None:
        floating = [param for param in params if param.is_floating_point()]
        self._pairs = [(param, nn.Parameter(param.detach().to(precision.master, copy=True))) for param in floating]
        master_of = dict(self._pairs)
        for group in optimizer.param_groups:
            group["params"] = [master_of.get(param, param) for param in group["params"]]
        for param in floating:
            if param in optimizer.state:
                optimizer.state[master_of[param]] = optimizer.state.pop(param)
            param.data = param.data.to(precision.params)
        optimizer.register_step_pre_hook(lambda *_: self._bring_grads())
        optimizer.register_step_post_hook(lambda *_: self.publish())

    def holdings(self) -> list[tuple[nn.Parameter, nn.Parameter, int]]:
        """Parameter, master, and number of its first element: as if they were parts."""
        return [(param, master, 0) for param, master in self._pairs]

    def publish(self) -> None:
        """Round the parameters from their masters."""
        with torch.no_grad():
            for param, master in self._pairs:
                param.copy_(master)

    def take_back(self) -> None:
        """Parameters were changed by hand: change their masters where they were."""
        with torch.no_grad():
            for param, master in self._pairs:
                is_changed = param != master.to(param.dtype)
                master.copy_(torch.where(is_changed, param.to(master.dtype), master))

    def _bring_grads(self) -> None:
        for param, master in self._pairs:
            if param.grad is not None:
                master.grad = param.grad.to(master.dtype, copy=True)
                param.grad = None
