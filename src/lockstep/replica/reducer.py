"""Which gradients travel when: the order of buckets, their overlap with the backward pass, and its end.

The phases of a synchronised backward pass, in order:

    begin     the first gradient is about to be computed: settle the weight, ask autograd to call `finish`
    arrive    once per gradient: into its bucket; full buckets leave in turn
    finish    what did not come is sent as it is; wait; hand the reduced gradients out

One order for all: see bucket_queue.py. The last bucket closes the step: it is held back until this worker's backward
pass has ended well, and its notes say so.

A pass that raises never comes to `finish` (see autograd_hooks.py). At its next forward or backward pass the worker
sends the rest of that step with a note that makes the step void; the others, who waited for it, raise StepVoid instead
of using half a sum.

Gradients that no bucket could take (of parameters unfrozen after the plan was made, or arriving again after their
bucket has left) are announced in the notes and reduced at the end, in an extra round; from the next pass on the plan
has a place for them.
"""

import contextlib
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.events import Kind
from lockstep.replica import logging_data, sparse
from lockstep.replica.agreement import SameInputs
from lockstep.replica.autograd_hooks import GradHooks, call_at_end
from lockstep.replica.bucket import Bucket, Buckets, BucketStage
from lockstep.replica.bucket_queue import BucketQueue, GradObserver
from lockstep.replica.buffers import Buffers
from lockstep.replica.collectives import finish
from lockstep.replica.grad_weight import GradWeight
from lockstep.replica.logging_data import PassTimes, clock
from lockstep.replica.optimizer import BackwardSteps
from lockstep.replica.placement import Placement, SplitPlacement
from lockstep.replica.reduction import CodedReduction, HookReduction, Partials
from lockstep.replica.step_state import JoinMode, PassPhase, PassProgress, StepNotes, StepState
from lockstep.torch_private import profiled
from lockstep.weight import Weight, in_force, refuse_both, weigh_alike
from lockstep.wire.auto import ChoosingReduction
from lockstep.wire.reduction import WireReduction
from lockstep.world import World


