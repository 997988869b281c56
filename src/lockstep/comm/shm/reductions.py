"""The reductions of workers that share memory: N contributions to one result, in the order of the ranks.

So every worker gets the same bits.

Each is a few phases between barriers (see barrier.py): post what is called and meet; move bytes; meet again where
others still read or write what this worker is about to use. Bytes move in one of three ways, chosen from what all
workers posted, so all choose alike:

- **in place**, where every worker's tensor lies in a shared segment: each worker reduces its own part over all slices
  and writes the result into all of them, block by block, so that the writing finds the block in its cache. Two
  barriers; a worker reads M bytes and writes M.
- **staged**, otherwise: through the window, chunk by chunk. Every worker leaves what others reduce, reduces its own
  part of the chunk and leaves the result, and takes the others' results: two barriers a chunk. While some still read
  one half of the window, the others fill the other one.
- **at once**, where it fits into one chunk, and for two workers always: every worker leaves its bytes in the window,
  one barrier a chunk, and reduces all contributions by itself, in the same order, and so to the same bits. Two
  workers move as many bytes in this way as staged, but for half of M more that are read.

All tensors here are flat and contiguous.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm.barrier import NOTHING, Barrier, pack_call, pack_post
from lockstep.comm.shm.copies import AT_ONCE_BYTES, Window
from lockstep.comm.shm.segment import BLOCK_BYTES, UNSHARED, Heap, Location, cut
from lockstep.errors import UsageError

ANYWAY_BYTES = 16 << 10
"""Up to here bytes are left in the window even where the memory is shared: one barrier less."""
FEW = 4

Step = Callable[..., Tensor]
"""Combines two tensors into a third, `out`, which may be one of them."""

RedOpType: Any = dist.ReduceOp.RedOpType
PREMUL_SUM = RedOpType.PREMUL_SUM.value


STEPS: dict[object, Step] = {
    RedOpType.SUM: torch.add,
    RedOpType.AVG: torch.add,
    RedOpType.PREMUL_SUM: torch.add,
    RedOpType.PRODUCT: torch.mul,
    RedOpType.MIN: torch.minimum,
    RedOpType.MAX: torch.maximum,
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
}
BITWISE = (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Unsigned types in which torch has no arithmetic: sums, products and bits are the same in the signed ones."""
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the contributions to one result of one dtype are combined."""

    name: str
    """torch's name of it."""
    size: int
    """How many contributions there are."""
    _step: Step
    _wide: torch.dtype | None
    """The dtype to accumulate in, where that is not the tensor's own."""
    _averages: bool
    _is_one_step: bool
    """Whether two contributions are combined with nothing before or after."""

    def __call__(self, sources: Sequence[Tensor], out: Tensor, *, out_is: int = -1) -> None:
        """Combine `sources` in their order into `out`, which may be the source number `out_is` and no other."""
        if self._is_one_step:
            self._step(sources[0], sources[1], out=out)
        elif self._wide is not None:
            self._widened(sources, out, self._wide)
        elif out_is > 1 and self.size > 2:
            # `out` would be overwritten before its own turn has come.
            result = torch.empty_like(out)
            self._chain(sources, result)
            out.copy_(result)
        else:
            self._chain(sources, out)

    def _chain(self, sources: Sequence[Tensor], out: Tensor) -> None:
        if len(sources) == 1:
            if out.data_ptr() != sources[0].data_ptr():
                out.copy_(sources[0])
        else:
            self._step(sources[0], sources[1], out=out)
            for source in sources[2:]:
                self._step(out, source, out=out)
        if self._averages:
            self._divide(out)

    def _widened(self, sources: Sequence[Tensor], out: Tensor, wide: torch.dtype) -> None:
        total = sources[0].to(wide, copy=True)
        for source in sources[1:]:
            self._step(total, source if source.dtype in NARROW else source.to(wide), out=total)
        if self._averages:
            self._divide(total)
        out.copy_(total)

    def among(self, size: int) -> "Reduction":
        """The same of `size` contributions, as a step of a larger one, at whose end an average is to be divided."""
        if self._averages and self._wide == torch.int32:
            raise UsageError("backend hosts cannot average torch.bool. Cast the tensor, or choose another reduction.")
        return replace(self, size=size, _averages=False, _is_one_step=size == 2 and self._wide is None)

    def divide(self, total: Tensor) -> None:
        """Make an average of the sum of all; nothing else needs it."""
        if self._averages:
            self._divide(total)

    def _divide(self, total: Tensor) -> None:
        if total.is_floating_point() or total.is_complex():
            total.div_(self.size)
        else:
            total.div_(self.size, rounding_mode="trunc")


def find_reduction(op: Any, dtype: torch.dtype, size: int) -> tuple[Reduction, Any]:
    """The reduction of `size` tensors of `dtype` that torch calls `op`, and the factor of a premultiplied sum."""
    value = getattr(op, "op", op).value
    return _reduction(value, dtype, size), op.__getstate__()[1] if value == PREMUL_SUM else None


