"""A flat buffer of gradients that travels as one message; and all of them, in the order in which they are launched.

The life of a bucket within a step:

    put      a gradient arrived: scale it into its slot (the one copy from autograd), for good or on top. A small one
             waits for others (`defer`), since a copy by itself would cost many times what its bytes do
    launch   hand the buffer to the backend
    wait     until the sum over all workers is in the buffer
    reset    for the next step

A bucket does not know in which order buckets are launched. `Buckets` does: the order is a guess (the reverse of
registration) until the first step has shown it, and grows with parameters that get a gradient only later. It is the
same on all workers at all times: it changes only by what all of them agreed on. What is launched when is the reducer's.
"""

import enum
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.memory import Memory, Request
from lockstep.comm.peers import Doing
from lockstep.replica import layout
from lockstep.replica.granularity import Granularity
from lockstep.replica.layout import BucketPlan, LayoutRules, ParamSpec, num_reals, strides_of, view_of
from lockstep.torch_private import foreach_
from lockstep.weight import Factor
from lockstep.world import World

SMALL_BYTES = 16 << 10
"""Gradients up to here are copied into their bucket together: 23,500 instructions each instead of 38,800, all else as
it was then (by valgrind's callgrind). They are kept until the bucket leaves, so they must be small."""

_address_of = Tensor.data_ptr


class BucketStage(enum.Enum):
    """How far a bucket has come in the step."""

    FILLING = enum.auto()
    LAUNCHED = enum.auto()
    SETTLED = enum.auto()
    """The reduction is over, and this worker has what it keeps of it."""


class Bucket:
    """One flat buffer: its views have the shapes of their parameters, and the strides that the plan gives them."""

    def __init__(
        self, place: int, plan: BucketPlan, params: Sequence[Tensor], memory: Tensor, num_lanes: int = 1
    ) -> None:
        self.place = place
        """Number in the launch order."""
        self.plan = plan
        self.params = [params[slot.index] for slot in plan.slots]
        self.indices = [slot.index for slot in plan.slots]
        self.lanes = memory.view(num_lanes, plan.numel)
        """One row for each sum that this worker sends; the last is the buffer itself."""
        self.views = self.views_of_lane(-1)
        """The slots, as tensors like the parameters."""
        self._addresses = list(map(_address_of, self.views))
        self.reset()

    def reset(self) -> None:
        """Ready for the next step."""
        self.stage = BucketStage.FILLING
        self.num_missing = len(self.plan.slots)
        """How many gradients have not arrived."""
        self.work: Any = None
        """What was launched and is to be waited for."""
        self._filled = [False] * len(self.plan.slots)
        self._deferred: list[int] = []
        """Slots whose gradient has arrived and is in `param.grad` still."""

    @property
    def flat(self) -> Tensor:
        """The buffer that travels."""
        return self.lanes[-1]

    @property
    def flat_grads(self) -> Tensor:
        """The gradients in it, without the tail."""
        return self.lanes[-1, : self.plan.tail_offset]

    @property
    def num_bytes(self) -> int:
        """Bytes in the message."""
        return self.plan.numel * self.lanes.element_size()

    def views_of_lane(self, lane: int) -> list[Tensor]:
        """The slots of a lane, as `views` are those of the last one."""
        pairs = zip(self.plan.slots, self.params, strict=True)
        return [view_of(self.lanes[lane], slot, param) for slot, param in pairs]

    def mend_views(self) -> None:
        """Let views lie in the buffer: they are handed out as gradients, and the user may have set the `data` of one.

        Called when a pass begins.
        """
        if list(map(_address_of, self.views)) != self._addresses:
            self.views[:] = self.views_of_lane(-1)

    def is_small(self, slot: int) -> bool:
        """Whether the gradient of a slot is better copied with those of others."""
        return self.plan.slots[slot].numel * self.lanes.element_size() <= SMALL_BYTES

    def put(self, slot: int, factor: Factor) -> None:
        """Move the gradient that has arrived, times `factor`, into its slot; it is whole again after the step."""
        param, view = self.params[slot], self.views[slot]
        if not self._filled[slot]:
            self._note_arrival(slot)
            _scale_into(view, param.grad, factor)
        elif slot in self._deferred:
            return  # A second arrival in one pass, which was added to the first.
        else:  # The same after the first was copied (a tied weight under re-entrant checkpointing).
            assert param.grad is not None
            view.add_(_dense(param.grad).to(view.dtype) * factor)
        param.grad = None

    def defer(self, slot: int) -> None:
        """Note that a gradient has arrived that is small, or while another bucket is still in this one's memory."""
        if not self._filled[slot]:
            self._note_arrival(slot)
            self._deferred.append(slot)

    def _note_arrival(self, slot: int) -> None:
        self._filled[slot] = True
        self.num_missing -= 1

    def put_deferred(self, factor: Factor) -> None:
        """Let everything that has arrived be in its slot, times `factor`."""
        if not self._deferred:
            return
        params = [self.params[slot] for slot in self._deferred]
        views = [self.views[slot] for slot in self._deferred]
        grads = [param.grad for param in params]
        for param in params:
            param.grad = None
        self._deferred.clear()
        dense = [grad for grad in grads if grad is not None and grad.layout is torch.strided]
        if len(dense) == len(grads) and not _is(factor, 0.0):
            self._copy_together(views, dense, factor)
        else:
            for view, grad in zip(views, grads, strict=True):
                _scale_into(view, grad, factor)

    @torch.no_grad()
    def _copy_together(self, views: list[Tensor], grads: list[Tensor], factor: Factor) -> None:
        foreach_("copy", views, grads)
        if len(views) == len(self.views):
            _scale(self.flat_grads, factor)
        elif not _is(factor, 1.0):
            foreach_("mul", views, factor)

    def put_missing(self, factor: Factor) -> None:
        """Put what there is (nothing, or what earlier passes left) into the slots whose gradient did not come."""
        if self.num_missing:
            for slot, param in enumerate(self.params):
                if not self._filled[slot]:
                    _scale_into(self.views[slot], param.grad, factor)

    def has(self, slot: int) -> bool:
        """Whether the slot's gradient has arrived in this step."""
        return self._filled[slot]

    def lacking(self) -> list[int]:
        """Numbers of the parameters that are known to have no gradient in this step yet; for any thread.

        Reads numbers that the training thread keeps, and no gradient: autograd replaces those in native code, and
        another thread that reads one meanwhile has one that is freed.
        """
        filled = self._filled
        return [index for slot, index in enumerate(self.indices) if not filled[slot]]

    def launch(self, send: Callable[["Bucket"], Any]) -> None:
        """Hand the buffer to the backend."""
        self.stage = BucketStage.LAUNCHED
        self.work = send(self)

    def wait(self, world: World, doing: Doing) -> None:
        """Return when the sum is in the buffer; on a GPU the current stream waits, and not the host."""
        if self.lanes.is_cpu:
            world.wait(self.work, doing)
        elif self.work is not None:
            self.work.wait()
        self.work = None  # It may hold copies of the bucket: gloo's reduce-scatter does.

    def hand_out(self, used: Sequence[bool]) -> None:
        """Let slots, in their parameters' dtype, be the gradients of those that some worker has used, by number."""
        for index, param, view in zip(self.indices, self.params, self.views, strict=True):
            if used[index] and param.grad is not view:
                param.grad = view.to(param.dtype)


