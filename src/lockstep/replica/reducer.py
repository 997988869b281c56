"""Which gradients travel when: the order of buckets, their overlap with the backward pass, and its end.

The phases of a synchronised backward pass, in order:

    begin     the first gradient is about to be computed: settle the weight, ask autograd to call `finish`
    arrive    once per gradient: into its bucket; full buckets leave in turn
    finish    what did not come is sent as it is; wait; hand the reduced gradients out

One order for all. Buckets are launched strictly in the order of the plan, and all of them in every step, whatever
arrived here: so no control flow on one worker can make it send something that the others do not expect. The last
bucket closes the step: it is held back until this worker's backward pass has ended well, and its notes say so.

A pass that raises never comes to `finish` (see pass_edges.py). At its next forward or backward pass the worker sends
the rest of that step with a note that makes the step void; the others, who waited for it, raise StepVoid instead of
using half a sum.
"""

import time
import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lockstep.events import Kind
from lockstep.replica import arrivals
from lockstep.replica.attendance import Attendance
from lockstep.replica.bucket import Bucket
from lockstep.replica.buckets import Buckets
from lockstep.replica.departures import Departures
from lockstep.replica.gauge import Gauge
from lockstep.replica.hook import CommHook
from lockstep.replica.lender import SlotLender
from lockstep.replica.notes import Notes
from lockstep.replica.partials import Partials
from lockstep.replica.pass_edges import PassEnd
from lockstep.replica.placement import Placement
from lockstep.replica.shared_state import SharedState
from lockstep.replica.silent import Silent
from lockstep.replica.sums import Sums
from lockstep.replica.traffic import Traffic
from lockstep.replica.weighing import Unweighed, Weighing
from lockstep.world import World


