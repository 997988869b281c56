"""Where split parameters lie between two steps, and how every worker gets the parts that the others have updated.

CommonParams   one copy for all workers of a host, in shared memory: the owner of a part updates it where everybody
               reads it, so there is nothing to send. Two barriers keep updates away from readers.
KeptParams     a copy on every worker; after the update everybody gathers the parts of the others.

What is gathered only while it is used is in gathered_params.py.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm import shm
from lockstep.comm.backend import all_gather, moves_parts
from lockstep.comm.shm.work import waited_for
from lockstep.replica.bucket import view_of
from lockstep.replica.layout import BucketPlan
from lockstep.replica.part import cut_out
from lockstep.replica.split import Span, are_equal
from lockstep.world import World


class FlatParams(Protocol):
    """Holds the parameters of all buckets."""

    def place(self, plan: BucketPlan, params: Sequence[Tensor], spans: Sequence[Span], dtype: torch.dtype) -> Tensor:
        """Move `params`, equal on all workers, into flat memory of `dtype`; returns the part that this worker owns."""

    def before_step(self) -> None:
        """The optimizer is about to change the owned parts."""

    def after_step(self) -> None:
        """The optimizer has changed the owned parts."""

    def done(self, number: int | None) -> None:
        """Nothing in this pass reads the parameters of bucket `number` any more; of any bucket, if that is None."""

    def end(self) -> None:
        """A pass has ended, on all workers."""

    def abandon(self) -> None:
        """The pass in flight has failed on this worker; `done` is still called for the rest of its buckets."""

    def release(self) -> None:
        """Let go of the group."""

    def whole(self) -> Iterator[None]:
        """Until the iterator is closed every worker may read all parameters, and change them as the others do."""


class CommonParams:
    """One copy for all workers."""

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        self._rank, self._group = world.rank, group
        self._placed: list[tuple[Tensor, BucketPlan, Sequence[Tensor], Span]] = []

    def place(self, plan: BucketPlan, params: Sequence[Tensor], spans: Sequence[Span], dtype: torch.dtype) -> Tensor:
        """Every worker fills its part of the copy; all look at all of it from then on."""
        flat = shm.allocate_common(self._group, plan.tail_offset, dtype)
        own = spans[self._rank]
        flat[own.begin : own.end] = cut_out(plan, params, own, dtype)
        dist.barrier(group=self._group)
        _look_at(flat, plan, params)
        self._placed.append((flat, plan, params, own))
        return flat[own.begin : own.end]

    def before_step(self) -> None:
        """Nobody may still be reading, in a backward pass or in an evaluation after it."""
        dist.barrier(group=self._group)

    def after_step(self) -> None:
        """Nobody may read before all parts are updated."""
        dist.barrier(group=self._group)

    def done(self, number: int | None) -> None:
        """Nothing: there is nothing to release."""

    def end(self) -> None:
        """Nothing: nothing is gathered in a pass."""

    def abandon(self) -> None:
        """Nothing: nothing is gathered in a pass."""

    def release(self) -> None:
        """Let go of the group."""
        del self._group

    def whole(self) -> Iterator[None]:
        """Everybody works on a copy, since what all do alike must not be done several times; parts count at the end."""
        copies = [flat.clone() for flat, _, _, _ in self._placed]
        dist.barrier(group=self._group)
        for copy, (_, plan, params, _) in zip(copies, self._placed, strict=True):
            _look_at(copy, plan, params)
        try:
            yield
        finally:
            for copy, (flat, plan, params, own) in zip(copies, self._placed, strict=True):
                flat[own.begin : own.end].copy_(copy[own.begin : own.end])
                _look_at(flat, plan, params)
            dist.barrier(group=self._group)


class KeptParams:
    """A copy on every worker."""

    def __init__(self, world: World, group: dist.ProcessGroup) -> None:
        self._world, self._group = world, group
        self._moves_parts = moves_parts(group)
        self._flats: list[tuple[Tensor, Sequence[Span]]] = []

    def place(self, plan: BucketPlan, params: Sequence[Tensor], spans: Sequence[Span], dtype: torch.dtype) -> Tensor:
        """Every worker fills its own copy."""
        flat = torch.zeros(plan.tail_offset, dtype=dtype, device=plan.device)
        _fill(flat, plan, params)
        _look_at(flat, plan, params)
        self._flats.append((flat, spans))
        return flat[spans[self._world.rank].begin : spans[self._world.rank].end]

    def before_step(self) -> None:
        """Nothing: others read their own copies."""

    def after_step(self) -> None:
        """Gather everybody's parts, all buckets at a time."""
        under_way: list[Any] = []
        with waited_for():
            for flat, spans in self._flats:
                under_way += self._gather(flat, spans)
        for work in under_way:
            self._world.await_on_device(work, "gathering updated parameters")

    def done(self, number: int | None) -> None:
        """Nothing: everybody keeps everything."""

    def end(self) -> None:
        """Nothing: nothing is gathered in a pass."""

    def abandon(self) -> None:
        """Nothing: nothing is gathered in a pass."""

    def release(self) -> None:
        """Let go of the group."""
        del self._group

    def whole(self) -> Iterator[None]:
        """They are whole anyway."""
        yield

    def _gather(self, flat: Tensor, spans: Sequence[Span]) -> list[Any]:
        if self._moves_parts and are_equal(spans):
            own = spans[self._world.rank]
            return [all_gather(flat, flat[own.begin : own.end], self._group)]
        return [
            dist.broadcast(flat[span.begin : span.end], group=self._group, group_src=rank, async_op=True)
            for rank, span in enumerate(spans)
            if span.numel
        ]


def _fill(flat: Tensor, plan: BucketPlan, params: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for slot, param in zip(plan.slots, params, strict=True):
            view_of(flat, slot, param).copy_(param)


def _look_at(flat: Tensor, plan: BucketPlan, params: Sequence[Tensor]) -> None:
    for slot, param in zip(plan.slots, params, strict=True):
        param.data = view_of(flat, slot, param)
