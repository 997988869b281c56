"""Parameters in flat memory: the part of them that a worker owns, and how it gets the parts of the others.

A `BucketPart` is the span of one bucket that this worker owns, of parameters and of gradients. The optimizer is given
the part's fragments: one parameter for each tensor that has elements in the span, over the memory of the span itself.
So what the optimizer writes is in its place, and what the reduction leaves in the span is the fragments' gradients. A
fragment of a parameter that no worker used has no gradient, as the parameter itself would have none.

Where the parameters lie between two steps:

    SharedParams   one copy for all workers of a host, in shared memory: the owner of a part updates it where every
                   worker reads it, so there is nothing to send within a host; other hosts get it once each. Two
                   barriers keep updates away from readers.
    KeptParams     a copy on every worker; after the update every worker gathers the parts of the others.

What is gathered only while it is used is in gathered_params.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.flat_group import Spans
from lockstep.comm.group import all_gather, moves_parts, share, waited_for, writes_for
from lockstep.comm.memory import allocate_common
from lockstep.replica.collectives import finish
from lockstep.replica.layout import BucketPlan, FlatSpan, Fragment, are_equal, fragments, in_memory_order, view_of
from lockstep.replica.local_params import whole_param
from lockstep.world import World

Format = tuple[Sequence[int], Sequence[int]]
"""Shape and strides, in real numbers."""


@dataclass(frozen=True, slots=True)
class Owned:
    """What this worker's optimizer updates of one parameter."""

    param: nn.Parameter
    """As the module has it."""
    own: nn.Parameter
    """What stands for it in the optimizer: a fragment of it, or its master."""
    offset: int
    """The number of its first element among the parameter's own here, as they lie in memory."""
    strides: tuple[int, ...]
    """How the parameter lies in memory while it is there; of a DTensor what this worker holds."""