@dataclass(frozen=True, slots=True)
class SharedState:
    """What of a model is reduced or kept equal after every step; the same on all workers."""

    names: Sequence[str]
    """Of the parameters, by number."""
    params: Sequence[Tensor]
    sparse_params: frozenset[int]
    """Numbers of those whose gradients will be sparse."""
    buffers: Buffers
    """What is kept equal besides."""


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
        first_end: "weakref.WeakMethod[Callable[[], None]] | None" = None,
        skips_unused: bool = False,
    ) -> None:
        """first_end: called when gradients have been handed out for the first time.

        skips_unused: send no bucket for what no worker used in the first step, until some worker uses it.
        """
        self._world = world
        self.shared = shared
        self.group = group
        self._placement = placement
        self.grad_weight = GradWeight(world.size if partials is None else None)
        self._queue = BucketQueue(world, shared.names, buckets, placement, self.grad_weight, partials)
        self._first_end = first_end
        self._skips_unused = skips_unused
        self._join_mode: JoinMode | None = None
        """Whether workers may run out of batches at different steps, and what that means."""
        self.inputs: SameInputs | None = SameInputs(world)
        """What looks whether the workers train on different samples, until it knows."""
        self._hooks = GradHooks(shared.params, self.arrive)
        self._backward_steps = BackwardSteps(shared.params, are_split=isinstance(placement, SplitPlacement))
        self._number = world.replicas.pass_ends.next_number()
        self._under_way: Callable[[], Any] = lambda: None
        """The backward pass that has begun and not ended, whether it sends or accumulates."""
        self._now = StepState()
        self.times = PassTimes()
        """When the phases of the last passes were."""
        self.is_graph_static = True
        """Whether the same parameters have been used here in all steps so far."""
        self._unused: list[int] | None = None
        self._prepare_buckets()
        self._first_sizes = logging_data.sizes(self.buckets)
        """Of buckets before the first step."""

    @property
    def step(self) -> int:
        """How many synchronised passes have ended."""
        return self._queue.step

    @property
    def observer(self) -> GradObserver | None:
        """What measures gradients on their way, where that is wanted."""
        return self._queue.observer

    @observer.setter
    def observer(self, observer: GradObserver | None) -> None:
        self._queue.observer = observer

    @property
    def buckets(self) -> Sequence[Bucket]:
        """All of them, in launch order."""
        return self._queue.buckets.all

    # For other threads: numbers and names that the training thread writes anyway, no tensor and nothing of autograd's.

    def progress(self) -> PassProgress:
        """How far this replica has come."""
        now, names, buckets = self._now, self.shared.names, list(self._queue.buckets.all)
        num_launched = self._queue.num_launched
        lacking: tuple[str, ...] = ()
        if num_launched < len(buckets):
            bucket = buckets[num_launched]
            # What travels apart from buckets is noted there.
            arrived = set(now.touched) if bucket.place in self._queue.buckets.unsent else ()
            lacking = tuple(names[index] for index in bucket.lacking() if index not in arrived)
        phase = PassPhase.BETWEEN
        if now.pass_end is not None:
            phase = PassPhase.BACKWARD
        elif now.has_arrived or num_launched:
            phase = PassPhase.REDUCING
        elif now.is_expected:
            phase = PassPhase.FORWARD if now.syncs else PassPhase.ACCUMULATING
        return PassProgress(self.step, phase, num_launched, len(buckets), lacking)

    def describe_bucket(self, place: int) -> tuple[int, tuple[str, ...]]:
        """Bytes of the bucket launched as number `place` and its parameters' names; none if there is no such bucket."""
        buckets = list(self._queue.buckets.all)
        if not 0 <= place < len(buckets):
            return 0, ()
        return buckets[place].num_bytes, tuple(self.shared.names[index] for index in buckets[place].indices)

    def logged(self) -> dict[str, Any]:
        """What torch's DDP logs of its reducer, by torch's names."""
        data = {"iteration": self.times.iteration, "bucket_sizes": self._first_sizes}
        if self.step:
            buckets = self._queue.buckets
            data |= logging_data.of_buckets(self.shared.params, buckets, self.times.order, self._unused or ())
        return data | self.times.data() if self._world.device.type == "cpu" else data

    # Before the backward pass

    def before_forward(self, syncs: bool, weight: Weight | None) -> None:
        """Prepare for a backward pass over what this forward pass computes."""
        self._abandon_broken_pass()
        if self._split is not None:
            self._split.before_pass()
        now = self._now
        now.syncs, now.weight, now.is_expected = syncs, weight, True
        self._hooks.attach()
        if syncs:
            self.times.before_forward(self.step)

    def send_next_pass(self) -> None:
        """Let the next backward pass send, though the forward passes that it is over were to accumulate."""
        self._abandon_broken_pass()
        self._now.syncs = self._now.is_expected = True
        self._hooks.attach()

    @contextlib.contextmanager
    def joining(self, mode: JoinMode) -> Iterator[None]:
        """A block in which workers may run out of batches at different steps."""
        self._join_mode = mode
        try:
            yield
        finally:
            self._join_mode = None

    def trust_inputs(self) -> None:
        """Do not look whether the workers train on different samples: the caller knows."""
        self.inputs = None

    def use_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Reduce buckets by a hook of the user's from the next pass on, which is to see all gradients."""
        self._placement.reduction = HookReduction(state, hook, self.group)
        self._queue.buckets.is_due = True

    def forget(self) -> None:
        """Drop what passes without communication have left here: they were only tried."""
        self._now = StepState()

    def _prepare_buckets(self) -> None:
        """Lay buckets out anew where the order has changed."""
        if not self._queue.buckets.is_due:
            return
        reduction = self._placement.reduction
        self._queue.buckets.renew(tail_alone=reduction.sends_tail_apart, num_lanes=reduction.num_lanes)
        if isinstance(reduction, CodedReduction):
            reduction.adopt(self._queue.buckets.all)
        if self._split is not None:
            self._split.adopt(self._queue.buckets.all)
        shared = self.shared
        self._notes = StepNotes(self._world, self._queue.buckets.closing, len(shared.params), len(shared.buffers))

    # The backward pass: begin and arrive

    def begin(self, weight: Weight | None) -> None:
        """Called inside the backward pass before any of its gradients arrives, for every output that it comes to.

        weight: of the batch that the output was computed from. The first one counts; others must be like it.
        """
        self._abandon_broken_pass()
        now = self._now
        if self._under_way() is not None:
            if not (self.grad_weight.is_explicit or weigh_alike(weight, now.weight, self._world.size)):
                raise refuse_both(weight, now.weight)
            return
        now.is_expected, now.weight = True, weight
        self._backward_steps.find()
        if self._split is not None:
            self._split.before_pass()
        self.grad_weight.begin(
            in_force(self._world.accumulation.in_force, weight), (self.shared.params[index] for index in now.touched)
        )
        if not now.syncs:
            self._under_way = self._at_end(lambda: None)
            return
        self.times.backward_ns = clock()
        self._open_step()
        for bucket in self._queue.buckets.all:
            bucket.mend_views()
        self._under_way = now.pass_end = self._at_end(self.finish)
        if self._world.events:
            self._world.events.emit(Kind.BACKWARD, self.step)

    def _at_end(self, end: Callable[[], None]) -> "weakref.ref[Any]":
        return call_at_end(end, self._world.replicas.pass_ends, self._number)

    @property
    def _split(self) -> SplitPlacement | None:
        return self._placement if isinstance(self._placement, SplitPlacement) else None

    def _open_step(self) -> None:
        self._prepare_buckets()
        if self._split is not None:
            self._split.begin()
        if isinstance(self._wire, ChoosingReduction):
            self._wire.begin_pass()

    @property
    def _wire(self) -> WireReduction | None:
        reduction = self._placement.reduction
        return reduction.wire if isinstance(reduction, CodedReduction) else None

    def arrive(self, index: int, param: Tensor) -> None:
        """The gradient of parameter `index` is in `param.grad`: into its bucket, and full buckets away."""
        now = self._now
        if not now.is_expected:
            return  # Another wrapper's pass, or the module was called by itself.
        if not now.syncs:
            now.touched.add(index)
            return
        if now.pass_end is None:
            self.begin(now.weight)
            now = self._now  # A broken pass may have come to its end there.
        now.has_arrived = True
        if param.grad is None:
            return  # The pass came to the parameter, and brought nothing.
        if self._placement.gathered is not None:
            self._placement.gathered.look()
        if not self.step or self.times.is_sampled:
            now.observed.append(index)
        place = self._queue.buckets.places[index]
        if place is None or index in self._queue.buckets.deferred or place[0].place in self._queue.buckets.unsent:
            now.touched.add(index)
            if self._has_no_place(index):
                now.late.add(index)
            return
        bucket, slot = place
        if bucket.stage is not BucketStage.FILLING:
            now.late.add(index)
            return
        begun_ns = time.perf_counter_ns() if self._world.events else 0
        self._queue.put(bucket, slot)
        if not bucket.num_missing and (self.step or not self._queue.has_one_order):
            # Gradients that come in portions show themselves in the first step.
            self._queue.launch_full()
        if begun_ns:
            now.spent_ns += time.perf_counter_ns() - begun_ns

    def _has_no_place(self, index: int) -> bool:
        """Whether nothing takes the gradient of a parameter in this step."""
        return self._queue.buckets.places[index] is None and not self._travels_apart(index)

    def _travels_apart(self, index: int) -> bool:
        """Whether the gradient of a parameter that has no bucket is sent otherwise."""
        return index in self.shared.sparse_params

    # The end of a step

    def finish(self) -> None:
        """The backward pass has ended: send the rest, wait, hand out. Called by autograd's engine."""
        now, weight = self._now, self.grad_weight
        now.pass_end = None
        self.times.computed_ns = clock()
        if not now.has_arrived:  # The pass reached no parameter, as torch.autograd.grad for inputs.
            if self._placement.gathered is not None:
                self._placement.gathered.end_pass()
            return
        if self._world.events:
            self._queue.tell_arrivals()
            self._world.events.emit(Kind.WAITING, self.step, spent_ns=now.spent_ns)
        if now.touched and None in self._queue.buckets.places:  # Accumulated, and perhaps not in the pass that sends.
            now.late.update(index for index in now.touched if self._has_no_place(index))
        with profiled("search_unused_parameters"):
            unused = self._queue.buckets.missing(now.touched)
        self.is_graph_static = self.is_graph_static and self._unused in (None, unused)
        self._unused = unused
        try:
            self._notes.write(
                weight.counted,
                unused,
                self.shared.buffers.changed(),
                explicit=weight.is_explicit,
                extra=bool(now.late),
            )
            self._queue.exchange(self._notes, fills=True)
            self.times.launched_ns, self.times.reduced_ns = self._queue.launched_ns, clock()
            if now.observed:
                self.times.order = now.observed
            self._conclude(is_active=True)
        finally:
            self._reset()
        self._backward_steps.step()
        if self._world.events:
            self._world.events.emit(Kind.SYNCED, self.step - 1)

    def finish_without_pass(self) -> None:
        """End a step in which this worker's last shard has no samples."""
        if self._split is not None:
            self._split.before_pass()
        self._open_step()
        self._now.has_arrived = True
        self.finish()

    def send_accumulated(self, weight: Weight | None) -> None:
        """End a step by what earlier passes left in `param.grad`, since none of them has sent it.

        weight: of all of it; None for that of the batch which these passes were over.
        """
        self._abandon_broken_pass()
        if self._split is not None:
            self._split.before_pass()
        now = self._now
        now.touched.update(index for index, param in enumerate(self.shared.params) if param.grad is not None)
        now.syncs = now.has_arrived = True
        self.grad_weight.begin(in_force(weight, now.weight), (self.shared.params[index] for index in now.touched))
        self._open_step()
        self.finish()

    def shadow(self, *, keeps_grads: bool = True) -> int:
        """Take part in a step with nothing to add; returns how many workers had something.

        keeps_grads: False gives this worker the means as well, for an optimizer that updates its part of the model.
        """
        self._prepare_buckets()
        self.grad_weight.withdraw()
        for bucket in self._queue.buckets.all:
            bucket.flat.zero_()
        try:
            self._notes.write(0.0, active=False)
            self._queue.exchange(self._notes)
            self._conclude(is_active=False)
            if not keeps_grads:
                self._placement.hand_out(self._queue.buckets.all, self._notes.used())
            return self._notes.num_active
        finally:
            self._reset()

    def _abandon_broken_pass(self) -> None:
        """Make a step void whose backward pass failed here, so that no worker waits for it or uses it."""
        end = self._now.pass_end
        if end is not None and end() is None:
            self.abandon()

    def abandon(self) -> None:
        """Make the step in flight void on all workers: this one cannot do its part."""
        self._now.pass_end = None
        self._prepare_buckets()
        try:
            self._notes.write(0.0, void=True)
            self._queue.exchange(self._notes)
            self._world.gather_json(True)  # The others ask who it was: see StepNotes.require_valid.
        finally:
            self._reset()

    def _conclude(self, *, is_active: bool) -> None:
        """Let all be what the workers agreed on, if the step counts; one without a batch keeps its gradients."""
        self._notes.require_valid(self.step)
        self._divide()
        self._hand_out(is_active=is_active)
        if self.observer is not None:
            self.observer.see_sums(self.step, self.buckets)
        if not self.step:
            self._learn_order(self._order_of_worker_0())
            if self._skips_unused:
                used = self._notes.used()
                self._queue.buckets.leave_out(index for index in range(len(used)) if not used[index])
            if self._first_end is not None and (compare := self._first_end()) is not None:
                compare()
        if self.inputs is not None and not self.inputs.compare():
            self.inputs = None
        if isinstance(self._wire, ChoosingReduction):
            self._wire.end_pass()
        self._queue.step += 1

    def _divide(self) -> None:
        """Divide the sums by the weight that turned out, where it was not known before."""
        notes, weight, buckets, mode = self._notes, self.grad_weight, self._queue.buckets, self._join_mode
        weight.settle(notes.counted, is_explicit=notes.is_explicit, is_uneven=mode is not None and mode.is_uneven)
        if weight.divisor is not None:
            sent = [bucket for bucket in buckets.all if bucket.place not in buckets.unsent]
            self._placement.divide(sent, weight.divisor)
            if notes.is_explicit and self._wire is not None:
                self._wire.rescale(weight.divisor)

    def _hand_out(self, *, is_active: bool) -> None:
        """Let parameters have their gradients, also those that travel apart; and buffers the values that count."""
        notes, buckets = self._notes, self._queue.buckets
        changed, used = notes.changed(), notes.used()
        extras = self._reduce_late(self._late_anywhere(used, is_active=is_active)) if notes.has_extra else {}
        self._exchange_apart(used, is_active=is_active)
        if is_active:
            has_grad = [any_used or index in self._now.touched for index, any_used in enumerate(used)]
            self._placement.hand_out(buckets.all, has_grad)
            for index, extra in extras.items():
                self._placement.add(self.shared.params[index], index, buckets.places[index] is not None, extra)
            if self._split is not None:
                self._split.agree_on_overflow()
        if changed:
            self.shared.buffers.sync(changed, self._first_with_batch(is_active=is_active), self.group)

    def _first_with_batch(self, *, is_active: bool) -> int:
        """The worker whose buffers count: the first, or the first that still has batches."""
        if self._join_mode is None:
            return 0
        mine = torch.tensor(self._world.rank if is_active else self._world.size)
        least = partial(dist.all_reduce, mine, dist.ReduceOp.MIN, group=self._world.host_group, async_op=True)
        finish(least, self._world, mine.device, "choosing whose buffers count")
        return int(mine) % self._world.size

    def _late_anywhere(self, used: Sequence[bool], *, is_active: bool) -> list[int]:
        """Parameters whose gradients no bucket took on some worker; the same on all."""
        return sorted(set().union(*self._world.gather_json(sorted(self._now.late))))

    def _reduce_late(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Reduce, now, what no bucket took; from the next pass on it has a place in the plan."""
        if self._queue.has_one_order:
            raise self._came_in_portions(indices)
        weight, late = self.grad_weight, self._now.late
        reduced: dict[int, Tensor] = {}
        for bucket in self._queue.buckets.temporary(indices):
            for number, index in enumerate(bucket.indices):
                if index in late:
                    bucket.put(number, weight.factor)
                reduced[index] = bucket.views[number]
            bucket.launch(lambda each: dist.all_reduce(each.flat, group=self.group, async_op=True))
            bucket.wait(self._world, self._queue.words(bucket))
            if weight.divisor is not None:
                bucket.flat_grads.div_(weight.divisor)
        self._queue.buckets.make_room_for(indices)
        return reduced

    def _came_in_portions(self, indices: Sequence[int]) -> UsageError:
        names = ", ".join(repr(self.shared.names[index]) for index in indices[:3])
        return UsageError(
            f"worker {self._world.rank}: the gradient of {names} came in portions in step {self.step}, and not in the "
            "first step, so it cannot be added in the order that gives the same bits on any number of workers. Use "
            "torch.utils.checkpoint with use_reentrant=False."
        )

    def _exchange_apart(self, used: Sequence[bool], *, is_active: bool) -> None:
        """Exchange gradients that travel apart from buckets."""
        weight = self.grad_weight
        for index in sorted(self.shared.sparse_params):
            if used[index]:
                param = self.shared.params[index]
                total = sparse.exchange(param, weight.factor, self._world, self.group)
                if is_active:
                    param.grad = total if weight.divisor is None else total / weight.divisor

    def _order_of_worker_0(self) -> list[int]:
        """In which order worker 0 saw the gradients of this step; those that came in portions stand there twice."""
        mine = self._now.observed
        order = [*dict.fromkeys(mine), *(index for index, count in Counter(mine).items() if count > 1)]
        told = torch.full((2 * len(self.shared.params),), -1)
        told[: len(order)] = torch.tensor(order, dtype=torch.int64)
        group = self._world.host_group
        tell = partial(dist.broadcast, told, group=group, group_src=0, async_op=True)
        finish(tell, self._world, told.device, "learning the order of gradients")
        return [index for index in told.tolist() if index >= 0]

    def _learn_order(self, observed: Sequence[int]) -> None:
        """After the first step: expect gradients in the order in which worker 0 saw them.

        Where all is added in one order, those that came in portions are sent at the end of a pass from now on.
        """
        self._queue.buckets.expect(observed)
        in_portions = [index for index, count in Counter(observed).items() if count > 1]
        if self._queue.has_one_order and in_portions:
            self._queue.buckets.make_room_for(in_portions)

    def _reset(self) -> None:
        """The step has come to its end, or to nothing."""
        self._queue.reset()
        self._now = StepState()

    def detach(self) -> None:
        """Hear of no gradient any more."""
        self._hooks.detach()

    def release(self) -> None:
        """Let go of the group; nothing can be reduced from here on."""
        self._hooks.detach()
        del self.group
        self._placement.release()
