"""The collectives of workers that share memory.

Each is a few phases between meetings (see board.py): post what is called and meet; move bytes; meet again where
others still read or write what this worker is about to use. Bytes move in one of three ways, chosen from what all
workers posted, so all choose alike:

- **in place**, where everybody's tensor lies in a shared segment: each worker reduces its own part over all slices
  and writes the result into all of them, block by block, so that the writing finds the block in its cache. Two
  meetings; a worker reads M bytes and writes M.
- **staged**, otherwise: through the window, chunk by chunk. Everybody leaves what others reduce, reduces its own part
  of the chunk and leaves the result, and takes the others' results: two meetings a chunk. While some still read one
  half of the window, the others fill the other one.
- **at once**, where it fits into one chunk: everybody leaves its bytes in the window, one meeting, everybody
  reduces all contributions by itself, in the same order, and so to the same bits.

All tensors here are flat and contiguous.
"""

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lockstep.comm.segment import Segment
from lockstep.comm.shm.board import UNSHARED, Board, Call, Post, pack_post
from lockstep.comm.shm.reduction import Reduction
from lockstep.comm.shm.window import LINE, Window
from lockstep.errors import UsageError

BLOCK_BYTES = 256 << 10
"""Reduced and written back while still in the cache (tuned by bench/collectives.py: 32 KB to 1 MB)."""
ANYWAY_BYTES = 16 << 10
"""Up to here bytes are left in the window even where the memory is shared: one meeting less."""
AT_ONCE_BYTES = 256 << 10
"""Up to here everybody takes everything from the window by itself, if there are few workers."""
FEW = 4

NOTHING = pack_post()

Location = tuple[int, int]
Block = tuple[list[Tensor], Tensor]


