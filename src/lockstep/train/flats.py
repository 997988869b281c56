"""A worker's copy of the parameters, and its gradients, as flat memory that is cut by owner.

One bucket for each dtype, cut into equal spans, one for each worker. The module's parameters are views of it, so on
the CPU what is read from the owners is received straight into them. On a GPU all goes by way of pinned host memory.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.replica import layout
from lockstep.replica.bucket import view_of
from lockstep.replica.layout import BucketPlan, ParamSpec
from lockstep.replica.part import Part
from lockstep.replica.split import equal_spans


def lay_out(params: Sequence[Tensor], size: int) -> list[BucketPlan]:
    """One bucket for each dtype and device, of `size` equal parts."""
    specs = []
    for index, param in enumerate(params):
        numel = param.numel() * (2 if param.is_complex() else 1)
        specs.append(ParamSpec(index, numel, param.dtype.to_real(), param.device))
    plans = layout.plan(specs, tail_numel=0, grain=layout.UNCUT, parts=size)
    return [plan for plan in plans if plan.slots]


class Flats:
    """The flat memory of one worker."""

    def __init__(self, params: Sequence[nn.Parameter], size: int) -> None:
        self._params = params
        self._flats = [_Flat(plan, [params[slot.index] for slot in plan.slots], size) for plan in lay_out(params, size)]
        self.used = bytearray(len(params))
        """By parameter, whether the gradients have one for it."""

    def part(self, rank: int) -> list[Part]:
        """What worker `rank` owns, bucket by bucket, in memory of its own: updates must not be seen in mid-pass."""
        return [Part(flat.plan, flat.spans, rank, flat.cut(flat.params, rank).clone()) for flat in self._flats]

    def params_of(self, rank: int) -> list[Tensor]:
        """In host memory, for each bucket this worker's copy of what worker `rank` owns."""
        return [flat.cut(flat.host_params, rank) for flat in self._flats]

    def grads_of(self, rank: int) -> list[Tensor]:
        """In host memory, for each bucket the gradients of what worker `rank` owns."""
        return [flat.cut(flat.host_grads, rank) for flat in self._flats]

    def empty(self) -> list[Tensor]:
        """Host memory for one worker's part."""
        return [torch.empty_like(each, pin_memory=_is_pinned(each)) for each in self.params_of(0)]

    def publish(self) -> None:
        """The copy in host memory is new: let the model have it. Afterwards it may be overwritten."""
        for flat in self._flats:
            if flat.params is not flat.host_params:
                flat.params.copy_(flat.host_params)

    def collect(self) -> None:
        """Take the gradients from the parameters, and have them in host memory."""
        for index, param in enumerate(self._params):
            self.used[index] = param.grad is not None
        for flat in self._flats:
            flat.collect()
        for param in self._params:
            param.grad = None
        if any(flat.grads is not flat.host_grads for flat in self._flats):
            torch.cuda.current_stream(self._flats[0].grads.device).synchronize()


class _Flat:
    """One bucket."""

    def __init__(self, plan: BucketPlan, params: Sequence[nn.Parameter], size: int) -> None:
        self.plan, self._members = plan, params
        self.spans = equal_spans(plan, size)
        self.params = torch.zeros(plan.tail_offset, dtype=plan.dtype, device=plan.device)
        self.grads = torch.zeros_like(self.params)
        with torch.no_grad():
            for slot, param in zip(plan.slots, params, strict=True):
                view_of(self.params, slot, param).copy_(param)
                param.data = view_of(self.params, slot, param)
        self._views = [view_of(self.grads, slot, param) for slot, param in zip(plan.slots, params, strict=True)]
        self.host_params, self.host_grads = _on_host(self.params), _on_host(self.grads)

    def cut(self, flat: Tensor, rank: int) -> Tensor:
        """What worker `rank` owns of `flat`."""
        return flat[self.spans[rank].begin : self.spans[rank].end]

    @torch.no_grad()
    def collect(self) -> None:
        """Copy the gradients that there are."""
        found = [(view, param.grad) for view, param in zip(self._views, self._members, strict=True)]
        pairs = [(view, grad) for view, grad in found if grad is not None]
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        if self.host_grads is not self.grads:
            self.host_grads.copy_(self.grads, non_blocking=True)


def _on_host(flat: Tensor) -> Tensor:
    """`flat` itself, or pinned memory with the same content."""
    if flat.device.type == "cpu":
        return flat
    return torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat)


def _is_pinned(tensor: Tensor) -> bool:
    return torch.cuda.is_available() and tensor.is_pinned()
