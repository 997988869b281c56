"""Which gradients travel when: the order of buckets, their overlap with the backward pass, and its end.

The phases of a synchronised backward pass, in order:

    begin     the first gradient is about to be computed: settle the weight, ask autograd to call `finish`
    arrive    once per gradient: into its bucket; full buckets leave in turn
    finish    what did not come is sent as it is; wait; hand the reduced gradients out

One order for all. Buckets are launched strictly in the order of the plan, and all of them in every step, whatever
arrived here: so no control flow on one worker can make it send something that the others do not expect. The last
bucket closes the step: it is held back until this worker's backward pass has ended well, and its notes say so.

A pass that raises. The engine drops the callback that would have called `finish`, and with it the only reference
to the object that the reducer watches: that is how a broken pass is told from one in progress (which may contain
others, under re-entrant checkpointing). At its next forward or backward pass the worker sends the rest of that step
with a note that makes the step void; the others, who waited for it, raise StepVoid instead of using half a sum.

Gradients that no bucket can take (of parameters unfrozen after the plan was made, or arriving again after their
bucket has left) are announced in the notes and reduced in an extra round at the end of the same pass; from the
next pass on the plan has a place for them.
"""

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.events import Kind
from lockstep.replica import sparse, words
from lockstep.replica.bucket import Bucket
from lockstep.replica.buckets import Buckets
from lockstep.replica.buffers import Buffers
from lockstep.replica.gauge import Gauge
from lockstep.replica.hook import CommHook
from lockstep.replica.notes import Notes, tail_numel
from lockstep.replica.partials import Partials
from lockstep.replica.placement import Placement
from lockstep.replica.shard_buffers import ShardBuffers
from lockstep.replica.weighing import Unweighed, Weighing
from lockstep.replica.wrapping import Granularity
from lockstep.world import World


