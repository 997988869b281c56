"""The reductions of workers that share memory.

Each is a few phases between meetings (see board.py): post what is called and meet; move bytes; meet again where
others still read or write what this worker is about to use. Bytes move in one of three ways, chosen from what all
workers posted, so all choose alike:

- **in place**, where everybody's tensor lies in a shared segment: each worker reduces its own part over all slices
  and writes the result into all of them, block by block, so that the writing finds the block in its cache. Two
  meetings; a worker reads M bytes and writes M.
- **staged**, otherwise: through the window, chunk by chunk. Everybody leaves what others reduce, reduces its own part
  of the chunk and leaves the result, and takes the others' results: two meetings a chunk. While some still read one
  half of the window, the others fill the other one.
- **at once**, where it fits into one chunk, and for two workers always: everybody leaves its bytes in the window, one
  meeting a chunk, everybody reduces all contributions by itself, in the same order, and so to the same bits. Two
  workers move as many bytes in this way as staged, but for half of M more that are read.

All tensors here are flat and contiguous.
"""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.comm.shm.board import UNSHARED, Board, Call, pack_post
from lockstep.comm.shm.places import BLOCK_BYTES, Location, Places, cut
from lockstep.comm.shm.reduction import Reduction
from lockstep.comm.shm.window import Window

ANYWAY_BYTES = 16 << 10
"""Up to here bytes are left in the window even where the memory is shared: one meeting less."""
AT_ONCE_BYTES = 256 << 10
"""Up to here everybody takes everything from the window by itself, if there are few workers."""
FEW = 4

NOTHING = pack_post()


