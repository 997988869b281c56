"""The outer optimizer of DiLoCo: it takes the mean change of a round, its sign reversed, for a gradient.

Every worker has one and steps it alike, from the same sums: so all come to the same bits, and none needs to be told.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError

MakeOuter = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""From the common weights to their optimizer."""


def nesterov(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """What Douillard et al. (2023) found best."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


class Outer:
    """Advances the common weights."""

    def __init__(self, make: MakeOuter, common: list[nn.Parameter], names: Sequence[str]) -> None:
        self.optimizer = make(common)
        self._named = dict(zip(names, common, strict=True))
        if not isinstance(self.optimizer, torch.optim.Optimizer):
            raise UsageError(
                f"DiLoCo(outer=...) is a function from a list of parameters to a torch optimizer; it returned a "
                f"{type(self.optimizer).__name__}. Use outer=lambda params: torch.optim.SGD(params, lr=0.7)."
            )

    @torch.no_grad()
    def __call__(self, common: Sequence[nn.Parameter], mean: Sequence[Tensor]) -> None:
        """Make an outer step; `mean` is overwritten."""
        torch._foreach_neg_(list(mean))
        for param, grad in zip(common, mean, strict=True):
            param.grad = grad
        self.optimizer.step()
        for param in common:
            param.grad = None

    def tensors(self) -> dict[str, Tensor]:
        """The optimizer's tensors, by names of parameters."""
        return {
            f"outer/{name}/{key}": value
            for name, param in self._named.items()
            for key, value in self.optimizer.state.get(param, {}).items()
            if isinstance(value, Tensor)
        }

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `tensors` gave; what is not there begins anew."""
        self.optimizer.state.clear()
        for group in self.optimizer.param_groups:
            steps_on_device = bool(group.get("capturable") or group.get("fused"))
            for name, param in self._named.items():
                if any(param is each for each in group["params"]):
                    self._load(name, param, tensors, steps_on_device)

    def _load(self, name: str, param: nn.Parameter, tensors: Mapping[str, Tensor], steps_on_device: bool) -> None:
        prefix = f"outer/{name}/"
        for full_name, value in tensors.items():
            if full_name.startswith(prefix):
                key = full_name.removeprefix(prefix)
                if param.is_complex() and value.shape == (*param.shape, 2):
                    value = torch.view_as_complex(value)
                is_on_device = key != "step" or steps_on_device
                self.optimizer.state[param][key] = value.to(param.device) if is_on_device else value

    def state_dict(self) -> dict[str, Any]:
        """What the optimizer is, and what it keeps besides tensors."""
        found: dict[str, dict[str, Any]] = {}
        for name, param in self._named.items():
            state = self.optimizer.state.get(param, {})
            if plain := {key: value for key, value in state.items() if isinstance(value, bool | int | float | str)}:
                found[name] = plain
        return {"kind": type(self.optimizer).__name__, "scalars": found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, after `load_tensors`; an optimizer of another kind begins anew."""
        if state.get("kind") != type(self.optimizer).__name__:
            self.optimizer.state.clear()
            return
        for name, plain in state["scalars"].items():
            if name in self._named:
                self.optimizer.state[self._named[name]].update(plain)
