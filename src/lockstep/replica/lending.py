"""Linear layers compute the gradient of a large weight where it is to travel from: in its slot, which is lent to them.

Else autograd computes it in memory of its own, and every byte is copied. The layer's `forward` is replaced, on the
module itself, by one that gives the same bits, and whose backward asks the reducer for the slot:

    lend      the slot is free, and this pass is the one that sends: the product is computed there, and scaled by what
              gradients are to be multiplied by before they are added, in the same call
    taken     torch makes it `param.grad` as it is: nothing is left to do when it arrives
    quiet     it was taken before, and all is sent at the end of the pass: autograd is given nothing, and no hook need
              tell that it has arrived (see silent.py). If there is a rest, it is found and added at the end
    mixed     what arrives is something else, since the weight was used otherwise too: a sum of what was computed in
              the slot, scaled, and of the rest, which is not. It is put right at the end of the pass, when all of it
              has come (see `Bucket.fill_missing`), and that slot is not lent again

So what is lent need not be certain to come back alone. It is not lent where others could see it, and wonder: to
`torch.autograd.grad`, under `create_graph`, with hooks on the parameter. Each worker decides for itself, since what is
in the slot in the end is the same. The scale must be a power of two, so that scaling first or last gives the same bits.
An embedding with the same weight leaves its part with the lender: see tied.py.

On CPUs only: on a GPU a copy costs next to nothing. Calls that are anything but a plain product (autocast, functional
transforms, tracing, other dtypes) go to torch's own forward. What cannot be seen from here are hooks on nodes of the
graph: they are shown a gradient that is scaled, or none; one on the node that accumulates it must not change it. And
`torch.jit.script` cannot read the forward that stands in: it is to be given a copy of the module.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from lockstep.replica.standing_in import CAN_ASK, Lender, Loan, StandIn
from lockstep.replica.tied import Lookup, is_table

LEAST_BYTES = 512 << 10
"""Smaller weights are copied: a call of `_Product` takes 20 us more than torch's own, as a copy of 256 KB does."""
_FORWARD = nn.Linear.forward

_STRIDED = torch.strided
_is_grad_enabled, _is_autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled
_are_transforms_active, _tracing_state = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state


def lend_to_layers(module: nn.Module, params: Sequence[Tensor], lender: Lender) -> None:
    """Let the linear layers of `module` use the slots of `lender`, as long as it lives."""
    if not CAN_ASK:
        return
    numbers = {id(param): index for index, param in enumerate(params)}
    users: dict[int, list[nn.Module]] = {}
    for layer in module.modules():
        for param in layer._parameters.values():
            users.setdefault(id(param), []).append(layer)
    for layer in module.modules():
        if type(layer) is nn.Linear:
            weight = layer._parameters.get("weight")  # None where it is computed from others.
            index = numbers.get(id(weight))
            tables = [user for user in users.get(id(weight), ()) if is_table(user)]
            if index is not None and len(users[id(weight)]) == 1 + len(tables) and _is_worth_it(weight):
                Forward(layer, index, lender).take_place()
                for table in tables:
                    Lookup(table, index, lender).take_place()


def _is_worth_it(weight: Any) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.float64)
        and weight.is_contiguous()
        and weight.numel() * weight.itemsize >= LEAST_BYTES
    )


class Forward(StandIn):
    """Stands in for the forward of one linear layer."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """What torch's own forward returns."""
        layer: Any = self._layer()
        if torch.compiler.is_compiling() or kwargs or len(args) != 1 or not self._is_plain(layer, args[0]):
            return _FORWARD(layer, *args, **kwargs)
        output: Tensor = _Product.apply(args[0], self._weight, layer._parameters["bias"], self)
        return output

    def _is_plain(self, layer: nn.Linear, features: Any) -> bool:
        # By the shortest ways: between two products little of what Python needs is left in the caches.
        params = layer._parameters
        return (
            type(features) is Tensor
            and features.dtype is self._dtype
            and params.get("weight") is self._weight
            and "bias" in params
            and features.is_cpu
            and features.layout is _STRIDED
            and features.dim() >= 2
            and features.is_contiguous()
            and _is_grad_enabled()
            and not _is_autocast_enabled("cpu")
            and not _are_transforms_active()
            and not _tracing_state()
            and forward_ad._current_level < 0
            and type(layer) is nn.Linear
            and nn.Linear.forward is _FORWARD
            and self._lender() is not None
        )

    def borrow(self, accumulate: Any, operands: Sequence[Tensor]) -> Loan | None:
        """The weight's slot, and how to use it, for the backward pass that runs; `accumulate` is the next node."""
        lender = self.lender_of(accumulate)
        return None if lender is None else lender.lend(self._index, self._weight, operands)


class _Product(torch.autograd.Function):
    """`functional.linear` of what is contiguous, by the same products."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, forward: Forward) -> Tensor:
        ctx.save_for_backward(features, weight)
        ctx.borrow = forward.borrow
        return functional.linear(features, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        features, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        of_features, of_weight, of_bias, _ = ctx.needs_input_grad
        return (
            grad.mm(weight).view(features.shape) if of_features else None,
            _weight_grad(grad, features.reshape(-1, features.shape[-1]), ctx) if of_weight else None,
            grad.sum(0) if of_bias else None,
            None,
        )


def _weight_grad(grad: Tensor, features: Tensor, ctx: Any) -> Tensor | None:
    lent = ctx.borrow(ctx.next_functions[1][0], (grad, features))
    if lent is None:
        return grad.t().mm(features)
    slot, scale, is_all = lent
    torch.addmm(slot, grad.t(), features, beta=0, alpha=scale, out=slot)
    return None if is_all else slot


def is_power_of_two(scale: object) -> TypeGuard[float]:
    """Whether it makes no difference to any bit when gradients are multiplied by this."""
    return isinstance(scale, float) and math.frexp(scale)[0] == 0.5
