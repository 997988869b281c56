"""Embeddings whose table is a linear layer's weight too: only the rows that were looked up are added to its gradient.

torch makes a gradient of the whole table for the lookup, nearly all of it zero, and adds it to the layer's. Where the
layer has computed its own in the weight's slot (see lending.py), that would also be a sum elsewhere, to be copied. So
the rows are added up among themselves, in torch's order, and kept until the gradient has arrived:

    awaited   the slot was lent in this pass, and the gradient has not arrived: rows are left with the lender, and
              autograd is given nothing for the table
    else      autograd is given what torch computes

Then, if what arrives is what was computed in the slot, rows are added there, scaled as it is; each of them once, so
the bits are those of the whole sum. If it is something else, since the weight was used in a third way, they are added
to that, unscaled, as autograd would have. A lookup whose backward comes before the layer's finds nothing awaited.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from lockstep.replica.standing_in import StandIn

_FORWARD = nn.Embedding.forward


def is_table(layer: nn.Module) -> TypeGuard[nn.Embedding]:
    """Whether it does nothing but look rows up, and its gradient is their sum."""
    return type(layer) is nn.Embedding and _is_bare(layer)


def _is_bare(layer: nn.Embedding) -> bool:
    return layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse


class Lookup(StandIn):
    """Stands in for the forward of one embedding."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """What torch's own forward returns."""
        layer: Any = self._layer()
        if torch.compiler.is_compiling() or kwargs or len(args) != 1 or not self._is_plain(layer, args[0]):
            return _FORWARD(layer, *args, **kwargs)
        output: Tensor = _Rows.apply(args[0], self._weight, layer.padding_idx, self)
        return output

    def _is_plain(self, layer: nn.Embedding, indices: Any) -> bool:
        return (
            type(indices) is Tensor
            and not indices.is_floating_point()
            and indices.is_cpu
            and layer._parameters.get("weight") is self._weight
            and torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and not torch._C._are_functorch_transforms_active()
            and not torch._C._get_tracing_state()
            and forward_ad._current_level < 0
            and type(layer) is nn.Embedding
            and _is_bare(layer)
            and nn.Embedding.forward is _FORWARD
            and self._lender() is not None
        )

    def leave(self, accumulate: Any, grad: Tensor, indices: Tensor, padding: int) -> bool:
        """Leave what this lookup adds to the gradient with the lender; returns False if that is not possible now."""
        lender = self.lender_of(accumulate)
        if lender is None or not lender.awaits_rows(self._index):
            return False
        rows, places = torch.unique(indices, return_inverse=True)
        left_out = (rows == padding).nonzero() if padding >= 0 else rows[:0]
        place = int(left_out[0]) if len(left_out) else -1
        lender.add_rows(self._index, rows, _sum(grad, places, len(rows), place))
        return True


class _Rows(torch.autograd.Function):
    """`functional.embedding` of a table of which nothing else is asked."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, weight: Tensor, padding: int | None, lookup: Lookup) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.num_rows, ctx.leave = len(weight), lookup.leave
        ctx.padding = -1 if padding is None else padding % len(weight)
        return functional.embedding(indices, weight, padding)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[1]
        if not needs_grad or ctx.leave(ctx.next_functions[1][0], grads[0], indices, ctx.padding):
            return None, None, None, None
        return None, _sum(grads[0], indices, ctx.num_rows, ctx.padding), None, None


def _sum(grad: Tensor, places: Tensor, num_rows: int, padding: int) -> Tensor:
    """What torch's own backward returns."""
    return torch.ops.aten.embedding_dense_backward(grad, places, num_rows, padding, False)  # type: ignore[no-any-return]
