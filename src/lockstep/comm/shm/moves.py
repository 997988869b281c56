"""The collectives of workers that share memory which only move bytes.

As in reductions.py bytes are taken from, or put to, where the others have them if that is shared, and are staged
through the window otherwise, chunk by chunk; what fits into one chunk needs one meeting. All tensors here are flat and
contiguous.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.shm.board import UNSHARED, Board, Call, Post, pack_post
from lockstep.comm.shm.places import BLOCK_BYTES, Location, Places, as_bytes
from lockstep.comm.shm.reductions import AT_ONCE_BYTES, NOTHING
from lockstep.comm.shm.window import Window
from lockstep.errors import UsageError

Want = tuple[int, int, Tensor]
"""Worker, lane and where to put what that worker left in that lane."""


class Moves:
    """The moving collectives of one group. One thread at a time; all workers in the same order."""

    def __init__(self, board: Board, window: Window, places: Places) -> None:
        self._board, self._window, self._places = board, window, places
        self._rank, self._size = board.rank, board.size

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Replace everybody's `flat` by that of `root`."""
        call = Call("broadcast", flat.dtype, flat.numel(), root=root)
        wants = [] if self._rank == root else [(root, 0, flat)]
        self._move(call, {0: flat} if self._rank == root else {}, wants, lanes=1, source=self._places.locate(flat))

    def all_gather(self, outs: Sequence[Tensor], flat: Tensor) -> None:
        """Set `outs[r]` to what worker r has as `flat`, for all r."""
        call = Call("all_gather", flat.dtype, sum(out.numel() for out in outs))
        packed = call.pack()
        is_placed = outs[self._rank].data_ptr() == flat.data_ptr()
        wants = [(rank, 0, out) for rank, out in enumerate(outs) if rank != self._rank or not is_placed]
        if call.numel * flat.itemsize <= AT_ONCE_BYTES:
            self._stage_at_once({0: flat}, wants, 1, packed)
            return
        posts = self._board.agree(
            packed,
            pack_post(flat.numel() * flat.itemsize, self._places.locate(flat), self._places.locate_row(outs)),
        )
        if all(post.source != UNSHARED for post in posts):
            self._pull(wants, posts, packed)
        elif all(post.target != UNSHARED for post in posts):
            self._push([rank for rank, _, _ in wants], outs, flat, posts, packed)
        else:
            self._stage({0: flat}, wants, 1, posts, packed)

    def gather(self, outs: Sequence[Tensor], flat: Tensor, root: int) -> None:
        """Set `outs[r]` on `root` to what worker r has as `flat`."""
        call = Call("gather", flat.dtype, flat.numel(), root=root)
        wants = [(rank, 0, out) for rank, out in enumerate(outs)] if self._rank == root else []
        self._move(call, {0: flat}, wants, lanes=1, source=self._places.locate(flat))

    def scatter(self, out: Tensor, pieces: Sequence[Tensor], root: int) -> None:
        """Set `out` on worker r to piece r of `root`."""
        call = Call("scatter", out.dtype, out.numel(), root=root)
        self._move(call, dict(enumerate(pieces)), [(root, self._rank, out)], lanes=self._size)

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
        """Set `outs[s]` to what worker s has as piece number `rank`; pieces may differ in size."""
        call = Call("all_to_all", outs[0].dtype).pack()
        sizes = torch.tensor([piece.numel() * piece.itemsize for piece in pieces])
        half = self._board.half
        self._window.leave(self._rank, half, 0, sizes)
        posts = self._board.agree(call, pack_post(int(sizes.max())))
        for rank, (out, sent) in enumerate(
            zip(outs, self._window.slots(half, 0, self._size, torch.int64), strict=True)
        ):
            if out.numel() * out.itemsize != int(sent[self._rank]):
                raise UsageError(
                    f"all_to_all: worker {self._board.peers[rank].rank} sends {int(sent[self._rank])} bytes to worker "
                    f"{self._board.peers[self._rank].rank}, which expects {out.numel() * out.itemsize}. Input splits "
                    "of the sender and output splits of the receiver must match."
                )
        wants = [(rank, self._rank, out) for rank, out in enumerate(outs)]
        self._stage(dict(enumerate(pieces)), wants, self._size, posts, call)

    def _move(
        self,
        call: Call,
        pieces: dict[int, Tensor],
        wants: list[Want],
        *,
        lanes: int,
        source: Location = UNSHARED,
    ) -> None:
        """Leave `pieces` by lane and take what this worker `wants`."""
        packed = call.pack()
        longest = max((piece.numel() * piece.itemsize for piece in pieces.values()), default=0)
        if call.numel and call.numel * call.dtype.itemsize <= min(AT_ONCE_BYTES, self._window.lane_bytes(lanes)):
            self._stage_at_once(pieces, wants, lanes, packed)
            return
        posts = self._board.agree(packed, pack_post(longest, source))
        givers = range(self._size) if call.root < 0 or call.name == "gather" else (call.root,)
        if lanes == 1 and all(posts[rank].source != UNSHARED for rank in givers):
            self._pull(wants, posts, packed)
        else:
            self._stage(pieces, wants, lanes, posts, packed)

    def _pull(self, wants: list[Want], posts: Sequence[Post], call: bytes) -> None:
        """Copy from where the others have it."""
        for rank, _, out in wants:
            out.copy_(self._places.at(rank, posts[rank].source, 0, out.numel(), out.dtype))
        self._board.meet(call)

    def _push(
        self,
        takers: Sequence[int],
        outs: Sequence[Tensor],
        flat: Tensor,
        posts: Sequence[Post],
        call: bytes,
    ) -> None:
        """Copy to where the takers want it, block by block: after the first copy a block comes from the cache."""
        before = sum(out.numel() for out in outs[: self._rank])
        places = [self._places.at(r, posts[r].target, before, before + flat.numel(), flat.dtype) for r in takers]
        step = BLOCK_BYTES // flat.itemsize
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            for place in places:
                place[begin : begin + step].copy_(part)
        self._board.meet(call)

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
            half = self._board.half
            for number, piece in raw_pieces.items():
                self._window.leave(self._rank, half, number * lane, piece[begin : begin + lane])
            self._board.meet(call)
            for rank, number, out in raw_wants:
                part = out[begin : begin + lane]
                if part.numel():
                    part.copy_(self._window.slots(half, number * lane, part.numel(), torch.uint8)[rank])

    def _stage_at_once(self, pieces: dict[int, Tensor], wants: list[Want], lanes: int, call: bytes) -> None:
        """Move what fits into one chunk: the bytes are left before the calls are compared, so one meeting is enough."""
        lane, half = self._window.lane_bytes(lanes), self._board.half
        for number, piece in pieces.items():
            self._window.leave(self._rank, half, number * lane, piece)
        self._board.agree(call, NOTHING)
        for rank, number, out in wants:
            if out.numel():
                out.copy_(self._window.slots(half, number * lane, out.numel(), out.dtype)[rank])