class Collectives:
    """The collectives of one group. One thread at a time; all workers in the same order."""

    def __init__(self, board: Board, window: Window, segments: Mapping[int, Segment]) -> None:
        self._board, self._window, self._segments = board, window, segments
        self._rank, self._size = board.rank, board.size
        self._at_once_bytes = AT_ONCE_BYTES if self._size <= FEW else AT_ONCE_BYTES // self._size
        self._plans: dict[object, list[list[Tensor]]] = {}

    # Where a tensor lies

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

    def _at(self, rank: int, location: Location, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Elements `begin` to `end` of what `rank` has at `location`."""
        number, offset = location
        segment = self._segments[number]
        start = rank * segment.slice_bytes + offset
        return segment.bytes[start + begin * dtype.itemsize : start + end * dtype.itemsize].view(dtype)

    def _plan(self, locations: Sequence[Location], begin: int, end: int, dtype: torch.dtype) -> list[list[Tensor]]:
        """Elements `begin` to `end` of everybody's tensor as blocks: for each block, by worker, its memory."""
        plan_key = (tuple(locations), begin, end, dtype)
        plan = self._plans.get(plan_key)
        if plan is None:
            if len(self._plans) > 256:
                self._plans.clear()
            step = BLOCK_BYTES // dtype.itemsize
            whole = [self._at(rank, location, begin, end, dtype) for rank, location in enumerate(locations)]
            plan = [list(block) for block in zip(*(part.split(step) for part in whole), strict=True)]
            self._plans[plan_key] = plan
        return plan

    # Reductions

    def barrier(self, *, spin: bool) -> None:
        """Return when everybody has called this."""
        self._board.agree(Call("barrier").pack(), pack_post(), spin=spin)

    def all_reduce(self, flat: Tensor, reduce: Reduction, *, spin: bool) -> None:
        """Replace everybody's `flat` by the reduction of all."""
        numel, dtype = flat.numel(), flat.dtype
        call = pack_call("all_reduce", dtype, numel, reduce.name)
        num_bytes = numel * dtype.itemsize
        if num_bytes <= ANYWAY_BYTES:
            self._leave_whole(flat)
            self._board.agree(call, NOTHING, spin=spin)
            reduce(self._window.slots(1 - self._board.half, 0, numel, dtype), flat)
            return
        fits = num_bytes <= self._at_once_bytes
        chunks = (flat,) if fits else flat.split(self._window.lane_bytes(1) // flat.itemsize)
        leave = self._leave_whole if fits else self._leave_for_owners
        location = self.locate(flat)
        if location == UNSHARED:
            leave(chunks[0])
        posts = self._board.agree(call, pack_post(target=location), spin=spin)
        locations = [post.target for post in posts]
        if UNSHARED not in locations:
            self._reduce_in_place(flat, reduce, locations, call, spin)
            return
        if locations.count(UNSHARED) < self._size:  # Some did not leave theirs, not knowing that they had to.
            leave(chunks[0])
            self._board.meet(call, spin=spin)
        if fits:
            reduce(self._window.slots(1 - self._board.half, 0, numel, dtype), flat)
        else:
            self._reduce_staged(chunks, reduce, call, spin)

    def _reduce_in_place(
        self, flat: Tensor, reduce: Reduction, locations: Sequence[Location], call: bytes, spin: bool
    ) -> None:
        begin, end = cut(flat.numel(), self._size, self._rank, flat.itemsize)
        for block in self._plan(locations, begin, end, flat.dtype):
            result = block[0]
            reduce(block, result)
            for copy in block[1:]:
                copy.copy_(result)
        self._board.meet(call, spin=spin)

    def add_along(
        self,
        lanes: Tensor,
        contributions: Sequence[tuple[int, int]],
        add: Callable[[Sequence[Tensor], Tensor], None],
        cuts: Sequence[tuple[int, int]],
        out: Tensor | None,
        *,
        spin: bool,
    ) -> None:
        """Add what the others have in their lanes over this worker's part of `cuts`; into `out`, or everybody's last.

        lanes: a matrix in a shared segment; contributions: worker and lane of each, in the order in which `add` takes
        them.
        """
        numel, dtype = lanes.shape[1], lanes.dtype
        call = pack_call("add_along", dtype, lanes.numel(), "SUM")
        posts = self._board.agree(call, pack_post(source=self.locate(lanes.view(-1))), spin=spin)
        locations = tuple(post.source for post in posts)
        assert UNSHARED not in locations, "lanes are allocated in shared memory"
        begin, end = cuts[self._rank]
        last = lanes.shape[0] - 1
        places = [*contributions, *((rank, last) for rank in range(self._size))]
        blocks = self._lane_blocks(locations, places, numel, begin, end, dtype)
        outs = out.split(BLOCK_BYTES // dtype.itemsize) if out is not None else ()
        for number, block in enumerate(blocks):
            sources, targets = block[: len(contributions)], block[len(contributions) :]
            result = outs[number] if outs else targets[self._rank]
            add(sources, result)
            for rank, target in enumerate(targets if out is None else ()):
                if rank != self._rank:
                    target.copy_(result)
        self._board.meet(call, spin=spin)

    def _lane_blocks(
        self,
        locations: tuple[Location, ...],
        places: Sequence[tuple[int, int]],
        numel: int,
        begin: int,
        end: int,
        dtype: torch.dtype,
    ) -> list[list[Tensor]]:
        """Elements `begin` to `end` of the lanes at `places`, as blocks: for each block, by place, its memory."""
        if begin == end:
            return []
        step = BLOCK_BYTES // dtype.itemsize
        whole = [self._at(r, locations[r], lane * numel + begin, lane * numel + end, dtype) for r, lane in places]
        return [list(block) for block in zip(*(part.split(step) for part in whole), strict=True)]

    def _leave_whole(self, flat: Tensor) -> None:
        self._window.slots(self._board.half, 0, flat.numel(), flat.dtype)[self._rank].copy_(flat)

    def _leave_for_owners(self, chunk: Tensor) -> None:
        """Leave what others reduce of `chunk` in the window; the own part stays where it is."""
        half = self._board.half
        for rank, (begin, end) in enumerate(self._cuts(chunk.numel(), chunk.itemsize)):
            if rank != self._rank and end > begin:
                self._slot(half, begin, end, chunk.dtype, self._rank).copy_(chunk[begin:end])

    def _reduce_staged(self, chunks: Sequence[Tensor], reduce: Reduction, call: bytes, spin: bool) -> None:
        """Two meetings a chunk: everybody reduces its part of it, then everybody gathers the parts.

        The first chunk has been left in the half before this one, and met for.
        """
        for number, chunk in enumerate(chunks):
            if number:
                self._leave_for_owners(chunk)
                self._board.meet(call, spin=spin)
            cuts = self._cuts(chunk.numel(), chunk.itemsize)
            begin, end = cuts[self._rank]
            half = self._board.half
            if end > begin:
                own, result = chunk[begin:end], self._slot(half, begin, end, chunk.dtype, self._rank)
                sources = [self._slot(1 - half, begin, end, chunk.dtype, rank) for rank in range(self._size)]
                sources[self._rank] = own
                reduce(sources, result)
                own.copy_(result)
            self._board.meet(call, spin=spin)
            for rank, (begin, end) in enumerate(cuts):
                if rank != self._rank and end > begin:
                    chunk[begin:end].copy_(self._slot(half, begin, end, chunk.dtype, rank))

    def _slot(self, half: int, begin: int, end: int, dtype: torch.dtype, rank: int) -> Tensor:
        """Elements `begin` to `end` of what `rank` leaves in the window."""
        return self._window.slots(half, begin * dtype.itemsize, end - begin, dtype)[rank]

    def _cuts(self, numel: int, itemsize: int) -> list[tuple[int, int]]:
        return [cut(numel, self._size, rank, itemsize) for rank in range(self._size)]

    def reduce(self, flat: Tensor, root: int, reduce: Reduction, *, spin: bool) -> None:
        """Replace `flat` on `root` by the reduction of all; elsewhere it stays as it is."""
        call = Call("reduce", flat.dtype, flat.numel(), reduce.name, root).pack()
        posts = self._board.agree(call, pack_post(source=self.locate(flat)), spin=spin)
        locations = [post.source for post in posts]
        if UNSHARED not in locations:
            if self._rank == root:
                for block in self._plan(locations, 0, flat.numel(), flat.dtype):
                    reduce(block, block[root], out_is=root)
            self._board.meet(call, spin=spin)
            return
        for part in flat.split(self._window.lane_bytes(1) // flat.itemsize):
            slots = self._window.slots(self._board.half, 0, part.numel(), flat.dtype)
            slots[self._rank].copy_(part)
            self._board.meet(call, spin=spin)
            if self._rank == root:
                reduce(slots, part)

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], reduce: Reduction, *, spin: bool) -> None:
        """Set `out` to the reduction of what everybody has as piece number `rank`; pieces may differ in size."""
        total = sum(piece.numel() for piece in pieces)
        call = Call("reduce_scatter", out.dtype, total, reduce.name).pack()
        source = self._locate_row(pieces)
        longest = max(piece.numel() for piece in pieces) * out.itemsize
        posts = self._board.agree(call, pack_post(longest, source=source), spin=spin)
        sources = [post.source for post in posts]
        if UNSHARED not in sources:
            self._reduce_scatter_in_place(out, pieces, sources, reduce)
            self._board.meet(call, spin=spin)
            return
        lane = self._window.lane_bytes(self._size)
        step = lane // out.itemsize
        for begin in range(0, max(post.longest for post in posts) // out.itemsize, step):
            half = self._board.half
            for number, piece in enumerate(pieces):
                self._leave(half, number * lane, piece[begin : begin + step])
            self._board.meet(call, spin=spin)
            part = out[begin : begin + step]
            if part.numel():
                reduce(self._window.slots(half, self._rank * lane, part.numel(), out.dtype), part)

    def _reduce_scatter_in_place(
        self, out: Tensor, pieces: Sequence[Tensor], sources: Sequence[Location], reduce: Reduction
    ) -> None:
        before = sum(piece.numel() for piece in pieces[: self._rank])
        if not out.numel():
            return
        blocks = self._plan(sources, before, before + out.numel(), out.dtype)
        is_own = out.data_ptr() == pieces[self._rank].data_ptr()
        for block, part in zip(blocks, out.split(BLOCK_BYTES // out.itemsize), strict=True):
            reduce(block, part, out_is=self._rank if is_own else -1)

    # Moves

    def broadcast(self, flat: Tensor, root: int, *, spin: bool) -> None:
        """Replace everybody's `flat` by that of `root`."""
        call = Call("broadcast", flat.dtype, flat.numel(), root=root)
        wants = [] if self._rank == root else [(root, 0, flat)]
        self._move(call, {0: flat} if self._rank == root else {}, wants, lanes=1, spin=spin, source=self.locate(flat))

    def all_gather(self, outs: Sequence[Tensor], flat: Tensor, *, spin: bool) -> None:
        """Set `outs[r]` to what worker r has as `flat`, for all r."""
        call = Call("all_gather", flat.dtype, sum(out.numel() for out in outs))
        packed = call.pack()
        is_placed = outs[self._rank].data_ptr() == flat.data_ptr()
        wants = [(rank, 0, out) for rank, out in enumerate(outs) if rank != self._rank or not is_placed]
        if call.numel * flat.itemsize <= AT_ONCE_BYTES:
            self._stage_at_once({0: flat}, wants, 1, packed, spin)
            return
        posts = self._board.agree(
            packed,
            pack_post(flat.numel() * flat.itemsize, self.locate(flat), self._locate_row(outs)),
            spin=spin,
        )
        if all(post.source != UNSHARED for post in posts):
            self._pull(wants, posts, packed, spin)
        elif all(post.target != UNSHARED for post in posts):
            self._push([rank for rank, _, _ in wants], outs, flat, posts, packed, spin)
        else:
            self._stage({0: flat}, wants, 1, posts, packed, spin)

    def gather(self, outs: Sequence[Tensor], flat: Tensor, root: int, *, spin: bool) -> None:
        """Set `outs[r]` on `root` to what worker r has as `flat`."""
        call = Call("gather", flat.dtype, flat.numel(), root=root)
        wants = [(rank, 0, out) for rank, out in enumerate(outs)] if self._rank == root else []
        self._move(call, {0: flat}, wants, lanes=1, spin=spin, source=self.locate(flat))

    def scatter(self, out: Tensor, pieces: Sequence[Tensor], root: int, *, spin: bool) -> None:
        """Set `out` on worker r to piece r of `root`."""
        call = Call("scatter", out.dtype, out.numel(), root=root)
        self._move(call, dict(enumerate(pieces)), [(root, self._rank, out)], lanes=self._size, spin=spin)

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor], *, spin: bool) -> None:
        """Set `outs[s]` to what worker s has as piece number `rank`; pieces may differ in size."""
        call = Call("all_to_all", outs[0].dtype).pack()
        sizes = torch.tensor([piece.numel() * piece.itemsize for piece in pieces])
        half = self._board.half
        self._leave(half, 0, sizes)
        posts = self._board.agree(call, pack_post(int(sizes.max())), spin=spin)
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
        self._stage(dict(enumerate(pieces)), wants, self._size, posts, call, spin)

    def _move(
        self,
        call: Call,
        pieces: dict[int, Tensor],
        wants: "list[Want]",
        *,
        lanes: int,
        spin: bool,
        source: Location = UNSHARED,
    ) -> None:
        """Leave `pieces` by lane and take what this worker `wants`."""
        packed = call.pack()
        longest = max((piece.numel() * piece.itemsize for piece in pieces.values()), default=0)
        if call.numel and call.numel * call.dtype.itemsize <= min(AT_ONCE_BYTES, self._window.lane_bytes(lanes)):
            self._stage_at_once(pieces, wants, lanes, packed, spin)
            return
        posts = self._board.agree(packed, pack_post(longest, source), spin=spin)
        givers = range(self._size) if call.root < 0 or call.name == "gather" else (call.root,)
        if lanes == 1 and all(posts[rank].source != UNSHARED for rank in givers):
            self._pull(wants, posts, packed, spin)
        else:
            self._stage(pieces, wants, lanes, posts, packed, spin)

    def _pull(self, wants: "list[Want]", posts: Sequence[Post], call: bytes, spin: bool) -> None:
        """Copy from where the others have it."""
        for rank, _, out in wants:
            out.copy_(self._at(rank, posts[rank].source, 0, out.numel(), out.dtype))
        self._board.meet(call, spin=spin)

    def _push(
        self,
        takers: Sequence[int],
        outs: Sequence[Tensor],
        flat: Tensor,
        posts: Sequence[Post],
        call: bytes,
        spin: bool,
    ) -> None:
        """Copy to where the takers want it, block by block: after the first copy a block comes from the cache."""
        before = sum(out.numel() for out in outs[: self._rank])
        places = [self._at(r, posts[r].target, before, before + flat.numel(), flat.dtype) for r in takers]
        step = BLOCK_BYTES // flat.itemsize
        for begin in range(0, flat.numel(), step):
            part = flat[begin : begin + step]
            for place in places:
                place[begin : begin + step].copy_(part)
        self._board.meet(call, spin=spin)

    def _stage(
        self,
        pieces: dict[int, Tensor],
        wants: "list[Want]",
        lanes: int,
        posts: Sequence[Post],
        call: bytes,
        spin: bool,
    ) -> None:
        """Move through the window, one lane of it per piece, a chunk of all lanes at a time."""
        lane = self._window.lane_bytes(lanes)
        raw_pieces = {number: as_bytes(piece) for number, piece in pieces.items()}
        raw_wants = [(rank, number, as_bytes(out)) for rank, number, out in wants]
        for begin in range(0, max(post.longest for post in posts), lane):
            half = self._board.half
            for number, piece in raw_pieces.items():
                self._leave(half, number * lane, piece[begin : begin + lane])
            self._board.meet(call, spin=spin)
            for rank, number, out in raw_wants:
                part = out[begin : begin + lane]
                if part.numel():
                    part.copy_(self._window.slots(half, number * lane, part.numel(), torch.uint8)[rank])

    def _stage_at_once(
        self, pieces: dict[int, Tensor], wants: "list[Want]", lanes: int, call: bytes, spin: bool
    ) -> None:
        """Move what fits into one chunk: the bytes are left before the calls are compared, so one meeting is enough."""
        lane, half = self._window.lane_bytes(lanes), self._board.half
        for number, piece in pieces.items():
            self._leave(half, number * lane, piece)
        self._board.agree(call, NOTHING, spin=spin)
        for rank, number, out in wants:
            if out.numel():
                out.copy_(self._window.slots(half, number * lane, out.numel(), out.dtype)[rank])

    def _leave(self, half: int, begin: int, part: Tensor) -> None:
        if part.numel():
            self._window.slots(half, begin, part.numel(), part.dtype)[self._rank].copy_(part)

    def _locate_row(self, tensors: Sequence[Tensor]) -> Location:
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


Want = tuple[int, int, Tensor]
"""Worker, lane and where to put what that worker left in that lane."""


@functools.lru_cache(maxsize=1024)
def pack_call(name: str, dtype: torch.dtype, numel: int, reduction: str) -> bytes:
    """A call as it is posted. Kept, since making it takes as long as a small message."""
    return Call(name, dtype, numel, reduction).pack()


def cut(numel: int, size: int, rank: int, itemsize: int) -> tuple[int, int]:
    """First and last-but-one element of the part of `rank`: parts cover all, and begin on cache lines."""
    line = max(1, LINE // itemsize)
    lines = -(-numel // line)
    begin, end = lines * rank // size * line, lines * (rank + 1) // size * line
    return min(begin, numel), min(end, numel)


def as_bytes(flat: Tensor) -> Tensor:
    """The bytes of a flat tensor."""
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
