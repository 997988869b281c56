"""The user's own optimizer, re-pointed in place at the parts that this worker owns.

Its groups, hyper-parameters, hooks and schedulers stay as they are; only the tensors in its groups change, from whole
parameters to this worker's fragments of them. A group of which this worker owns nothing stays as an empty group.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.replica.part import Part
from lockstep.replica.split import Fragment


class SplitOptimizer:
    """Keeps an optimizer pointed at fragments."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._owned: dict[Tensor, list[tuple[Fragment, nn.Parameter]]] = {}

    def point_at(self, params: Sequence[Tensor], parts: Sequence[Part]) -> None:
        """Replace `params` in the optimizer's groups by the fragments that `parts` have of them."""
        self._owned = {param: [] for param in params}
        for part in parts:
            for fragment, own in zip(part.fragments, part.params, strict=True):
                own.requires_grad_(True)
                self._owned[params[fragment.index]].append((fragment, own))
        for group in self.optimizer.param_groups:
            group["params"] = self._fragments_of(group["params"])
        self._cut_state()
        self.optimizer.add_param_group = functools.partial(  # type: ignore[method-assign]
            _add_param_group, type(self.optimizer).add_param_group, self
        )

    def around_step(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Have `before` and `after` called around every step of the optimizer."""
        self.optimizer.register_step_pre_hook(lambda *_: before())
        self.optimizer.register_step_post_hook(lambda *_: after())

    def add_param_group(self, add: Callable[..., None], group: dict[str, Any]) -> None:
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

    def _fragments_of(self, params: Sequence[Tensor]) -> list[Tensor]:
        found: list[Tensor] = []
        for param in params:
            if param not in self._owned:
                raise UsageError(
                    f"the optimizer has a tensor of shape {list(param.shape)} that is no parameter of this model, so "
                    "it cannot be split over the workers. Give DataParallel the model that holds it, or use zero=0."
                )
            found.extend(own for _, own in self._owned[param])
        return found

    def _cut_state(self) -> None:
        """Give fragments their elements of the state that the optimizer has already."""
        state: Any = self.optimizer.state
        for param in [key for key in state if key in self._owned]:
            values = state.pop(param)
            for fragment, own in self._owned[param]:
                state[own] = {name: _cut(value, param, fragment, own.shape) for name, value in values.items()}


def _add_param_group(add: Callable[..., None], split: SplitOptimizer, group: dict[str, Any]) -> None:
    split.add_param_group(add, group)


def _cut(value: Any, param: Tensor, fragment: Fragment, shape: torch.Size) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape != param.shape or value.dim() == 0:
        return value.clone()
    flat = torch.view_as_real(value).flatten() if value.is_complex() else value.flatten()
    return flat[fragment.offset : fragment.offset + fragment.span.numel].view(shape).clone()