class Reducer:
    """The gradients of one replica on their way; one per wrapped model and worker."""

    def __init__(
        self,
        world: World,
        shared: SharedState,
        buckets: Buckets,
        placement: Placement,
        *,
        group: dist.ProcessGroup,
        partials: Partials | None = None,
    ) -> None:
        self._world = world
        self._names, self._params, self._buffers = shared.names, shared.params, shared.buffers
        self._sparse, self._rows = shared.sparse_params, shared.rows
        self.group = group
        self._buckets = buckets
        self._placement = placement
        self._partials = partials
        """Sums of earlier shards, where all is added along a tree."""
        self._has_one_order = partials is not None
        """Whether no gradient may come too late for its bucket, since it would be added in another order."""
        self.weighing = Weighing(world.size) if partials is None else Unweighed()
        self.attendance = Attendance(world)
        self.step = 0
        """How many synchronised passes have ended."""
        self._arrivals = arrivals.Arrivals(shared.params)
        self._observed: list[int] | None = []
        """Parameters in the order of their gradients in the first step; None after it."""
        self._traffic = Traffic(world, shared.names, placement)
        self._sums = Sums(
            world, shared, buckets, placement, self._traffic, self.weighing, self.attendance, self._has_one_order
        )
        self._departures = Departures(world, buckets, self._traffic, self.weighing, partials)
        self.lender = SlotLender(buckets, self._traffic, self.weighing)
        """Who asks it for a slot may compute a gradient there."""
        self._silent = Silent(
            self._arrivals, buckets, shared.params, self.lender.expected, is_over=partials is not None
        )
        self._prepare_buckets()
        # The pass in flight.
        self._syncs = True
        self._expects_pass = False
        self._armed: weakref.ref[PassEnd] | None = None
        self._has_arrived = False
        self._is_handed_out = False
        """Whether the step has come to an end, and not to nothing."""
        self._is_disordered = False
        """Whether a gradient came without a word when it was not expected."""
        self._touched: set[int] = set()
        """Parameters whose gradients were accumulated here and are in no bucket yet."""
        self._extra: set[int] = set()
        """Parameters whose gradients no bucket of this step can take."""
        self._is_heard = False
        """Whether somebody listens to this pass."""
        self._spent_ns = 0
        """In filling and launching buckets, if so."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All of them, in launch order."""
        return self._buckets.all

    @property
    def num_launched(self) -> int:
        """How many buckets of the step in flight have left."""
        return len(self._departures.left)

    @property
    def gauge(self) -> Gauge | None:
        """Measures gradients on their way, where somebody wants to know."""
        return self._departures.gauge

    @gauge.setter
    def gauge(self, gauge: Gauge | None) -> None:
        self._departures.gauge = gauge

    @property
    def names(self) -> Sequence[str]:
        """Of the parameters, by number."""
        return self._names

    def use_hook(self, hook: CommHook) -> None:
        """Reduce buckets by `hook` from the next pass on."""
        self._traffic.use_hook(hook)
        self._buckets.is_due = True
        if self._rows is not None:  # A hook is to see all gradients.
            self._buckets.make_room_for(self._rows.active)
            self._rows.retire(self._rows.active)
            self._rows.adopt(())
            self._rows = None

    def forget(self) -> None:
        """Drop what passes without communication have left here: they were only tried."""
        self._touched.clear()
        self._expects_pass = False

    def release(self) -> None:
        """Let go of the group; nothing can be reduced from here on."""
        del self.group
        self._placement.release()

    # Before the backward pass

    def before_forward(self, syncs: bool) -> None:
        """Prepare for a backward pass over what this forward pass computes."""
        self._abandon_broken_pass()
        self._syncs = syncs
        self._expects_pass = True
        self.weighing.see_batch(self._world.weight)
        if not syncs:
            self._silent.end(self)
        self._arrivals.report_to(self)

    def _prepare_buckets(self) -> None:
        """Lay buckets out anew where the order has changed."""
        if self._buckets.is_due:
            self._buckets.renew(tail_alone=self._traffic.has_hook)
            self._notes = Notes(self._world, self._buckets.closing, len(self._params), len(self._buffers))
            self._silent.is_due = True
        if self._silent.is_due:
            self._silent.choose(self)

    # The backward pass: begin and arrive

    def begin(self) -> None:
        """Called inside the backward pass before any of its gradients arrives; again without effect."""
        self._abandon_broken_pass()
        if self._armed is not None:
            return
        self._expects_pass = True
        self.weighing.begin(self._world.weight, (self._params[index] for index in self._touched))
        if not self._syncs:
            return
        self._prepare_buckets()
        if self._silent.has_any():
            # They were there before the pass, or nothing has told of it before they came: they are sent either way.
            self._touched |= self._silent.found()
            self._silent.end(self)
        self._placement.begin()
        self._placement.reduction.begin()
        for bucket in self._buckets.all:
            bucket.offer()
        end = PassEnd(self.finish)
        self._armed = weakref.ref(end)
        if self._observed is None:
            self.lender.open(self.step, self._armed)
        end.queue()
        self._is_heard = bool(self._world.events)
        if self._is_heard:
            self._world.events.emit(Kind.BACKWARD, self.step)

    def arrive(self, index: int, param: Tensor) -> None:
        """The gradient of parameter `index` is in `param.grad`: into its bucket, and full buckets away."""
        if not self._expects_pass:
            return  # Another wrapper's pass, or the module was called by itself.
        if not self._syncs:
            self._touched.add(index)
            return
        if self._armed is None:
            self.begin()
        self._has_arrived = True
        if self._observed is not None:
            self._observed.append(index)
        place = self._buckets.places[index]
        if place is None or index in self._buckets.deferred or place[0].is_apart:
            self._touched.add(index)
            if place is None and index not in self._sparse and not self._is_in_rows(index):
                self._extra.add(index)
            return
        bucket, slot = place
        if bucket.is_launched:
            self._extra.add(index)
            return
        begun_ns = time.perf_counter_ns() if self._is_heard else 0
        if bucket.waits[slot] or not self._traffic.vacate(bucket, self.step):
            bucket.put_later(slot)
        else:
            bucket.put(slot, param, self.weighing.factor)
        if bucket.is_ready():
            if self._is_heard:
                self._world.events.emit(Kind.FULL, self.step, bucket.place, bucket.num_bytes)
            if self._partials is None or self._observed is None:  # Portions show themselves in the first step.
                self._departures.launch_full(self.step)
        if begun_ns:
            self._spent_ns += time.perf_counter_ns() - begun_ns

    def hear_all(self) -> None:
        """Nothing will tell of the next pass before its gradients do: let each of them."""
        self._silent.end(self)

    def _is_in_rows(self, index: int) -> bool:
        return self._rows is not None and index in self._rows.active

    # The backward pass: finish

    def finish(self) -> None:
        """The backward pass has ended: send the rest, wait, hand out. Called by the engine."""
        self._disarm()
        if self._has_arrived or any(bucket.has_any() for bucket in self._buckets.all):
            self._finish()
        else:  # The pass reached no parameter, as torch.autograd.grad for inputs.
            for bucket in self._buckets.all:
                bucket.withdraw()

    def _disarm(self) -> None:
        self._armed = None
        self.lender.close()

    def finish_without_pass(self) -> None:
        """End a step in which this worker's last shard has no samples."""
        self._prepare_buckets()
        self._placement.begin()
        self._finish()

    def _finish(self) -> None:
        if self._world.events:
            self._traffic.tell_arrivals(self._departures.left, self.step)
            self._world.events.emit(Kind.WAITING, self.step, spent_ns=self._spent_ns)
        try:
            self._look_for_late_ones()
            for bucket in self._departures.staying:
                self._traffic.vacate(bucket, self.step)
                if not bucket.is_apart:
                    bucket.fill_missing(self.weighing.factor)
                if bucket is not self._buckets.closing:
                    self._departures.launch(bucket, self.step, is_over=True)
            if self._rows is not None:
                self._extra |= self._rows.unknown()
            self._notes.write(
                self.weighing.counted,
                unused=arrivals.missing(self._buckets, self._touched),
                changed=self._buffers.changed(),
                explicit=self.weighing.is_explicit,
                extra=bool(self._extra),
            )
            self._close(is_active=True)
        finally:
            self._reset()
        if self._world.events:
            self._world.events.emit(Kind.SYNCED, self.step - 1)

    def _look_for_late_ones(self) -> None:
        """Find gradients that came without a word when they were not expected any more."""
        late = {index for bucket in self._departures.left for index in bucket.late()}
        others = self._departures.staying[:-1]
        self._extra |= late
        self._is_disordered = bool(late) or any(bucket.is_held_up and bucket.take_silent() for bucket in others)

    def shadow(self) -> int:
        """Take part in a step with nothing to add; returns how many workers had something."""
        self._prepare_buckets()
        self.weighing.withdraw()
        for bucket in self._buckets.all:
            bucket.flat.zero_()
        try:
            self._notes.write(0.0, unused=(), changed=(), explicit=False, active=False)
            return self._close(is_active=False)
        finally:
            self._reset()

    def _abandon_broken_pass(self) -> None:
        """Make a step void whose backward pass failed here, so that nobody waits for it or uses it."""
        if self._armed is not None and self._armed() is None:
            self.abandon()

    def abandon(self) -> None:
        """Make the step in flight void on all workers: this one cannot do its part."""
        self._disarm()
        self._prepare_buckets()
        try:
            for bucket in self._departures.staying:
                bucket.take_silent()
            self._placement.abandon()
            self._notes.write(0.0, unused=(), changed=(), explicit=False, void=True)
            self._departures.exchange(self._notes, self.step)
            self._world.gather(True)  # The others ask who it was: see `Sums.settle`.
        finally:
            self._reset()

    def _close(self, *, is_active: bool) -> int:
        """Send what is left, wait for everything, hand it out; returns how many workers had a batch."""
        self._departures.exchange(self._notes, self.step)
        self._sums.settle(self._notes, self.step, is_active=is_active)
        num_active = self._notes.num_active
        gauge = self.gauge
        self._sums.hand_out(
            self._notes,
            self.step,
            self.group,
            touched=self._touched,
            late=self._extra,
            see_rows=gauge.see_rows if gauge is not None and gauge.is_due(self.step) else None,
            is_active=is_active,
        )
        self._is_handed_out = True
        if gauge is not None:
            gauge.see_sums(self.step, self._buckets.all)
        if self._observed is not None:
            order = self._world.broadcast(self._observed)
            arrivals.learn_order(self._buckets, order, has_one_order=self._has_one_order)
            self._silent.expect(order)
            self._observed = None
            self._learn_rows()
        self._placement.reduction.end()
        self.step += 1
        return num_active

    def _learn_rows(self) -> None:
        if self._rows is not None:
            apart = self._world.broadcast(self._rows.learnt())
            self._rows.adopt(apart)
            self._buckets.leave_out(apart)

    def _reset(self) -> None:
        if not self._is_handed_out:
            self._drop()
        self._is_handed_out = False
        for bucket in self._buckets.all:
            self._silent.is_due |= self.lender.learn_from(bucket)
            bucket.reset()
        self._departures.reset()
        self._spent_ns = 0
        self._has_arrived = False
        self._expects_pass = False
        self._touched.clear()
        self._extra.clear()
        self._traffic.reset()
        if self._is_disordered:
            self._silent.end(self)
        if self._partials is not None:
            self._partials.clear()
        if self._rows is not None:
            self._rows.forget()

    def _drop(self) -> None:
        """The step is void: what of its gradients is not in buckets goes the way of those that are."""
        for bucket in self._buckets.all:
            bucket.withdraw()
        for index in self._rows.active if self._rows is not None else ():
            self._params[index].grad = None
