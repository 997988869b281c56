"""All buckets of a replica, in launch order, and the order in which gradients are expected.

The order is a guess (the reverse of registration) until the first step has shown it, and grows with parameters that
get a gradient only later. It is the same on all workers at all times: it changes only by what all of them agreed on.
"""

from collections.abc import Callable, Iterable, Sequence, Set

from torch import Tensor

from lockstep.comm.memory import OrdinaryMemory, Request
from lockstep.replica import layout
from lockstep.replica.bucket import Bucket
from lockstep.replica.placement import Placement


class Buckets:
    """The flat buffers of one replica. Made anew by `renew` when the order has changed."""

    def __init__(
        self,
        params: Sequence[Tensor],
        order: Sequence[int],
        placement: Placement,
        *,
        grain: layout.Granularity,
        tail_numel: int,
        alone: Set[int] = frozenset(),
    ) -> None:
        self._params = params
        self._alone = alone
        """Parameters that have a bucket of their own."""
        self._placement = placement
        self._memory = placement.memory
        self._order = list(order)
        self.deferred: set[int] = set()
        """Parameters whose gradients come in portions, so that they can only be sent at the end of a pass."""
        self._grain = grain
        self._tail_numel = tail_numel
        self.all: list[Bucket] = []
        """In launch order; the last one closes the step."""
        self.places: list[tuple[Bucket, int] | None] = []
        """Of each parameter: its bucket and its slot there, or None if it has no place."""
        self.is_due = True
        """Whether they have to be made anew before the next pass."""
        self._take_turns = False
        """Whether the memory of one is used by another within a pass."""
        self.before_renewal: Callable[[], object] = tuple
        """Called before that, so that nobody holds the old ones."""

    @property
    def closing(self) -> Bucket:
        """The bucket that closes the step, and carries the notes."""
        return self.all[-1]

    @property
    def leave_early(self) -> bool:
        """Whether one leaves when it is full: if there is something to be hidden, or another needs its memory."""
        return self._grain.leaves_early or self._take_turns

    def renew(self, *, tail_alone: bool) -> None:
        """Lay the flat buffers out anew. Gradients in old ones move over as they arrive."""
        plans = layout.plan(
            self._specs(self._order),
            tail_numel=self._tail_numel,
            tail_alone=tail_alone or self._placement.reduction.sends_tail_apart,
            tail_cap_bytes=self._placement.tail_cap_bytes,
            grain=self._grain,
            parts=self._placement.num_parts,
        )
        self.before_renewal()
        self.all.clear()  # Frees the old ones before the new ones are made, where no gradient holds them.
        self._save_grads()
        self.places = [None] * len(self._params)
        num_lanes = self._placement.reduction.num_lanes
        stretches = self._memory.lay_out([_request(plan, num_lanes) for plan in plans])
        for place, (plan, memory) in enumerate(zip(plans, stretches, strict=True)):
            bucket = Bucket(place, plan, self._params, memory, num_lanes)
            self.all.append(bucket)
            bucket.previous = self._before(bucket)
            for number, slot in enumerate(plan.slots):
                self.places[slot.index] = (bucket, number)
        self._take_turns = any(bucket.previous is not None for bucket in self.all)
        with_grads = [bucket for bucket in self.all if bucket.plan.slots]
        if with_grads:
            with_grads[-1].is_last_with_grads = True
        self._placement.reduction.adopt(self.all)
        self._placement.adopt(self.all)
        self.is_due = False

    def _before(self, bucket: Bucket) -> Bucket | None:
        """Who uses the memory of `bucket` before it does."""
        turns = self._memory.num_turns
        has_own = bucket.plan.tail_numel > 0  # The last one.
        return self.all[bucket.place - turns] if turns and not has_own and bucket.place >= turns else None

    def _save_grads(self) -> None:
        """Move gradients that are still wanted out of memory that is about to be laid out anew."""
        for param in self._params:
            if param.grad is not None and self._memory.holds(param.grad):
                param.grad = param.grad.clone()

    def expect(self, seen: Iterable[int]) -> None:
        """From the next pass on, expect gradients in the order in which they were seen."""
        if self._placement.is_fixed:
            return
        rank = {index: place for place, index in enumerate(dict.fromkeys(seen))}
        order = sorted(self._order, key=lambda index: (index in self.deferred, rank.get(index, len(rank))))
        if order != self._order:
            self._order = order
            self.is_due = True

    def leave_out(self, indices: Iterable[int]) -> None:
        """From the next pass on, have no place for these parameters, whose gradients travel otherwise."""
        apart = set(indices)
        if self._placement.is_fixed:
            for bucket in self.all:
                bucket.is_apart = not apart.isdisjoint(bucket.indices)
        elif apart:
            self._order = [index for index in self._order if index not in apart]
            self.is_due = True

    def make_room_for(self, indices: Iterable[int]) -> None:
        """From the next pass on, have a place for these parameters, whose gradients no bucket could take."""
        for index in indices:
            place = self.places[index]
            if index not in self._order:
                self._order.append(index)
            elif place is not None and place[0].is_apart:
                place[0].is_apart = False
            else:
                self.deferred.add(index)
        if self._placement.is_fixed:
            return
        # A gradient that comes in portions is sent at the end of the pass, so it must not hold others up.
        self._order.sort(key=lambda index: index in self.deferred)
        self.is_due = True

    def temporary(self, indices: Sequence[int]) -> list[Bucket]:
        """Buckets for these parameters alone, for one use."""
        plans = layout.plan(self._specs(indices), tail_numel=0, tail_alone=True)[:-1]
        flats = OrdinaryMemory().lay_out([_request(plan) for plan in plans])
        return [Bucket(p, plan, self._params, flat) for p, (plan, flat) in enumerate(zip(plans, flats, strict=True))]

    def _specs(self, order: Sequence[int]) -> list[layout.ParamSpec]:
        specs = []
        for index in order:
            param = self._params[index]
            numel = param.numel() * (2 if param.is_complex() else 1)
            block = self._placement.blocks[index] if self._placement.blocks else -1
            if index in self._alone:
                block = len(self._params) + index
            dtype = param.dtype.to_real()
            if dtype.is_floating_point:
                dtype = self._placement.grads_dtype or dtype
            device = self._placement.device if param.is_meta else param.device
            specs.append(layout.ParamSpec(index, numel, dtype, device, block))
        return specs


def _request(plan: layout.BucketPlan, num_lanes: int = 1) -> Request:
    return Request(plan.numel * num_lanes, plan.dtype, plan.device)
