"""Forwards that stand in for a layer's own, on the module itself, as long as somebody lends slots: see lending.py."""

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.replica.arrivals import is_only_ours

_is_grad_enabled = torch.is_grad_enabled
_will_run: Any = getattr(torch._C, "_will_engine_execute_node", None)

CAN_ASK = _will_run is not None
"""Whether torch says what a backward pass is going to do."""


Loan = tuple[Tensor, float, bool]
"""A slot, what its gradient is to be multiplied by, and whether that is all: autograd is to be given nothing."""


class Lender(Protocol):
    """Who has slots."""

    def lend(self, index: int, param: Tensor, operands: Sequence[Tensor]) -> Loan | None:
        """The slot of parameter `index`; None if it cannot be had now.

        It is no part of the operands that the gradient is computed from.
        """

    def awaits_rows(self, index: int) -> bool:
        """Whether the slot of parameter `index` was lent in this pass, and its gradient has not arrived yet."""

    def add_rows(self, index: int, rows: Tensor, values: Tensor) -> None:
        """Add `values` to these rows of the gradient that is awaited, when it has arrived. No row comes twice."""


class StandIn:
    """Stands in for the forward of one layer. A copy of the module, or one that was saved, has torch's own."""

    def __init__(self, layer: nn.Module, index: int, lender: Lender) -> None:
        weight: Any = layer.weight
        self._layer = weakref.ref(layer)
        self._weight, self._dtype = weight, weight.dtype
        self._index = index
        self._lender = weakref.ref(lender)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """What torch's own forward returns."""
        raise NotImplementedError

    def lender_of(self, accumulate: Any) -> Lender | None:
        """Whom to ask in the backward pass that runs, if nobody else sees what `accumulate`, its next node, is given.

        None as well where the pass adds nothing to the weight's gradient.
        """
        lender = self._lender()
        if lender is None or _is_grad_enabled() or not is_only_ours(self._weight):
            return None
        if getattr(accumulate, "variable", None) is not self._weight or not _is_accumulated(accumulate):
            return None
        return lender

    def take_place(self) -> None:
        """Be the layer's forward until the lender is gone, unless somebody else is."""
        layer, lender = self._layer(), self._lender()
        assert layer is not None and lender is not None, "both have just been given"
        if not isinstance(vars(layer).get("forward"), StandIn | None):
            return
        layer.forward = self
        reference = self._layer

        def give_back() -> None:
            alive = reference()
            if alive is not None and vars(alive).get("forward") is self:
                del alive.forward

        weakref.finalize(lender, give_back).atexit = False

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._layer(), "forward")


def _is_accumulated(accumulate: Any) -> bool:
    """Whether the backward pass that runs adds to `param.grad`."""
    try:
        return bool(_will_run(accumulate))
    except RuntimeError:  # So torch says that this is `torch.autograd.grad`.
        return False