@functools.lru_cache(maxsize=512)
def _reduction(value: int, dtype: torch.dtype, size: int) -> Reduction:
    kind = RedOpType(value)
    step = STEPS.get(kind)
    has_bits, has_order = not (dtype.is_floating_point or dtype.is_complex), not dtype.is_complex
    lacks = (
        (kind in BITWISE and not has_bits)
        or (kind in (RedOpType.MIN, RedOpType.MAX) and not has_order)
        or (kind in (RedOpType.MIN, RedOpType.MAX, RedOpType.AVG) and dtype in SIGNED)
    )
    if step is None or lacks:
        raise UsageError(
            f"backend shm cannot reduce {dtype} by {kind.name}, since torch cannot. Cast the tensor, or choose another "
            "reduction."
        )
    wide, averages = _accumulator(kind, dtype, size), kind == RedOpType.AVG
    return Reduction(kind.name, size, step, wide, averages, size == 2 and wide is None and not averages)


def _accumulator(kind: object, dtype: torch.dtype, size: int) -> torch.dtype | None:
    if dtype in NARROW:
        # With two contributions torch rounds once anyway; with more, every sum would round again.
        return torch.float32 if size > 2 or kind == RedOpType.AVG else None
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.float32
    if dtype == torch.bool and kind == RedOpType.AVG:
        return torch.int32
    return None


def arithmetic(flat: Tensor) -> Tensor:
    """`flat` in a dtype in which torch can add and multiply: itself, or its bits seen as signed numbers."""
    signed = SIGNED.get(flat.dtype)
    return flat if signed is None else flat.view(signed)


