"""A worker's part of one bucket: the span that it owns, of parameters and of gradients.

The optimizer is given the part's fragments: one parameter for each tensor that has elements in the span, over the
memory of the span itself. So what the optimizer writes is in its place, and what the reduction leaves in the span is
the fragments' gradients. A fragment of a parameter that nobody used has no gradient, as the parameter itself would
have none.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.replica.layout import BucketPlan
from lockstep.replica.split import Fragment, Span, fragments


class Part:
    """The owned span of one bucket."""

    def __init__(
        self,
        plan: BucketPlan,
        spans: Sequence[Span],
        rank: int,
        own_params: Tensor,
        shapes: Mapping[int, Sequence[int]] | None = None,
        computed: Tensor | None = None,
    ) -> None:
        self.plan = plan
        self.spans = spans
        self.span = spans[rank]
        self.own_params = own_params
        """The owned parameters, flat, as the optimizer updates them."""
        self._computed = computed
        """The same as the model computes with them, where these are masters of another dtype."""
        self._own_grads: Tensor | None = None
        self._shapes = shapes
        """Of the parameters, where the spans hold whole ones and the optimizer is to see them as they are."""
        self.fragments: list[Fragment] = fragments(plan, self.span)
        self.params = [nn.Parameter(self._piece(own_params, each)) for each in self.fragments]
        """What the optimizer works on, one for each fragment."""
        self.grads: list[Tensor] = []
        """What the fragments' gradients are after a pass, where they need not be rounded."""
        self._held: Tensor | None = None

    @property
    def own_grads(self) -> Tensor | None:
        """Where the reduction leaves the owned gradients; set with the buckets."""
        return self._own_grads

    @own_grads.setter
    def own_grads(self, grads: Tensor) -> None:
        self._own_grads = grads
        self.grads = [self._piece(grads, each) for each in self.fragments]
        self._addresses = [piece.data_ptr() for piece in self.grads]

    def _piece(self, own: Tensor, fragment: Fragment) -> Tensor:
        piece = own[fragment.span.begin - self.span.begin : fragment.span.end - self.span.begin]
        return piece if self._shapes is None else piece.view(*self._shapes[fragment.index])

    def hold(self) -> None:
        """A pass begins: keep the gradients of earlier ones, which the reduction is about to overwrite."""
        self._held = None
        if any(param.grad is not None for param in self.params):
            self._held = torch.zeros_like(self.own_params)
            for fragment, param in zip(self.fragments, self.params, strict=True):
                if param.grad is not None:
                    self._piece(self._held, fragment).copy_(param.grad)

    def hand_out(self, used: Sequence[bool]) -> None:
        """The reduction is done: give each fragment its gradient, on top of what it had."""
        assert self.own_grads is not None
        grads = self.own_grads.to(self.own_params.dtype)  # Itself, where that is its dtype.
        if self._held is not None:
            grads.add_(self._held)
        if grads is not self.own_grads:
            pieces = [self._piece(grads, each) for each in self.fragments]
        elif [piece.data_ptr() for piece in self.grads] == self._addresses:
            pieces = self.grads
        else:  # Somebody has set the `data` of one.
            self.own_grads = grads
            pieces = self.grads
        for fragment, param, piece in zip(self.fragments, self.params, pieces, strict=True):
            if used[fragment.index] or param.grad is not None:
                param.grad = piece
        self._held = None

    def take_back(self) -> None:
        """What the model computes with was changed by hand: change the masters there, and keep them elsewhere."""
        if self._computed is not None:
            is_changed = self._computed != self.own_params.to(self._computed.dtype)
            self.own_params.copy_(torch.where(is_changed, self._computed.to(self.own_params.dtype), self.own_params))

    def publish(self) -> None:
        """Round what the model computes with from the masters."""
        if self._computed is not None:
            self._computed.copy_(self.own_params)

    def add(self, index: int, grad: Tensor) -> None:
        """Add what came late for parameter `index`, reduced."""
        flat = torch.view_as_real(grad).flatten() if grad.is_complex() else grad.flatten()
        for fragment, param in zip(self.fragments, self.params, strict=True):
            if fragment.index == index:
                piece = flat[fragment.offset : fragment.offset + fragment.span.numel]
                piece = piece.view_as(param)
                param.grad = piece.clone() if param.grad is None else param.grad.add_(piece)


def cut_out(plan: BucketPlan, params: Sequence[Tensor], span: Span, dtype: torch.dtype) -> Tensor:
    """What `span` holds of `params`, flat, copied into `dtype`."""
    own = torch.zeros(span.numel, dtype=dtype, device=plan.device)
    numbers = {slot.index: number for number, slot in enumerate(plan.slots)}
    for each in fragments(plan, span):
        param = params[numbers[each.index]].detach()
        flat = (torch.view_as_real(param) if param.is_complex() else param).reshape(-1)
        own[each.span.begin - span.begin : each.span.end - span.begin] = flat[
            each.offset : each.offset + each.span.numel
        ]
    return own