class Reductions:
    """The reductions of one group. One thread at a time; all workers in the same order."""

    def __init__(self, board: Board, window: Window, places: Places) -> None:
        self._board, self._window, self._places = board, window, places
        self._rank, self._size = board.rank, board.size
        self._at_once_bytes = AT_ONCE_BYTES if self._size <= FEW else AT_ONCE_BYTES // self._size

    def barrier(self) -> None:
        """Return when everybody has called this."""
        self._board.agree(Call("barrier").pack(), pack_post())

    def all_reduce(self, flat: Tensor, reduce: Reduction) -> None:
        """Replace everybody's `flat` by the reduction of all."""
        numel, dtype = flat.numel(), flat.dtype
        call = pack_call("all_reduce", dtype, numel, reduce.name)
        num_bytes = numel * dtype.itemsize
        if num_bytes <= ANYWAY_BYTES:
            self._leave_whole(flat)
            self._board.agree(call, NOTHING)
            reduce(self._window.slots(1 - self._board.half, 0, numel, dtype), flat)
            return
        is_at_once = self._size == 2 or num_bytes <= self._at_once_bytes
        chunks = flat.split(self._window.lane_bytes(1) // flat.itemsize)
        leave = self._leave_whole if is_at_once else self._leave_for_owners
        location = self._places.locate(flat)
        if location == UNSHARED:
            leave(chunks[0])
        posts = self._board.agree(call, pack_post(target=location))
        locations = [post.target for post in posts]
        if UNSHARED not in locations:
            self._reduce_in_place(flat, reduce, locations, call)
            return
        if locations.count(UNSHARED) < self._size:  # Some did not leave theirs, not knowing that they had to.
            leave(chunks[0])
            self._board.meet(call)
        if is_at_once:
            self._reduce_at_once(chunks, reduce, call)
        else:
            self._reduce_staged(chunks, reduce, call)

    def _reduce_in_place(self, flat: Tensor, reduce: Reduction, locations: Sequence[Location], call: bytes) -> None:
        begin, end = cut(flat.numel(), self._size, self._rank, flat.itemsize)
        for block in self._places.plan(locations, begin, end, flat.dtype):
            result = block[0]
            reduce(block, result)
            for copy in block[1:]:
                copy.copy_(result)
        self._board.meet(call)

    def add_along(
        self,
        lanes: Tensor,
        contributions: Sequence[tuple[int, int]],
        add: Callable[[Sequence[Tensor], Tensor], None],
        cuts: Sequence[tuple[int, int]],
        out: Tensor | None,
    ) -> None:
        """Add what the others have in their lanes over this worker's part of `cuts`; into `out`, or everybody's last.

        lanes: a matrix in a shared segment; contributions: worker and lane of each, in the order in which `add` takes
        them.
        """
        numel, dtype = lanes.shape[1], lanes.dtype
        call = pack_call("add_along", dtype, lanes.numel(), "SUM")
        posts = self._board.agree(call, pack_post(source=self._places.locate(lanes.view(-1))))
        locations = tuple(post.source for post in posts)
        assert UNSHARED not in locations, "lanes are allocated in shared memory"
        begin, end = cuts[self._rank]
        last = lanes.shape[0] - 1
        lanes_at = (*contributions, *((rank, last) for rank in range(self._size)))
        blocks = self._places.lane_blocks(locations, lanes_at, numel, begin, end, dtype)
        outs = out.split(BLOCK_BYTES // dtype.itemsize) if out is not None else ()
        for number, block in enumerate(blocks):
            sources, targets = block[: len(contributions)], block[len(contributions) :]
            result = outs[number] if outs else targets[self._rank]
            add(sources, result)
            for rank, target in enumerate(targets if out is None else ()):
                if rank != self._rank:
                    target.copy_(result)
        self._board.meet(call)

    def _leave_whole(self, flat: Tensor) -> None:
        self._window.slots(self._board.half, 0, flat.numel(), flat.dtype)[self._rank].copy_(flat)

    def _leave_for_owners(self, chunk: Tensor) -> None:
        """Leave what others reduce of `chunk` in the window; the own part stays where it is."""
        half = self._board.half
        for rank, (begin, end) in enumerate(self._cuts(chunk.numel(), chunk.itemsize)):
            if rank != self._rank and end > begin:
                self._slot(half, begin, end, chunk.dtype, self._rank).copy_(chunk[begin:end])

    def _reduce_at_once(self, chunks: Sequence[Tensor], reduce: Reduction, call: bytes) -> None:
        """One meeting a chunk. The first one has been left, and met for."""
        for number, chunk in enumerate(chunks):
            if number:
                self._leave_whole(chunk)
                self._board.meet(call)
            slots = self._window.slots(1 - self._board.half, 0, chunk.numel(), chunk.dtype)
            sources = [*slots[: self._rank], chunk, *slots[self._rank + 1 :]]
            reduce(sources, chunk, out_is=self._rank)

    def _reduce_staged(self, chunks: Sequence[Tensor], reduce: Reduction, call: bytes) -> None:
        """Two meetings a chunk: everybody reduces its part of it, then everybody gathers the parts.

        The first chunk has been left in the half before this one, and met for.
        """
        for number, chunk in enumerate(chunks):
            if number:
                self._leave_for_owners(chunk)
                self._board.meet(call)
            cuts = self._cuts(chunk.numel(), chunk.itemsize)
            begin, end = cuts[self._rank]
            half = self._board.half
            if end > begin:
                own, result = chunk[begin:end], self._slot(half, begin, end, chunk.dtype, self._rank)
                sources = [self._slot(1 - half, begin, end, chunk.dtype, rank) for rank in range(self._size)]
                sources[self._rank] = own
                reduce(sources, result)
                own.copy_(result)
            self._board.meet(call)
            for rank, (begin, end) in enumerate(cuts):
                if rank != self._rank and end > begin:
                    chunk[begin:end].copy_(self._slot(half, begin, end, chunk.dtype, rank))

    def _slot(self, half: int, begin: int, end: int, dtype: torch.dtype, rank: int) -> Tensor:
        """Elements `begin` to `end` of what `rank` leaves in the window."""
        return self._window.slots(half, begin * dtype.itemsize, end - begin, dtype)[rank]

    def _cuts(self, numel: int, itemsize: int) -> list[tuple[int, int]]:
        return [cut(numel, self._size, rank, itemsize) for rank in range(self._size)]

    def reduce(self, flat: Tensor, root: int, reduce: Reduction) -> None:
        """Replace `flat` on `root` by the reduction of all; elsewhere it stays as it is."""
        call = Call("reduce", flat.dtype, flat.numel(), reduce.name, root).pack()
        posts = self._board.agree(call, pack_post(source=self._places.locate(flat)))
        locations = [post.source for post in posts]
        if UNSHARED not in locations:
            if self._rank == root:
                for block in self._places.plan(locations, 0, flat.numel(), flat.dtype):
                    reduce(block, block[root], out_is=root)
            self._board.meet(call)
            return
        for part in flat.split(self._window.lane_bytes(1) // flat.itemsize):
            slots = self._window.slots(self._board.half, 0, part.numel(), flat.dtype)
            slots[self._rank].copy_(part)
            self._board.meet(call)
            if self._rank == root:
                reduce(slots, part)

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], reduce: Reduction) -> None:
        """Set `out` to the reduction of what everybody has as piece number `rank`; pieces may differ in size."""
        total = sum(piece.numel() for piece in pieces)
        call = Call("reduce_scatter", out.dtype, total, reduce.name).pack()
        source = self._places.locate_row(pieces)
        longest = max(piece.numel() for piece in pieces) * out.itemsize
        posts = self._board.agree(call, pack_post(longest, source=source))
        sources = [post.source for post in posts]
        if UNSHARED not in sources:
            self._reduce_scatter_in_place(out, pieces, sources, reduce)
            self._board.meet(call)
            return
        lane = self._window.lane_bytes(self._size)
        step = lane // out.itemsize
        for begin in range(0, max(post.longest for post in posts) // out.itemsize, step):
            half = self._board.half
            for number, piece in enumerate(pieces):
                self._window.leave(self._rank, half, number * lane, piece[begin : begin + step])
            self._board.meet(call)
            part = out[begin : begin + step]
            if part.numel():
                reduce(self._window.slots(half, self._rank * lane, part.numel(), out.dtype), part)

    def _reduce_scatter_in_place(
        self, out: Tensor, pieces: Sequence[Tensor], sources: Sequence[Location], reduce: Reduction
    ) -> None:
        before = sum(piece.numel() for piece in pieces[: self._rank])
        if not out.numel():
            return
        blocks = self._places.plan(sources, before, before + out.numel(), out.dtype)
        is_own = out.data_ptr() == pieces[self._rank].data_ptr()
        for block, part in zip(blocks, out.split(BLOCK_BYTES // out.itemsize), strict=True):
            reduce(block, part, out_is=self._rank if is_own else -1)


@functools.lru_cache(maxsize=1024)
def pack_call(name: str, dtype: torch.dtype, numel: int, reduction: str) -> bytes:
    """A call as it is posted. Kept, since making it takes as long as a small message."""
    return Call(name, dtype, numel, reduction).pack()
