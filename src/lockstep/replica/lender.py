"""Which slots can be had to compute a gradient in: see lending.py."""

import weakref
from collections.abc import Sequence

from torch import Tensor

from lockstep.replica.bucket import Bucket
from lockstep.replica.buckets import Buckets
from lockstep.replica.lending import is_power_of_two
from lockstep.replica.pass_edges import PassEnd
from lockstep.replica.standing_in import Loan
from lockstep.replica.traffic import Traffic
from lockstep.replica.weighing import Weighing


class SlotLender:
    """Lends the slots of one replica's buckets, in passes that it is opened for."""

    def __init__(self, buckets: Buckets, traffic: Traffic, weighing: Weighing) -> None:
        self._buckets = buckets
        self._traffic = traffic
        self._weighing = weighing
        self._step = -1
        self._pass: weakref.ref[PassEnd] | None = None
        """What lives until the pass has ended, well or badly."""
        self._mixed: set[int] = set()
        """Parameters whose slots are not lent any more."""
        self._in_parts: set[int] = set()
        """Those whose gradients have once come in parts."""
        self.expected: set[int] = set()
        """Parameters whose gradients are expected to be computed in their slots, all at once."""

    def open(self, step: int, end: "weakref.ref[PassEnd]") -> None:
        """The pass of `step` begins: its gradients travel, and come in an order that is known."""
        self._step, self._pass = step, end

    def close(self) -> None:
        """It is over."""
        self._pass = None

    def lend(self, index: int, param: Tensor, operands: Sequence[Tensor]) -> Loan | None:
        """See Lender. Called inside the backward pass, before that gradient arrives."""
        factor = self._weighing.factor
        if not self._is_open() or param.grad is not None or not is_power_of_two(factor):
            return None
        place = self._buckets.places[index]
        if place is None or index in self._buckets.deferred or index in self._mixed:
            return None
        bucket, slot = place
        if bucket.views[slot].dtype is not param.dtype or not bucket.can_lend(slot, operands):
            return None
        if not self._traffic.is_vacant(bucket, self._step):
            return None
        view, is_all = bucket.lend(slot)
        return view, factor, is_all

    def awaits_rows(self, index: int) -> bool:
        """See Lender."""
        place = self._buckets.places[index]
        return self._is_open() and place is not None and place[0].awaits(place[1])

    def add_rows(self, index: int, rows: Tensor, values: Tensor) -> None:
        """See Lender."""
        place = self._buckets.places[index]
        assert place is not None, "rows are awaited"
        bucket, slot = place
        bucket.add_rows(slot, rows, values)

    def _is_open(self) -> bool:
        return self._pass is not None and self._pass() is not None

    def learn_from(self, bucket: Bucket) -> bool:
        """Do not lend again what turned out to be only a part; returns whether other gradients are expected now."""
        if not (bucket.alone or bucket.in_parts or bucket.mixed):
            return False
        before = len(self.expected)
        self._mixed.update(bucket.indices[slot] for slot in bucket.mixed)
        self._in_parts.update(bucket.indices[slot] for slot in bucket.in_parts)
        self.expected.update(bucket.indices[slot] for slot in bucket.alone)
        self.expected -= self._mixed | self._in_parts
        return len(self.expected) != before
