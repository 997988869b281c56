"""Tensors of a replica on their way: flat buckets, each one message, and their sums over the workers.

    lay_out   room for the tensors in buckets, in memory that the backend can send as it is
    launch    send all buckets; they travel beside whatever this worker does next
    wait      until the sums are there
    drop      give the memory back, where it is ordinary memory

Between two exchanges nothing of it is there: on a GPU the buckets take the memory that gradients had before. What a
wire remembers stays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.memory import Memory, OrdinaryMemory, Request, memory_of
from lockstep.replica import layout
from lockstep.replica.bucket import Bucket
from lockstep.replica.coded import Coded
from lockstep.replica.layout import Granularity, ParamSpec
from lockstep.wire import Full, Wire
from lockstep.world import World


class Messages:
    """Carries tensors like `tensors` between the workers. Every worker makes one, and calls it alike."""

    def __init__(
        self, world: World, names: Sequence[str], tensors: Sequence[Tensor], wire: Wire | None, cap_bytes: int
    ) -> None:
        self._world, self._tensors = world, tensors
        self._plans = _plans(tensors, cap_bytes)
        self._memory: Memory = OrdinaryMemory()
        self._coded: Coded | None = None
        if world.size > 1 and tensors:
            assert world.group is not None
            self._coded = Coded(wire if wire is not None else Full(), world.group, tensors[0].device, names)
            self._memory = memory_of(self._coded.group, tensors[0].device)
            self._coded.adopt(self._buckets(tensors))
        self._laid_out: list[Bucket] = []
        self._works: list[Any] = []

    def _buckets(self, like: Sequence[Tensor]) -> list[Bucket]:
        requests = [Request(plan.numel, plan.dtype, plan.device) for plan in self._plans]
        flats = self._memory.lay_out(requests) if requests else []
        pairs = zip(self._plans, flats, strict=True)
        return [Bucket(place, plan, like, flat) for place, (plan, flat) in enumerate(pairs)]

    def lay_out(self) -> list[Tensor]:
        """Zeros like the tensors, in order: what is written there is sent by `launch`."""
        self._laid_out = self._buckets(self._tensors)
        return self._views()

    def _views(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for bucket in self._laid_out:
            found |= zip(bucket.indices, bucket.views, strict=True)
        return [found[index] for index in range(len(found))]

    def launch(self) -> None:
        """Start adding over the workers what was written."""
        if self._coded is not None:
            self._works = [self._coded.all_reduce(bucket) for bucket in self._laid_out]

    def wait(self, doing: str) -> list[Tensor]:
        """The sums, like the tensors, in order: the same bits on every worker. To be used before `drop`."""
        for work in self._works:
            self._world.await_on_device(work, doing)
        self._works = []
        return self._views()

    def drop(self) -> None:
        """What was laid out is not needed any more."""
        self._laid_out = []

    @property
    def num_bytes(self) -> int:
        """What this worker has sent in the last exchange; an all-reduce counts as a ring."""
        return self._coded.num_bytes if self._coded is not None else 0

    def state_dict(self) -> dict[str, Tensor]:
        """What this worker's wire remembers, by the names of tensors."""
        return self._coded.state_dict() if self._coded is not None else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave; from nothing, if that is empty."""
        if self._coded is None:
            return
        if state:
            self._coded.load_state_dict(state)
        else:
            self._coded.adopt([])
            self._coded.adopt(self._buckets(self._tensors))

    def release(self) -> None:
        """Let go of the group."""
        if self._coded is not None:
            self._coded.release()
        self._coded = None
        self._laid_out, self._works = [], []


def _plans(tensors: Sequence[Tensor], cap_bytes: int) -> list[layout.BucketPlan]:
    specs = []
    for index, tensor in enumerate(tensors):
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        specs.append(ParamSpec(index, real.numel(), real.dtype, real.device))
    grain = Granularity(cap_bytes, layout.ALL_OF_REST, first_cap_bytes=cap_bytes)
    plans = layout.plan(specs, tail_numel=0, grain=grain)
    return [plan for plan in plans if plan.slots]
