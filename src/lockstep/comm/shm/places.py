"""Where tensors lie in shared memory, and others' tensors as this worker sees them. All tensors here are flat."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.comm.segment import Segment
from lockstep.comm.shm.board import UNSHARED
from lockstep.comm.shm.window import LINE

BLOCK_BYTES = 256 << 10
"""Reduced and written back while still in the cache (tuned by bench/collectives.py: 32 KB to 1 MB)."""

Location = tuple[int, int]
"""Segment and offset in a worker's slice of it."""


class Places:
    """The shared segments of one group, as worker `rank` finds its way in them."""

    def __init__(self, rank: int, segments: Mapping[int, Segment]) -> None:
        self._rank, self._segments = rank, segments
        self._plans: dict[object, list[list[Tensor]]] = {}

    def locate(self, flat: Tensor) -> Location:
        """Segment and offset of `flat` in this worker's slice, or UNSHARED."""
        if not self._segments:
            return UNSHARED
        address, num_bytes = flat.data_ptr(), flat.numel() * flat.itemsize
        for number, segment in self._segments.items():
            offset = segment.offset_of(address, num_bytes, self._rank)
            if offset is not None:
                return (number, offset) if offset % flat.itemsize == 0 else UNSHARED
        return UNSHARED

    def forget_plans(self) -> None:
        """Let go of the memory that plans refer to."""
        self._plans.clear()

    def at(self, rank: int, location: Location, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Elements `begin` to `end` of what `rank` has at `location`."""
        number, offset = location
        segment = self._segments[number]
        start = rank * segment.slice_bytes + offset
        return segment.bytes[start + begin * dtype.itemsize : start + end * dtype.itemsize].view(dtype)

    def plan(self, locations: Sequence[Location], begin: int, end: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """Elements `begin` to `end` of everybody's tensor as blocks: for each block, by worker, its memory."""
        plan_key = (tuple(locations), begin, end, dtype)
        plan = self._plans.get(plan_key)
        if plan is None:
            whole = [self.at(rank, location, begin, end, dtype) for rank, location in enumerate(locations)]
            plan = self._keep(plan_key, whole, dtype)
        return plan

    def lane_blocks(
        self,
        locations: tuple[Location, ...],
        lanes: tuple[tuple[int, int], ...],
        numel: int,
        begin: int,
        end: int,
        dtype: torch.dtype,
    ) -> list[list[Tensor]]:
        """Elements `begin` to `end` of `lanes` (worker and number) as blocks: for each block, by lane, its memory.

        Lanes have `numel` elements and lie one behind the other, a worker's at its location.
        """
        if begin == end:
            return []
        key = (locations, lanes, numel, begin, end, dtype)
        plan = self._plans.get(key)
        if plan is None:
            at = [self.at(r, locations[r], lane * numel + begin, lane * numel + end, dtype) for r, lane in lanes]
            plan = self._keep(key, at, dtype)
        return plan

    def _keep(self, key: object, whole: Sequence[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
        if len(self._plans) > 256:
            self._plans.clear()
        step = BLOCK_BYTES // dtype.itemsize
        plan = [list(block) for block in zip(*(part.split(step) for part in whole), strict=True)]
        self._plans[key] = plan
        return plan

    def locate_row(self, tensors: Sequence[Tensor]) -> Location:
        """Where `tensors` lie, if they lie one behind the other in one shared segment."""
        address = tensors[0].data_ptr()
        for tensor in tensors:
            if tensor.data_ptr() != address and tensor.numel():
                return UNSHARED
            address += tensor.numel() * tensor.itemsize
        number, offset = self.locate(tensors[0])
        if number < 0:
            return UNSHARED
        total = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return (number, offset) if offset + total <= self._segments[number].slice_bytes else UNSHARED


def cut(numel: int, size: int, rank: int, itemsize: int) -> tuple[int, int]:
    """First and last-but-one element of the part of `rank`: parts cover all, and begin on cache lines."""
    line = max(1, LINE // itemsize)
    lines = -(-numel // line)
    begin, end = lines * rank // size * line, lines * (rank + 1) // size * line
    return min(begin, numel), min(end, numel)


def as_bytes(flat: Tensor) -> Tensor:
    """The bytes of a flat tensor."""
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
