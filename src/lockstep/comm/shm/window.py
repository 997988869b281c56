"""The staging window: a bounded piece of shared memory per worker for tensors that do not live in shared memory.

It has two halves. The half to write is the board's `half`; the rule that makes this safe is the board's. A half is
cut into lanes of equal size, one per receiver where receivers want different bytes, else one.
"""

import torch
from torch import Tensor

from lockstep.comm.segment import Segment

HALF_BYTES = 1 << 22
"""Bytes of one half of one worker's window."""
PAIR_BYTES = 1 << 20
"""The same for two workers: what one has left is then in a cache when the other reads it."""
LINE = 64


def half_bytes(size: int) -> int:
    """Bytes of one half of a worker's window, in a group of `size`. Tuned by bench/collectives.py."""
    return PAIR_BYTES if size == 2 else HALF_BYTES


class Window:
    """Every worker's window, as tensors."""

    def __init__(self, segment: Segment, begin: int) -> None:
        self._half_bytes = half_bytes(segment.size)
        starts = [begin + half * self._half_bytes for half in (0, 1)]
        ranks = range(segment.size)
        self._halves = [[segment.slice(rank)[start : start + self._half_bytes] for rank in ranks] for start in starts]
        self._views: dict[tuple[int, int, int, torch.dtype], list[Tensor]] = {}

    def lane_bytes(self, lanes: int) -> int:
        """How many bytes one of `lanes` equal lanes holds."""
        return self._half_bytes // lanes // LINE * LINE

    def slots(self, half: int, begin: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """By worker, `numel` elements from byte `begin` on. Kept, since training asks for the same ones for ever."""
        key = (half, begin, numel, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) > 4096:
                self._views.clear()
            end = begin + numel * dtype.itemsize
            found = self._views[key] = [part[begin:end].view(dtype) for part in self._halves[half]]
        return found

    def leave(self, rank: int, half: int, begin: int, part: Tensor) -> None:
        """Copy `part`, if there is any, to byte `begin` of what worker `rank` leaves."""
        if part.numel():
            self.slots(half, begin, part.numel(), part.dtype)[rank].copy_(part)
