"""The collectives of workers that share memory which only copy bytes, and the window through which they are staged.

As in reductions.py bytes are taken from where the others have them if that is shared, and are staged through the window
otherwise, chunk by chunk; a little needs one barrier. All tensors here are flat and contiguous.

The window is a bounded piece of shared memory per worker. It has two halves: the one to write is the barrier's `half`,
and the rule that makes this safe is the barrier's. A half is cut into lanes of equal size, one per receiver where
receivers want different bytes, else one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.shm.barrier import NOTHING, Barrier, Post, pack_call, pack_post
from lockstep.comm.shm.segment import LINE, UNSHARED, Heap, Location, Segment, as_bytes
from lockstep.errors import UsageError

HALF_BYTES = 1 << 22
"""Bytes of one half of one worker's window."""
PAIR_BYTES = 1 << 20
"""The same for two workers: what one has left is then in a cache when the other reads it."""
AT_ONCE_BYTES = 256 << 10
"""Up to here every worker takes all it needs from the window by itself, if there are few workers."""

Want = tuple[int, int, Tensor]
"""Worker, lane and where to put what that worker left in that lane."""


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


class Copies:
    """The copying collectives of one group. One thread at a time; all workers in the same order."""

    def __init__(self, barrier: Barrier, window: Window, heap: Heap) -> None:
        self._barrier, self._window, self._heap = barrier, window, heap
        self._rank, self._size = barrier.rank, barrier.size

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Replace every worker's `flat` by that of `root`."""
        call = pack_call("broadcast", flat.dtype, flat.numel(), root=root)
        is_root = self._rank == root
        wants = [] if is_root else [(root, 0, flat)]
        self._move(call, flat.nbytes, {0: flat} if is_root else {}, wants, [root], self._heap.locate(flat))

    def all_gather(self, outs: Sequence[Tensor], flat: Tensor) -> None:
        """Set `outs[r]` to what worker r has as `flat`, for all r."""
        call = pack_call("all_gather", flat.dtype, sum(out.numel() for out in outs))
        is_placed = outs[self._rank].data_ptr() == flat.data_ptr()
        wants = [(rank, 0, out) for rank, out in enumerate(outs) if rank != self._rank or not is_placed]
        num_bytes = sum(out.nbytes for out in outs)
        self._move(call, num_bytes, {0: flat}, wants, range(self._size), self._heap.locate(flat))

    def gather(self, outs: Sequence[Tensor], flat: Tensor, root: int) -> None:
        """Set `outs[r]` on `root` to what worker r has as `flat`."""
        call = pack_call("gather", flat.dtype, flat.numel(), root=root)
        wants = [(rank, 0, out) for rank, out in enumerate(outs)] if self._rank == root else []
        self._move(call, flat.nbytes, {0: flat}, wants, range(self._size), self._heap.locate(flat))

    def scatter(self, out: Tensor, pieces: Sequence[Tensor], root: int) -> None:
        """Set `out` on worker r to piece r of `root`."""
        call = pack_call("scatter", out.dtype, out.numel(), root=root)
        self._move(call, out.nbytes, dict(enumerate(pieces)), [(root, self._rank, out)], lanes=self._size)

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
        """Set `outs[s]` to what worker s has as piece number `rank`; pieces may differ in size."""
        call = pack_call("all_to_all", outs[0].dtype)
        sizes = torch.tensor([piece.nbytes for piece in pieces])
        half = self._barrier.half
        self._window.leave(self._rank, half, 0, sizes)
        posts = self._barrier.agree(call, pack_post(int(sizes.max())))
        for rank, (out, sent) in enumerate(
            zip(outs, self._window.slots(half, 0, self._size, torch.int64), strict=True)
        ):
            if out.nbytes != int(sent[self._rank]):
                raise UsageError(
                    f"all_to_all: worker {self._barrier.peers[rank].rank} sends {int(sent[self._rank])} bytes to "
                    f"{self._barrier.name}, which expects {out.nbytes}. Input splits of the sender and "
                    "output splits of the receiver must match."
                )
        wants = [(rank, self._rank, out) for rank, out in enumerate(outs)]
        self._stage(dict(enumerate(pieces)), wants, self._size, posts, call)

    def _move(
        self,
        call: bytes,
        num_bytes: int,
        pieces: dict[int, Tensor],
        wants: list[Want],
        givers: Sequence[int] = (),
        location: Location = UNSHARED,
        *,
        lanes: int = 1,
    ) -> None:
        """Leave `pieces` by lane and take what this worker `wants`; by one barrier, if `num_bytes` are few.

        givers: the workers that others copy from, if what each of them gives is shared, at its `location`.
        """
        if num_bytes <= min(AT_ONCE_BYTES, self._window.lane_bytes(lanes)):
            self._stage_at_once(pieces, wants, lanes, call)
            return
        posts = self._barrier.agree(call, pack_post(max((p.nbytes for p in pieces.values()), default=0), location))
        if givers and all(posts[rank].location != UNSHARED for rank in givers):
            for rank, _, out in wants:
                out.copy_(self._heap.at(rank, posts[rank].location, 0, out.numel(), out.dtype))
            self._barrier.meet(call)
        else:
            self._stage(pieces, wants, lanes, posts, call)

    def _stage(
        self,
        pieces: dict[int, Tensor],
        wants: list[Want],
        lanes: int,
        posts: Sequence[Post],
        call: bytes,
    ) -> None:
        """Move through the window, one lane of it per piece, a chunk of all lanes at a time."""
        lane = self._window.lane_bytes(lanes)
        raw_pieces = {number: as_bytes(piece) for number, piece in pieces.items()}
        raw_wants = [(rank, number, as_bytes(out)) for rank, number, out in wants]
        for begin in range(0, max(post.longest for post in posts), lane):
            half = self._barrier.half
            for number, piece in raw_pieces.items():
                self._window.leave(self._rank, half, number * lane, piece[begin : begin + lane])
            self._barrier.meet(call)
            for rank, number, out in raw_wants:
                part = out[begin : begin + lane]
                if part.numel():
                    part.copy_(self._window.slots(half, number * lane, part.numel(), torch.uint8)[rank])

    def _stage_at_once(self, pieces: dict[int, Tensor], wants: list[Want], lanes: int, call: bytes) -> None:
        """Move what fits into one chunk: the bytes are left before the calls are compared, so one barrier is enough."""
        lane, half = self._window.lane_bytes(lanes), self._barrier.half
        for number, piece in pieces.items():
            self._window.leave(self._rank, half, number * lane, piece)
        self._barrier.agree(call, NOTHING)
        for rank, number, out in wants:
            if out.numel():
                out.copy_(self._window.slots(half, number * lane, out.numel(), out.dtype)[rank])