class BucketPart:
    """The owned span of one bucket."""

    def __init__(
        self,
        plan: BucketPlan,
        spans: Sequence[FlatSpan],
        rank: int,
        own_params: Tensor,
        formats: Mapping[int, Format] | None = None,
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
        self._formats = formats
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
        return self._shaped(piece, fragment)

    def _shaped(self, piece: Tensor, fragment: Fragment) -> Tensor:
        if self._formats is None:
            return piece
        return piece.as_strided(*self._formats[fragment.index], piece.storage_offset())

    def owned(self, params: Sequence[nn.Parameter]) -> list[Owned]:
        """What this worker has of `params`, which are all of the model's."""
        pairs = zip(self.fragments, self.params, strict=True)
        return [Owned(whole_param(params[each.index]), own, each.offset, each.strides) for each, own in pairs]

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
        for fragment, param in zip(self.fragments, self.params, strict=True):
            if fragment.index == index:
                flat = in_memory_order(grad, fragment.strides)
                piece = self._shaped(flat[fragment.offset : fragment.offset + fragment.span.numel], fragment)
                param.grad = piece.clone() if param.grad is None else param.grad.add_(piece)


def cut_out(plan: BucketPlan, params: Sequence[Tensor], span: FlatSpan, dtype: torch.dtype) -> Tensor:
    """What `span` holds of `params`, flat, copied into `dtype`."""
    own = torch.zeros(span.numel, dtype=dtype, device=plan.device)
    numbers = {slot.index: number for number, slot in enumerate(plan.slots)}
    for each in fragments(plan, span):
        flat = in_memory_order(params[numbers[each.index]].detach(), each.strides)
        own[each.span.begin - span.begin : each.span.end - span.begin] = flat[
            each.offset : each.offset + each.span.numel
        ]
    return own


class FlatParams:
    """Holds the parameters of all buckets in flat memory. As it is, whole ones, with nothing to do around a step."""

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        self._world, self._group = world, group

    def place(
        self, plan: BucketPlan, params: Sequence[Tensor], spans: Sequence[FlatSpan], dtype: torch.dtype
    ) -> Tensor:
        """Move `params`, equal on all workers, into flat memory of `dtype`; returns the part that this worker owns."""
        raise NotImplementedError

    def before_step(self) -> None:
        """The optimizer is about to change the owned parts."""

    def after_step(self) -> None:
        """The optimizer has changed the owned parts: let every worker see them, here or when they are used."""

    def whole(self, call: str) -> Iterator[None]:
        """Until the iterator is closed every worker may read all parameters, and change them as the others do.

        call: what the user called to get here, on every worker.
        """
        yield

    def release(self) -> None:
        """Let go of the group."""
        del self._group


class SharedParams(FlatParams):
    """One copy for all workers of a host."""

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        super().__init__(world, group)
        self._placed: list[tuple[Tensor, BucketPlan, Sequence[Tensor], Sequence[FlatSpan]]] = []

    def place(
        self, plan: BucketPlan, params: Sequence[Tensor], spans: Sequence[FlatSpan], dtype: torch.dtype
    ) -> Tensor:
        """Every worker fills its part of the copy; all look at all of it from then on."""
        flat = allocate_common(self._group, plan.tail_offset, dtype)
        for span in self._written(spans):
            flat[span.begin : span.end] = cut_out(plan, params, span, dtype)
        self._meet("sharing its parameters")
        _look_at(flat, plan, params)
        self._placed.append((flat, plan, params, spans))
        own = spans[self._world.rank]
        return flat[own.begin : own.end]

    def _written(self, spans: Sequence[FlatSpan]) -> list[FlatSpan]:
        """What this worker writes of the copy where all do alike."""
        return [spans[rank] for rank in writes_for(self._group)]

    def before_step(self) -> None:
        """No worker may still be reading, in a backward pass or in an evaluation after it."""
        self._meet("about to update parameters")

    def after_step(self) -> None:
        """No worker may read before all parts are updated, and have come from other hosts."""
        flats = [(flat, [(span.begin, span.end) for span in spans]) for flat, _, _, spans in self._placed]
        self._meet("waiting for updated parameters", flats)

    def whole(self, call: str) -> Iterator[None]:
        """Every worker has a copy, since what all do alike must not be done several times; parts count at the end."""
        self._world.meet(call)
        copies = [flat.clone() for flat, _, _, _ in self._placed]
        self._meet("copying all parameters")
        for copy, (_, plan, params, _) in zip(copies, self._placed, strict=True):
            _look_at(copy, plan, params)
        try:
            yield
        finally:
            for copy, (flat, plan, params, spans) in zip(copies, self._placed, strict=True):
                for span in self._written(spans):
                    flat[span.begin : span.end].copy_(copy[span.begin : span.end])
                _look_at(flat, plan, params)
            self._meet("changing all parameters")

    def _meet(self, doing: str, flats: Sequence[tuple[Tensor, Spans]] = ()) -> None:
        """Return when all workers of this host have come here, and have what is to come from others of `flats`."""
        finish(partial(share, self._group, flats), self._world, torch.device("cpu"), doing)


class KeptParams(FlatParams):
    """A copy on every worker."""

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        super().__init__(world, group)
        self._flats: list[tuple[Tensor, Sequence[FlatSpan]]] = []

    def place(
        self, plan: BucketPlan, params: Sequence[Tensor], spans: Sequence[FlatSpan], dtype: torch.dtype
    ) -> Tensor:
        """Every worker fills its own copy."""
        flat = torch.zeros(plan.tail_offset, dtype=dtype, device=plan.device)
        with torch.no_grad():
            for slot, param in zip(plan.slots, params, strict=True):
                view_of(flat, slot, param).copy_(param)
        _look_at(flat, plan, params)
        self._flats.append((flat, spans))
        return flat[spans[self._world.rank].begin : spans[self._world.rank].end]

    def after_step(self) -> None:
        """Gather everybody's parts, all buckets at a time."""
        under_way: list[Any] = []
        with waited_for():
            for flat, spans in self._flats:
                own = spans[self._world.rank]
                under_way += gather_parts(flat, flat[own.begin : own.end], spans, self._group)
        for work in under_way:
            self._world.await_on_device(work, "gathering updated parameters")


def gather_parts(flat: Tensor, own: Tensor, spans: Sequence[FlatSpan], group: dist.ProcessGroup) -> list[Any]:
    """Start setting `flat` to the parts of all workers, of which `own` is this one's; returns what to wait for."""
    if moves_parts(group) and are_equal(spans):
        return [all_gather(flat, own, group)]
    mine = spans[group.rank()]
    place = flat[mine.begin : mine.end]
    if place.data_ptr() != own.data_ptr():
        place.copy_(own)
    return [
        dist.broadcast(flat[span.begin : span.end], group=group, group_src=rank, async_op=True)
        for rank, span in enumerate(spans)
        if span.numel
    ]


def _look_at(flat: Tensor, plan: BucketPlan, params: Sequence[Tensor]) -> None:
    for slot, param in zip(plan.slots, params, strict=True):
        param.data = view_of(flat, slot, param)