class Reducer:
    """The gradients of one replica on their way; one per wrapped model and worker."""

    def __init__(
        self,
        world: World,
        names: Sequence[str],
        params: Sequence[Tensor],
        *,
        trained: Sequence[int],
        sparse_params: frozenset[int],
        buffers: Buffers | ShardBuffers,
        granularity: Granularity,
        group: dist.ProcessGroup,
        placement: Placement,
        partials: Partials | None = None,
    ) -> None:
        self._world = world
        self._names = names
        self._params = params
        self._sparse = sparse_params
        self._buffers = buffers
        self.group = group
        self._placement = placement
        self._partials = partials
        """Sums of earlier shards, where all is added along a tree: then also no gradient may come too late for its
        bucket, since it would be added in another order."""
        self.weighing = Weighing(world.size) if partials is None else Unweighed()
        self.is_joining = False
        """Whether workers may run out of batches at different steps."""
        self.is_uneven = False
        """Whether the total weight then is that of those who had a batch, known only after the reduction."""
        self.stops_when_uneven = False
        """Whether the first worker without a batch is an error for all."""
        self.step = 0
        """How many synchronised passes have ended."""
        self._hook: CommHook | None = None
        self._hooked: set[int] = set()
        self._observed: list[int] | None = []
        self._buckets = Buckets(
            params,
            [index for index in reversed(trained) if index not in sparse_params],
            placement,
            cap_bytes=granularity.cap_bytes,
            share_of_rest=granularity.share_of_rest,
            tail_numel=tail_numel(len(params), len(buffers)),
        )
        self._renew_buckets()
        # The pass in flight.
        self._syncs = True
        self._expects_pass = False
        self._armed: weakref.ref[_Finish] | None = None
        self._has_arrived = False
        self._num_launched = 0
        self._touched: set[int] = set()
        """Parameters whose gradients were accumulated here and are in no bucket yet."""
        self._extra: set[int] = set()
        """Parameters whose gradients no bucket of this step can take."""
        self._told: set[int] = set()
        """Places of buckets that listeners know to have arrived."""
        self.gauge: Gauge | None = None
        """Measures gradients on their way, where somebody wants to know."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All of them, in launch order."""
        return self._buckets.all

    @property
    def names(self) -> Sequence[str]:
        """Of the parameters, by number."""
        return self._names

    def use_hook(self, hook: CommHook) -> None:
        """Reduce buckets by `hook` from the next pass on."""
        self._hook = hook
        self._buckets.is_due = True

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
        for index, param in enumerate(self._params):
            if param.requires_grad and index not in self._hooked:
                self._watch(index, param)

    def _watch(self, index: int, param: Tensor) -> None:
        self._hooked.add(index)
        # Weak, so that a module can be wrapped anew: the hook of a wrapper that is gone does nothing.
        reducer = weakref.ref(self)

        def arrived(param: Tensor) -> None:
            if (alive := reducer()) is not None:
                alive.arrive(index, param)

        param.register_post_accumulate_grad_hook(arrived)

    def _renew_buckets(self) -> None:
        self._buckets.renew(tail_alone=self._hook is not None)
        self._notes = Notes(self._world, self._buckets.closing, len(self._params), len(self._buffers))

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
        if self._buckets.is_due:
            self._renew_buckets()
        self._placement.begin()
        self._placement.reduction.begin()
        finish = _Finish(self)
        self._armed = weakref.ref(finish)
        torch.autograd.Variable._execution_engine.queue_callback(finish)
        if self._world.events:
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
        if place is None or self._buckets.is_deferred(index):
            self._touched.add(index)
            if place is None and index not in self._sparse:
                self._extra.add(index)
            return
        bucket, slot = place
        if bucket.is_launched:
            self._extra.add(index)
            return
        if self._vacate(bucket):
            bucket.put(slot, param, self.weighing.factor)
        else:
            bucket.put_later(slot)
        if bucket.num_missing == 0:
            if self._world.events:
                self._world.events.emit(Kind.FULL, self.step, bucket.place, bucket.num_bytes)
            self._launch_full()

    def _launch_full(self) -> None:
        """Launch, in turn, the buckets that are full; not the one that closes the step."""
        if self._partials is not None and self._observed is not None:
            return  # Gradients that come in portions show themselves in the first step.
        while self._num_launched < len(self._buckets.all) - 1:
            bucket = self._buckets.all[self._num_launched]
            if bucket.num_missing:
                return
            self._launch(bucket)

    def _vacate(self, bucket: Bucket) -> bool:
        """Whether `bucket` has its memory for itself; waits for the one before it if that is on its way."""
        before = bucket.previous
        if before is None or before.is_settled:
            return True
        if not before.is_launched:
            return False
        self._settle(before)
        return True

    def _launch(self, bucket: Bucket) -> None:
        self._num_launched += 1
        self._vacate(bucket)
        bucket.put_waiting(self.weighing.factor)
        if self._partials is not None:
            self._partials.complete(bucket)
        if self.gauge is not None:
            self.gauge.see_own(self.step, bucket)
        bucket.launch(self._send)
        if self._world.events:
            self._world.events.emit(Kind.LAUNCHED, self.step, bucket.place, bucket.num_bytes)
            self._tell_arrivals()

    def _tell_arrivals(self) -> None:
        """Tell of buckets that have arrived while others were being filled: nobody has waited for them.

        Not on a GPU, where the host is ahead of what it queues, and its own clock says nothing.
        """
        if self._world.device.type != "cpu":
            return
        for bucket in self._buckets.all[: self._num_launched]:
            if bucket.place not in self._told and bucket.work is not None and bucket.work.is_completed():
                self._tell_reduced(bucket)

    def _tell_reduced(self, bucket: Bucket) -> None:
        if self._world.events and bucket.place not in self._told:
            self._told.add(bucket.place)
            self._world.events.emit(Kind.REDUCED, self.step, bucket.place, bucket.num_bytes)

    def _send(self, bucket: Bucket) -> Any:
        if self._hook is not None and bucket.plan.slots:
            return self._hook.launch(bucket)
        return self._send_plainly(bucket)

    def _send_plainly(self, bucket: Bucket) -> Any:
        return self._placement.send(bucket)

    def _all_reduce(self, bucket: Bucket) -> Any:
        return dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    # The backward pass: finish

    def finish(self) -> None:
        """The backward pass has ended: send the rest, wait, hand out. Called by the engine."""
        self._armed = None
        if self._has_arrived:  # Else a pass that reached no parameter, as torch.autograd.grad for inputs.
            self._finish()

    def finish_without_pass(self) -> None:
        """End a step in which this worker's last shard has no samples."""
        if self._buckets.is_due:
            self._renew_buckets()
        self._placement.begin()
        self._finish()

    def _finish(self) -> None:
        if self._world.events:
            self._tell_arrivals()
            self._world.events.emit(Kind.WAITING, self.step)
        try:
            for bucket in self._buckets.all[self._num_launched :]:
                self._vacate(bucket)
                bucket.fill_missing(self.weighing.factor)
                if bucket is not self._buckets.closing:
                    self._launch(bucket)
            self._notes.write(
                self.weighing.counted,
                unused=self._unused(),
                changed=self._buffers.changed(),
                explicit=self.weighing.is_explicit,
                extra=bool(self._extra),
            )
            self._close(is_active=True)
        finally:
            self._reset()
        if self._world.events:
            self._world.events.emit(Kind.SYNCED, self.step - 1)

    def shadow(self) -> int:
        """Take part in a step with nothing to add; returns how many workers had something."""
        if self._buckets.is_due:
            self._renew_buckets()
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
        self._armed = None
        if self._buckets.is_due:
            self._renew_buckets()
        try:
            self._placement.abandon()
            self._notes.write(0.0, unused=(), changed=(), explicit=False, void=True)
            self._launch_rest()
            self._await_all()
            self._world.gather(True)  # The others ask who it was: see `_close`.
        finally:
            self._reset()

    def _close(self, *, is_active: bool) -> int:
        """Send what is left, wait for everything, hand it out; returns how many workers had a batch."""
        self._launch_rest()
        self._await_all()
        notes = self._notes
        if notes.num_void:
            raise words.void(self._world, self.step)
        self._require_one_kind_of_weight()
        if self.stops_when_uneven and is_active and notes.num_active < self._world.size:
            raise UsageError(f"worker {self._world.rank}: another worker ran out of batches before this one.")
        self.weighing.settle(notes.counted, is_explicit=notes.num_explicit > 0, is_uneven=self.is_uneven)
        if self.weighing.divisor is not None:
            for bucket in self._buckets.all:
                self._placement.divide(bucket, self.weighing.divisor)
            if notes.num_explicit:
                self._placement.reduction.rescale(self.weighing.divisor)
        if self.gauge is not None:
            self.gauge.see_sums(self.step, self._buckets.all)
        num_active = notes.num_active
        changed = notes.changed()
        extras = self._extra_round() if notes.has_extra else {}
        if is_active:
            self._hand_out(extras)
        self._exchange_sparse(is_active)
        if changed:
            self._buffers.sync(changed, self.authority(is_active), self.group)
        self._learn_order()
        self._placement.reduction.end()
        self.step += 1
        return num_active

    def _unused(self) -> list[int]:
        """Parameters for which this worker has no gradient of its own."""
        unused = []
        for index, place in enumerate(self._buckets.places):
            if index not in self._touched and (place is None or not place[0].has(place[1])):
                unused.append(index)
        return unused

    def _launch_rest(self) -> None:
        for bucket in self._buckets.all[self._num_launched :]:
            self._launch(bucket)
        self._notes.launch()

    def _await_all(self) -> None:
        self._notes.wait()
        for bucket in self._buckets.all:
            if not bucket.is_settled:
                self._settle(bucket)

    def _settle(self, bucket: Bucket) -> None:
        self._await(bucket)
        self._placement.settle(bucket)
        bucket.work = None  # It may hold copies of the bucket: gloo's reduce-scatter does.
        bucket.is_settled = True
        self._tell_reduced(bucket)

    def _await(self, bucket: Bucket) -> None:
        if self._hook is not None and bucket.plan.slots:
            self._hook.wait(bucket, self._world, words.reducing(self._names, bucket, self.step))
        else:
            self._await_plainly(bucket)

    def _await_plainly(self, bucket: Bucket) -> None:
        if bucket.flat.device.type == "cpu":
            self._world.wait(bucket.work, words.reducing(self._names, bucket, self.step))
        elif bucket.work is not None:
            bucket.work.wait()

    def _require_one_kind_of_weight(self) -> None:
        if self._notes.num_explicit not in (0, self._notes.num_active):
            raise words.mixed_weights(self._world, self._notes.num_explicit, self._notes.num_active)

    def _hand_out(self, extras: dict[int, Tensor]) -> None:
        """Let `param.grad` be the reduced gradient wherever some worker has used the parameter."""
        used = self._notes.used()
        for index in self._touched:
            used[index] = True
        for bucket in self._buckets.all:
            self._placement.hand_out(bucket, used)
        for index, extra in extras.items():
            self._placement.add(self._params[index], index, self._buckets.places[index] is not None, extra)
        self._placement.end()

    def _exchange_sparse(self, is_active: bool) -> None:
        for index in sorted(self._sparse):
            if self._notes.is_used(index):
                param = self._params[index]
                total = sparse.exchange(param, self.weighing.factor, self._world, self.group)
                if is_active:
                    param.grad = total if self.weighing.divisor is None else total / self.weighing.divisor

    def _extra_round(self) -> dict[int, Tensor]:
        """Reduce, now, what no bucket took on some worker; from the next pass on it has a place in the plan."""
        indices = sorted(set().union(*self._world.gather(self._extra)))
        if self._partials is not None:
            raise words.came_in_portions(self._world, [self._names[index] for index in indices], self.step)
        reduced: dict[int, Tensor] = {}
        for bucket in self._buckets.temporary(indices):
            for number, slot in enumerate(bucket.plan.slots):
                if slot.index in self._extra:
                    bucket.put(number, bucket.params[number], self.weighing.factor)
                reduced[slot.index] = bucket.views[number]
            bucket.launch(self._all_reduce)
            self._await_plainly(bucket)
            if self.weighing.divisor is not None:
                bucket.flat_grads.div_(self.weighing.divisor)
        self._buckets.make_room_for(indices)
        return reduced

    def authority(self, is_active: bool) -> int:
        """The worker whose buffers count: the first, or the first that still has batches."""
        if not self.is_joining:
            return 0
        mine = torch.tensor(self._world.rank if is_active else self._world.size)
        work = dist.all_reduce(mine, dist.ReduceOp.MIN, group=self._world.host_group, async_op=True)
        self._world.wait(work, "choosing whose buffers count")
        return int(mine) % self._world.size

    def _learn_order(self) -> None:
        """After the first step: expect gradients in the order in which worker 0 saw them."""
        if self._observed is None:
            return
        observed = self._world.broadcast(self._observed)
        self._buckets.expect(observed)
        in_portions = [index for index, count in Counter(observed).items() if count > 1]
        if self._partials is not None and in_portions:
            self._buckets.make_room_for(in_portions)
        self._observed = None

    def _reset(self) -> None:
        for bucket in self._buckets.all:
            bucket.reset()
        self._num_launched = 0
        self._has_arrived = False
        self._expects_pass = False
        self._touched.clear()
        self._extra.clear()
        self._told.clear()
        if self._partials is not None:
            self._partials.clear()


class _Finish:
    """The callback at the end of one backward pass; it lives as long as the engine still means to call it."""

    __slots__ = ("__weakref__", "_reducer")

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        self._reducer.finish()
