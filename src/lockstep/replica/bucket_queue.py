"""The one order in which buckets leave, and how each is sent and waited for.

Buckets are launched strictly in the order of the plan, and all of them in every step, whatever arrived here: so no
control flow on one worker can make it send something that the others do not expect. The last bucket closes the step: it
is held back until this worker's backward pass has ended well.

    put        a gradient has arrived for a slot; full buckets leave in turn, if there is something to be hidden
    exchange   the pass has ended: send the rest, and wait for everything
    reset      for the next step

Where many buckets take turns in the same memory (zero=2 and 3), one is filled while the one before it travels.
"""

import contextlib
import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lockstep import faults
from lockstep.comm.group import waited_for
from lockstep.events import Kind
from lockstep.replica.bucket import Bucket, Buckets, BucketStage
from lockstep.replica.grad_weight import GradWeight
from lockstep.replica.placement import Placement, SplitPlacement
from lockstep.replica.reduction import Partials
from lockstep.replica.step_state import StepNotes
from lockstep.world import World


class GradObserver(Protocol):
    """Measures gradients, in the thread of the backward pass; must neither change them nor keep them."""

    def see_own(self, step: int, bucket: Bucket) -> None:
        """`bucket` has all that this worker adds, and is about to be sent."""

    def is_due(self, step: int) -> bool:
        """Whether the gradients of this step are measured."""

    def see_rows(self, own: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Gradients that travelled apart from buckets: what this worker added, and what they will be."""

    def see_sums(self, step: int, buckets: Sequence[Bucket]) -> None:
        """All buckets of the pass have arrived, and hold what the gradients will be."""


class BucketQueue:
    """The buckets of one replica, leaving."""

    def __init__(
        self,
        world: World,
        names: Sequence[str],
        buckets: Buckets,
        placement: Placement,
        grad_weight: GradWeight,
        partials: Partials | None,
    ) -> None:
        self._world = world
        self._names = names
        self.buckets = buckets
        self._placement = placement
        self._grad_weight = grad_weight
        self._partials = partials
        """Sums of earlier shards, where all is added along a tree."""
        self.observer: GradObserver | None = None
        self.step = 0
        self.launched_ns = 0
        """When the first bucket of the last pass left."""
        self.reset()

    def reset(self) -> None:
        """Ready for the next step."""
        for bucket in self.buckets.all:
            bucket.reset()
        if self._partials is not None:
            self._partials.clear()
        self.num_launched = 0
        self._is_closing = self._fills = False
        """Whether nothing more will come in this pass; and whether what did not come is sent as what earlier passes
        left, or as nothing."""
        self._told: set[int] = set()
        """Places of buckets that listeners know to have arrived."""

    @property
    def has_one_order(self) -> bool:
        """Whether all is added along a tree: then nothing may come too late for its bucket."""
        return self._partials is not None

    def put(self, bucket: Bucket, slot: int) -> None:
        """The gradient of a slot has arrived: into the bucket."""
        if bucket.is_small(slot) or not self._vacate(bucket):
            bucket.defer(slot)
        else:
            bucket.put(slot, self._grad_weight.factor)
        if self._world.events and not bucket.num_missing:
            self._world.events.emit(Kind.FULL, self.step, bucket.place, bucket.num_bytes)

    def launch_full(self) -> None:
        """Launch, in turn, the buckets that are full, if they leave early; not the one that closes the step."""
        buckets = self.buckets
        if not buckets.leave_early:
            return
        count, last = self.num_launched, len(buckets.all) - 1
        while count < last and (not buckets.all[count].num_missing or count in buckets.unsent):
            count += 1
        if self._placement.gathered is None:
            self._launch_to(count)
        else:
            self._placement.gathered.let_leave(count, self._launch_to, is_over=False)

    def exchange(self, notes: StepNotes, *, fills: bool = False) -> None:
        """Send what is left, and wait for everything.

        fills: what did not come in this pass is sent as what earlier passes left, or nothing.
        """
        count = len(self.buckets.all)
        self._is_closing, self._fills = True, fills
        if self._placement.gathered is None:
            self._launch_to(count)
        else:
            self._placement.gathered.let_leave(count, self._launch_to, is_over=True)
        notes.exchange()
        for bucket in self.buckets.all:
            if bucket.stage is not BucketStage.SETTLED:
                self._settle(bucket)
        notes.read()

    def _launch_to(self, count: int) -> None:
        """Let the first `count` buckets leave, as far as they have not, with what is in them."""
        buckets, placement = self.buckets, self._placement
        while self.num_launched < count:
            faults.at("exchange")
            if not self.num_launched:
                self.launched_ns = time.perf_counter_ns()
            bucket = buckets.all[self.num_launched]
            self.num_launched += 1
            self._vacate(bucket)
            if bucket.place in buckets.unsent:
                bucket.stage = BucketStage.SETTLED
                continue
            self._complete(bucket)
            # What this thread waits for next it may as well carry out itself.
            has_time = buckets.leave_early and bucket is not buckets.closing
            is_awaited = self._is_closing and not has_time and placement.reduction.is_waited_for
            with waited_for() if is_awaited else contextlib.nullcontext():
                bucket.launch(placement.send)
            if self._world.events:
                self._world.events.emit(Kind.LAUNCHED, self.step, bucket.place, bucket.num_bytes)
                self.tell_arrivals()

    def _complete(self, bucket: Bucket) -> None:
        """Let all that this worker adds be in `bucket`."""
        if self._fills:
            bucket.put_missing(self._grad_weight.factor)
        bucket.put_deferred(self._grad_weight.factor)
        if self._partials is not None:
            self._partials.complete(bucket)
        if self.observer is not None:
            self.observer.see_own(self.step, bucket)

    def _vacate(self, bucket: Bucket) -> bool:
        """Whether `bucket` has its memory for itself; waits for the one before it if that is on its way."""
        before = self.buckets.previous(bucket)
        if before is None or before.stage is BucketStage.SETTLED:
            return True
        if before.stage is BucketStage.FILLING:
            return False
        self._settle(before)
        return True

    def _settle(self, bucket: Bucket) -> None:
        """Return when this worker has what it keeps of a bucket that was sent."""
        bucket.wait(self._world, lambda: self.words(bucket))
        if isinstance(self._placement, SplitPlacement):
            self._placement.keep(bucket)
        bucket.stage = BucketStage.SETTLED
        self._tell_reduced(bucket)

    def words(self, bucket: Bucket) -> str:
        """What a worker is doing that waits for `bucket`."""
        held = [repr(self._names[index]) for index in bucket.indices]
        some = ", ".join(held[:3]) + (f" and {len(held) - 3} more" if len(held) > 3 else "")
        return f"reducing bucket {bucket.place} of step {self.step}" + (f" ({some})" if some else "")

    def tell_arrivals(self) -> None:
        """Tell of buckets that have arrived while others were being filled: no thread has waited for them.

        Not on a GPU, where the host is ahead of what it queues, and its own clock says nothing.
        """
        if self._world.device.type == "cpu":
            for bucket in self.buckets.all[: self.num_launched]:
                if bucket.work is not None and bucket.work.is_completed():
                    self._tell_reduced(bucket)

    def _tell_reduced(self, bucket: Bucket) -> None:
        if self._world.events and bucket.place not in self._told:
            self._told.add(bucket.place)
            self._world.events.emit(Kind.REDUCED, self.step, bucket.place, bucket.num_bytes)