class Reductions:
    """The reductions of one group. One thread at a time; all workers in the same order."""

    def __init__(self, barrier: Barrier, window: Window, heap: Heap) -> None:
        self._barrier, self._window, self._heap = barrier, window, heap
        self._rank, self._size = barrier.rank, barrier.size
        self._at_once_bytes = AT_ONCE_BYTES if self._size <= FEW else AT_ONCE_BYTES // self._size

    def barrier(self) -> None:
        """Return when every worker has called this."""
        self._barrier.agree(pack_call("barrier"), NOTHING)

    def all_reduce(self, flat: Tensor, reduce: Reduction) -> None:
        """Replace every worker's `flat` by the reduction of all."""
        numel, dtype = flat.numel(), flat.dtype
        call = pack_call("all_reduce", dtype, numel, reduce.name)
        num_bytes = numel * dtype.itemsize
        if num_bytes <= ANYWAY_BYTES:
            self._leave_whole(flat)
            self._barrier.agree(call, NOTHING)
            reduce(self._window.slots(1 - self._barrier.half, 0, numel, dtype), flat)
            return
        is_at_once = self._size == 2 or num_bytes <= self._at_once_bytes
        chunks = flat.split(self._window.lane_bytes(1) // flat.itemsize)
        leave = self._leave_whole if is_at_once else self._leave_for_owners
        location = self._heap.locate(flat)
        if location == UNSHARED:
            leave(chunks[0])
        posts = self._barrier.agree(call, pack_post(location=location))
        locations = [post.location for post in posts]
        if UNSHARED not in locations:
            self._reduce_in_place(flat, reduce, locations, call)
            return
        if locations.count(UNSHARED) < self._size:  # Some did not leave theirs, not knowing that they had to.
            leave(chunks[0])
            self._barrier.meet(call)
        if is_at_once:
            self._reduce_at_once(chunks, reduce, call)
        else:
            self._reduce_staged(chunks, reduce, call)

    def _reduce_in_place(self, flat: Tensor, reduce: Reduction, locations: Sequence[Location], call: bytes) -> None:
        begin, end = cut(flat.numel(), self._size, self._rank, flat.itemsize)
        parts = tuple([(rank, location, begin, end) for rank, location in enumerate(locations)])
        for block in self._heap.blocks(parts, flat.dtype):
            result = block[0]
            reduce(block, result)
            for copy in block[1:]:
                copy.copy_(result)
        self._barrier.meet(call)

    def add_along(
        self,
        lanes: Tensor,
        contributions: Sequence[tuple[int, int]],
        add: Callable[[Sequence[Tensor], Tensor], None],
        cuts: Sequence[tuple[int, int]],
        out: Tensor | None,
    ) -> None:
        """Add what the others have in their lanes over this worker's part of `cuts`; into `out`, or all last lanes.

        lanes: a matrix in a shared segment; contributions: worker and lane of each, in the order in which `add` takes
        them.
        """
        numel, dtype = lanes.shape[1], lanes.dtype
        call = pack_call("add_along", dtype, lanes.numel(), "SUM")
        posts = self._barrier.agree(call, pack_post(location=self._heap.locate(lanes.view(-1))))
        locations = [post.location for post in posts]
        assert UNSHARED not in locations, "lanes are allocated in shared memory"
        begin, end = cuts[self._rank]
        last = lanes.shape[0] - 1
        every = (*contributions, *((rank, last) for rank in range(self._size)))
        parts = tuple((rank, locations[rank], lane * numel + begin, lane * numel + end) for rank, lane in every)
        blocks = self._heap.blocks(parts, dtype)
        outs = out.split(BLOCK_BYTES // dtype.itemsize) if out is not None else ()
        for number, block in enumerate(blocks):
            sources, targets = block[: len(contributions)], block[len(contributions) :]
            result = outs[number] if outs else targets[self._rank]
            add(sources, result)
            for rank, target in enumerate(targets if out is None else ()):
                if rank != self._rank:
                    target.copy_(result)
        self._barrier.meet(call)

    def _leave_whole(self, flat: Tensor) -> None:
        self._window.slots(self._barrier.half, 0, flat.numel(), flat.dtype)[self._rank].copy_(flat)

    def _leave_for_owners(self, chunk: Tensor) -> None:
        """Leave what others reduce of `chunk` in the window; the own part stays where it is."""
        half = self._barrier.half
        for rank, (begin, end) in enumerate(self._cuts(chunk.numel(), chunk.itemsize)):
            if rank != self._rank and end > begin:
                self._slot(half, begin, end, chunk.dtype, self._rank).copy_(chunk[begin:end])

    def _reduce_at_once(self, chunks: Sequence[Tensor], reduce: Reduction, call: bytes) -> None:
        """One barrier a chunk. The first one has been left, and met for."""
        for number, chunk in enumerate(chunks):
            if number:
                self._leave_whole(chunk)
                self._barrier.meet(call)
            slots = self._window.slots(1 - self._barrier.half, 0, chunk.numel(), chunk.dtype)
            sources = [*slots[: self._rank], chunk, *slots[self._rank + 1 :]]
            reduce(sources, chunk, out_is=self._rank)

    def _reduce_staged(self, chunks: Sequence[Tensor], reduce: Reduction, call: bytes) -> None:
        """Two barriers a chunk: every worker reduces its part of it, then gathers the parts.

        The first chunk has been left in the half before this one, and met for.
        """
        for number, chunk in enumerate(chunks):
            if number:
                self._leave_for_owners(chunk)
                self._barrier.meet(call)
            cuts = self._cuts(chunk.numel(), chunk.itemsize)
            begin, end = cuts[self._rank]
            half = self._barrier.half
            if end > begin:
                own, result = chunk[begin:end], self._slot(half, begin, end, chunk.dtype, self._rank)
                sources = [self._slot(1 - half, begin, end, chunk.dtype, rank) for rank in range(self._size)]
                sources[self._rank] = own
                reduce(sources, result)
                own.copy_(result)
            self._barrier.meet(call)
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
        call = pack_call("reduce", flat.dtype, flat.numel(), reduce.name, root)
        self._barrier.agree(call, NOTHING)
        for part in flat.split(self._window.lane_bytes(1) // flat.itemsize):
            slots = self._window.slots(self._barrier.half, 0, part.numel(), flat.dtype)
            slots[self._rank].copy_(part)
            self._barrier.meet(call)
            if self._rank == root:
                reduce(slots, part)

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], reduce: Reduction) -> None:
        """Set `out` to the reduction of what every worker has as piece number `rank`; pieces may differ in size."""
        total = sum(piece.numel() for piece in pieces)
        call = pack_call("reduce_scatter", out.dtype, total, reduce.name)
        longest = max(piece.numel() for piece in pieces) * out.itemsize
        posts = self._barrier.agree(call, pack_post(longest, self._heap.locate_row(pieces)))
        locations = [post.location for post in posts]
        if UNSHARED not in locations:
            before = sum(piece.numel() for piece in pieces[: self._rank])
            parts = tuple((rank, at, before, before + out.numel()) for rank, at in enumerate(locations))
            out_is = self._rank if out.data_ptr() == pieces[self._rank].data_ptr() else -1
            blocks = self._heap.blocks(parts, out.dtype)
            for block, result in zip(blocks, out.split(BLOCK_BYTES // out.itemsize), strict=True):
                reduce(block, result, out_is=out_is)
            self._barrier.meet(call)
            return
        lane = self._window.lane_bytes(self._size)
        step = lane // out.itemsize
        for begin in range(0, max(post.longest for post in posts) // out.itemsize, step):
            half = self._barrier.half
            for number, piece in enumerate(pieces):
                self._window.leave(self._rank, half, number * lane, piece[begin : begin + step])
            self._barrier.meet(call)
            part = out[begin : begin + step]
            if part.numel():
                reduce(self._window.slots(half, self._rank * lane, part.numel(), out.dtype), part)