class Buckets:
    """The flat buffers of one replica. Made anew by `renew` when the order has changed."""

    def __init__(
        self,
        params: Sequence[Tensor],
        order: Sequence[int],
        rules: LayoutRules,
        memory: Memory,
        *,
        grain: Granularity,
        tail_numel: int,
        alone: Set[int] = frozenset(),
    ) -> None:
        self._params = params
        self._order = list(order)
        self._rules, self._memory, self._grain = rules, memory, grain
        self._tail_numel = tail_numel
        self._alone = alone
        """Parameters that have a bucket of their own."""
        self.deferred: set[int] = set()
        """Parameters whose gradients come in portions, so that they can only be sent at the end of a pass."""
        self.unsent: set[int] = set()
        """Places of buckets that keep their memory and stay empty, since their gradients travel otherwise."""
        self.all: list[Bucket] = []
        """In launch order; the last one closes the step."""
        self.places: list[tuple[Bucket, int] | None] = []
        """Of each parameter: its bucket and its slot there, or None if it has no place."""
        self.is_due = True
        """Whether they have to be made anew before the next pass."""

    @property
    def closing(self) -> Bucket:
        """The bucket that closes the step, and carries the notes."""
        return self.all[-1]

    @property
    def leave_early(self) -> bool:
        """Whether one leaves when it is full: if there is something to be hidden, or another needs its memory."""
        return self._grain.leaves_early or 0 < self._memory.num_turns < len(self.all) - 1

    def renew(self, *, tail_alone: bool, num_lanes: int) -> None:
        """Lay the flat buffers out anew. Gradients in old ones move over as they arrive."""
        plans = layout.plan(
            self._specs(self._order),
            tail_numel=self._tail_numel,
            tail_alone=tail_alone,
            tail_cap_bytes=self._rules.tail_cap_bytes,
            grain=self._grain,
            parts=self._rules.parts,
            part_grain=self._rules.part_grain,
        )
        self.all.clear()  # Frees the old ones before the new ones are made, where no gradient holds them.
        for param in self._params:
            if param.grad is not None and self._memory.holds(param.grad):
                param.grad = param.grad.clone()  # Still wanted, and its memory is about to be another's.
        self.places = [None] * len(self._params)
        flats = self._memory.lay_out([_request(plan, num_lanes) for plan in plans])
        for place, (plan, memory) in enumerate(zip(plans, flats, strict=True)):
            bucket = Bucket(place, plan, self._params, memory, num_lanes)
            self.all.append(bucket)
            for number, index in enumerate(bucket.indices):
                self.places[index] = (bucket, number)
        self.is_due = False

    def previous(self, bucket: Bucket) -> Bucket | None:
        """The bucket that uses the memory of this one before it in every pass, if any does."""
        turns = self._memory.num_turns
        has_own = not turns or bucket.place < turns or bucket is self.all[-1]
        return None if has_own else self.all[bucket.place - turns]

    def expect(self, seen: Iterable[int]) -> None:
        """From the next pass on, expect gradients in the order in which they were seen."""
        if self._rules.is_fixed:
            return
        rank = {index: place for place, index in enumerate(dict.fromkeys(seen))}
        order = sorted(self._order, key=lambda index: (index in self.deferred, rank.get(index, len(rank))))
        if order != self._order:
            self._order = order
            self.is_due = True

    def leave_out(self, indices: Iterable[int]) -> None:
        """From the next pass on, send no bucket for these parameters, whose gradients travel otherwise."""
        apart = set(indices)
        if self._rules.is_fixed:
            self.unsent = {bucket.place for bucket in self.all if not apart.isdisjoint(bucket.indices)}
        elif apart:
            self._order = [index for index in self._order if index not in apart]
            self.is_due = True

    def make_room_for(self, indices: Iterable[int]) -> None:
        """From the next pass on, have a place for these parameters, whose gradients no bucket could take."""
        for index in indices:
            place = self.places[index]
            if index not in self._order:
                self._order.append(index)
            elif place is not None and place[0].place in self.unsent:
                self.unsent.remove(place[0].place)
            else:
                self.deferred.add(index)
        if self._rules.is_fixed:
            return
        # A gradient that comes in portions is sent at the end of the pass, so it must not hold others up.
        self._order.sort(key=lambda index: index in self.deferred)
        self.is_due = True

    def missing(self, touched: Set[int]) -> list[int]:
        """Parameters without a gradient of this worker's own: neither in a bucket nor outside, in `touched`."""
        if None not in self.places and not any(bucket.num_missing for bucket in self.all):
            return []  # As nearly always.
        return [
            index
            for index, place in enumerate(self.places)
            if (place is None or (place[0].num_missing and not place[0].has(place[1]))) and index not in touched
        ]

    def temporary(self, indices: Sequence[int]) -> list[Bucket]:
        """Buckets for these parameters alone, for one use."""
        plans = layout.plan(self._specs(indices), tail_numel=0, tail_alone=True)[:-1]
        flats = Memory().lay_out([_request(plan) for plan in plans])
        return [Bucket(p, plan, self._params, flat) for p, (plan, flat) in enumerate(zip(plans, flats, strict=True))]

    def _specs(self, order: Sequence[int]) -> list[ParamSpec]:
        specs = []
        for index in order:
            param = self._params[index]
            block = self._rules.blocks[index] if self._rules.blocks else -1
            if index in self._alone:
                block = len(self._params) + index
            own = dtype = param.dtype.to_real()
            if param.is_floating_point():
                dtype = self._rules.grads_dtype or dtype
            device = self._rules.device if param.is_meta else param.device
            rounds_from = None if dtype == own else own
            specs.append(ParamSpec(index, num_reals(param), dtype, device, block, strides_of(param), rounds_from))
        return specs


def _request(plan: BucketPlan, num_lanes: int = 1) -> Request:
    return Request(plan.numel * num_lanes, plan.dtype, plan.device)


def _scale_into(view: Tensor, grad: Tensor | None, factor: Factor) -> None:
    if grad is None or _is(factor, 0.0):
        view.zero_()  # Zero even where the gradient is not a number: a part without samples counts nothing.
    elif grad is view:
        _scale(view, factor)
    elif grad.dtype == view.dtype:
        torch.mul(_dense(grad), factor, out=view)
    else:
        # Not in one call: that would round the product to the gradient's dtype on its way into the wider one.
        view.copy_(_dense(grad)).mul_(factor)


def _scale(view: Tensor, factor: Factor) -> None:
    if not _is(factor, 1.0):
        view.mul_(factor)


def _is(factor: Factor, value: float) -> bool:
    return isinstance(factor, float) and factor == value


def _dense(grad: Tensor) -> Tensor:
    grad = grad.to_dense() if grad.layout is not torch.strided else grad
    return grad.detach() if grad.requires_grad else grad
