"""What becomes of the sums of a step, once all buckets have arrived on this worker.

    settle      does the step count, and is it one to which all gave the same kind of weight? divide the sums
    hand_out    let parameters have their gradients, also those that travel apart; and buffers the values that count

Gradients that no bucket could take (of parameters unfrozen after the plan was made, or arriving again after their
bucket has left) are announced in the notes and reduced here, in an extra round; from the next pass on the plan has a
place for them.
"""

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.replica import sparse, words
from lockstep.replica.attendance import Attendance
from lockstep.replica.bucket import Bucket
from lockstep.replica.buckets import Buckets
from lockstep.replica.notes import Notes
from lockstep.replica.placement import Placement
from lockstep.replica.shared_state import SharedState
from lockstep.replica.traffic import Traffic
from lockstep.replica.weighing import Weighing
from lockstep.world import World


class Sums:
    """The reduced gradients of one replica, and what else all workers agreed on in a step."""

    def __init__(
        self,
        world: World,
        shared: SharedState,
        buckets: Buckets,
        placement: Placement,
        traffic: Traffic,
        weighing: Weighing,
        attendance: Attendance,
        has_one_order: bool,
    ) -> None:
        self._world = world
        self._shared = shared
        self._buckets = buckets
        self._placement = placement
        self._traffic = traffic
        self._weighing = weighing
        self._attendance = attendance
        self._has_one_order = has_one_order
        """Whether all is added along a tree: then nothing may come too late for its bucket."""

    def settle(self, notes: Notes, step: int, *, is_active: bool) -> None:
        """Raise on all workers unless the step counts; divide the sums by the weight that turned out."""
        if notes.num_void:
            raise words.void(self._world, step)
        if notes.num_explicit not in (0, notes.num_active):
            raise words.mixed_weights(self._world, notes.num_explicit, notes.num_active)
        self._attendance.check(notes.num_active, is_active=is_active)
        is_explicit = notes.num_explicit > 0
        self._weighing.settle(notes.counted, is_explicit=is_explicit, is_uneven=self._attendance.is_uneven)
        if self._weighing.divisor is not None:
            for bucket in self._buckets.all:
                if not bucket.is_apart:
                    self._placement.divide(bucket, self._weighing.divisor)
            if is_explicit:
                self._placement.reduction.rescale(self._weighing.divisor)

    def hand_out(
        self,
        notes: Notes,
        step: int,
        group: dist.ProcessGroup,
        *,
        touched: Set[int],
        late: Set[int],
        see_rows: Callable[[Sequence[Tensor], Sequence[Tensor]], None] | None,
        is_active: bool,
    ) -> None:
        """Let everything be what all workers agreed on; a worker without a batch takes part, and keeps its gradients.

        Parameters in `touched` have a gradient of this worker's own outside of the buckets; no bucket took the
        gradients of `late`. `see_rows` is told of rows that travelled apart.
        """
        changed = notes.changed()
        extras = self._extra_round(notes, late, step, group, is_active=is_active) if notes.has_extra else {}
        self._exchange_rows(notes, group, see_rows, is_active=is_active)
        if is_active:
            self._give(notes, touched, extras)
        self._exchange_sparse(notes, group, is_active=is_active)
        if changed:
            self._shared.buffers.sync(changed, self._attendance.authority(is_active=is_active), group)

    def _give(self, notes: Notes, touched: Set[int], extras: dict[int, Tensor]) -> None:
        """Let `param.grad` be the reduced gradient wherever some worker has used the parameter."""
        used = notes.used()
        for index in touched:
            used[index] = True
        for bucket in self._buckets.all:
            self._placement.hand_out(bucket, used)
        for index, extra in extras.items():
            self._placement.add(self._shared.params[index], index, self._buckets.places[index] is not None, extra)
        self._placement.end()

    def _exchange_sparse(self, notes: Notes, group: dist.ProcessGroup, *, is_active: bool) -> None:
        for index in sorted(self._shared.sparse_params):
            if notes.is_used(index):
                param = self._shared.params[index]
                total = sparse.exchange(param, self._weighing.factor, self._world, group)
                if is_active:
                    param.grad = total if self._weighing.divisor is None else total / self._weighing.divisor

    def _exchange_rows(
        self,
        notes: Notes,
        group: dist.ProcessGroup,
        see: Callable[[Sequence[Tensor], Sequence[Tensor]], None] | None,
        *,
        is_active: bool,
    ) -> None:
        rows = self._shared.rows
        if rows is None:
            return
        used = [index for index in sorted(rows.active) if notes.is_used(index)]
        if used:
            factor, divisor = self._weighing.factor, self._weighing.divisor
            rows.exchange(used, factor, divisor, self._world, group, see, is_active=is_active)
        rows.clear(rows.active.difference(used))

    def _extra_round(
        self, notes: Notes, late: Set[int], step: int, group: dist.ProcessGroup, *, is_active: bool
    ) -> dict[int, Tensor]:
        """Reduce, now, what no bucket took on some worker; from the next pass on it has a place in the plan."""
        indices = sorted(set().union(*self._world.gather(late)))
        if (rows := self._shared.rows) is not None:
            # What nobody has used in this step stays as it is; what cannot travel as rows here does not elsewhere.
            indices = [index for index in indices if index not in rows.active or notes.is_used(index)]
            late = late | {index for index in rows.retire(indices) if is_active}
        if self._has_one_order:
            raise words.came_in_portions(self._world, [self._shared.names[index] for index in indices], step)

        def send(bucket: Bucket) -> Any:
            return dist.all_reduce(bucket.flat, group=group, async_op=True)

        reduced: dict[int, Tensor] = {}
        for bucket in self._buckets.temporary(indices):
            for number, slot in enumerate(bucket.plan.slots):
                if slot.index in late:
                    bucket.put(number, bucket.params[number], self._weighing.factor)
                reduced[slot.index] = bucket.views[number]
            bucket.launch(send)
            self._traffic.await_plainly(bucket, step)
            if self._weighing.divisor is not None:
                bucket.flat_grads.div_(self._weighing.divisor)
        self._buckets.make_room_for(indices)
        return reduced
