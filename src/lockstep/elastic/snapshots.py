"""Copies of what is split over the workers (zero=1 to 3), in the memory of another worker.

What a worker alone has dies with it: its part of the optimizer's state, and of the parameters. So now and then, at the
beginning of a step, every worker copies its part into its own memory, and into that of the worker behind it in the ring
of ranks. When some have died, the newest copy of which every part is still there, with its owner or with the one
behind, becomes the state of all, and the steps since then are made again from the same batches: with the same bits.

    take       every worker: copy, send to the next one, get the one before's; the copy before is kept until this stands
    choose     after a loss: the newest copy that is complete among the survivors
    deal       each part from whoever has it to all others, one at a time; each keeps what will be its own

A copy counts when this worker has its own part and the part of the one before it whole. That is seen part by part: if a
worker dies while copies travel, some have the new one and all have the one before. Two workers that die together, one
behind the other, take a part with them: then the run goes back to its checkpoint.

In memory it costs four times a worker's part: two copies, each of two parts. How often copies are renewed follows from
what one takes, so that it stays under PRICE of the time.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import faults
from lockstep.errors import CheckpointError
from lockstep.keep.pieces import Piece
from lockstep.world import World

PRICE = 0.005
"""Of the time. What copies take varies by twice and more, and it is to stay under 1 % (bench/elastic.py --overhead)."""
_ALIGN_BYTES = 64
_MOST_STEPS = 500
"""A copy is renewed at least so often, since what is replayed after a loss takes as long as it did."""

_NUM_PRICES = 5
"""The median of so many decides how often: one may have been disturbed."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker had: where each piece lies in `memory`."""

    index: list[Any]
    """Name, shape, first element, number of elements, dtype by name, first byte: of each piece."""
    memory: Tensor
    """All of them, as bytes."""

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "Part":
        """A copy of `pieces`."""
        index, end = [], 0
        for piece in pieces:
            dtype = str(piece.flat.dtype).removeprefix("torch.")
            index.append([piece.name, list(piece.shape), piece.begin, piece.flat.numel(), dtype, end])
            end += -(-piece.flat.numel() * piece.flat.element_size() // _ALIGN_BYTES) * _ALIGN_BYTES
        part = cls(index, torch.empty(end, dtype=torch.uint8))
        for piece, (_, copy) in zip(pieces, part.pieces(), strict=True):
            copy.flat.copy_(piece.flat.detach().reshape(-1))
        return part

    def pieces(self) -> list[tuple[str, Piece]]:
        """Its pieces, in place, by name."""
        found = []
        for name, shape, begin, numel, dtype_name, first in self.index:
            dtype = getattr(torch, dtype_name)
            flat = self.memory[first : first + numel * dtype.itemsize].view(dtype)
            found.append((name, Piece(name, tuple(shape), begin, flat)))
        return found


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What this worker keeps of the state before one call."""

    call: int
    rank: int
    """This worker's rank then; its part is `parts[rank]`."""
    size: int
    parts: dict[int, Part]
    """By the rank of who had it."""
    rest: Any
    """All of the state that is no tensor, the same on every worker."""


class Snapshots:
    """The copies that one worker has."""

    def __init__(self) -> None:
        self._kept: list[Snapshot] = []
        self._every = 1
        self._prices: list[float] = []
        """What the last copies took, in steps; the same on all workers."""

    @property
    def oldest_call(self) -> int:
        """Calls before this one are never made again."""
        return self._kept[0].call if self._kept else 0

    def is_due(self, call: int) -> bool:
        """Whether a copy is to be taken before this call."""
        return not self._kept or call - self._kept[-1].call >= self._every

    def take(self, world: World, call: int, pieces: Sequence[Piece], rest: Any, step_s: float) -> None:
        """Copy the state before `call`; every worker calls this. `step_s` is how long a step takes here."""
        begun = time.monotonic()
        faults.at("snapshot", call)
        mine = Part.of(pieces)
        parts = {world.rank: mine}
        if world.size > 1:
            parts |= _exchange(world, mine)
        told = world.gather_json([time.monotonic() - begun, step_s, self._prices])  # Now all have theirs.
        last = self._kept[-1] if self._kept else None
        if last is not None and (last.call, last.size) == (call, world.size):
            parts = {**last.parts, **parts}
        self._kept = [*self._kept[-1:], Snapshot(call, world.rank, world.size, parts, rest)]
        longest_s, step_s = max(each[0] for each in told), max(each[1] for each in told)
        # Worker 0 has been there before, so what it knows is known to all.
        self._prices = [*told[0][2], *([longest_s / step_s] if step_s else [])][-_NUM_PRICES:]
        usual = statistics.median(self._prices) if self._prices else 0.0
        self._every = min(_MOST_STEPS, max(1, math.ceil(usual / PRICE)))

    def choose(self, world: World) -> tuple["Snapshot | None", int, dict[int, int]]:
        """The newest copy that is complete: this worker's part in it, its call, and who has each part.

        Every worker calls this. Copies of one call for as many workers are the same, whoever took part.
        """
        offers = world.gather_json([[each.call, each.size, sorted(each.parts)] for each in self._kept])
        by_call: dict[tuple[int, int], dict[int, int]] = {}
        for holder, offered in enumerate(offers):
            for call, size, ranks in offered:
                for rank in ranks:
                    by_call.setdefault((call, size), {}).setdefault(rank, holder)
        complete = [(call, size) for (call, size), holders in by_call.items() if len(holders) == size]
        if not complete:
            raise CheckpointError(
                "parts of the model's state were lost: a worker and the one that had its copy have both ended. The run "
                "goes back to its last checkpoint; with zero=0 every worker has everything."
            )
        call, size = max(complete)
        mine = next((each for each in reversed(self._kept) if (each.call, each.size) == (call, size)), None)
        return mine, call, by_call[call, size]


class Pieces:
    """What one worker will need of a dealt copy: reads as a checkpoint does."""

    path = "the copy in the workers' memory"
    world_size = 0

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._held: dict[str, list[tuple[int, Tensor]]] = {}

    def add(self, piece: Piece, wanted: Range) -> None:
        """Keep of `piece` what is wanted."""
        self.tensors.setdefault(piece.name, _Entry(tuple(piece.shape)))
        begin, end = max(wanted[0], piece.begin), min(wanted[1], piece.begin + piece.flat.numel())
        if begin < end or not piece.flat.numel():
            flat = piece.flat[begin - piece.begin : end - piece.begin] if piece.flat.numel() else piece.flat
            self._held.setdefault(piece.name, []).append((begin, flat.clone()))

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Elements of a tensor, flat."""
        found = [
            flat[max(0, begin - at) : end - at]
            for at, flat in sorted(self._held[name], key=lambda held: held[0])
            if at < end and begin < at + flat.numel()
        ]
        return torch.cat(found) if found else self._held[name][0][1][:0]

    def read_whole(self, name: str) -> Tensor:
        """A whole tensor."""
        shape = self.tensors[name].shape
        return self.read(name, 0, math.prod(shape)).view(shape)


@dataclass(frozen=True, slots=True)
class _Entry:
    shape: tuple[int, ...]


def deal(
    world: World, snapshot: Snapshot | None, holders: dict[int, int], wanted: Callable[[str, tuple[int, ...]], Range]
) -> Pieces:
    """Send each part of a copy from who has it to all; returns what this worker wants of them. On every worker."""
    held = Pieces()
    for rank, holder in sorted(holders.items()):
        is_mine = world.rank == holder
        part = snapshot.parts[rank] if is_mine and snapshot is not None else None
        faults.at("sending state" if is_mine else "receiving state")
        index, num_bytes = world.gather_json([part.index, part.memory.numel()] if part is not None else None)[holder]
        if part is None:
            part = Part(index, torch.empty(num_bytes, dtype=torch.uint8))
        if world.size > 1 and num_bytes:
            work = dist.broadcast(part.memory, group=world.host_group, group_src=holder, async_op=True)
            world.wait(work, "taking the state of the run from another worker")
        for name, piece in part.pieces():
            held.add(piece, wanted(name, piece.shape))
    return held


def _exchange(world: World, mine: Part) -> dict[int, Part]:
    """Send this worker's part to the one behind it; returns the part of the one before."""
    before, behind = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    index, num_bytes = world.gather_json([mine.index, mine.memory.numel()])[before]
    theirs = Part(index, torch.empty(num_bytes, dtype=torch.uint8))
    operations = []
    if mine.memory.numel():
        operations.append(dist.P2POp(dist.isend, mine.memory, group=world.host_group, group_peer=behind))
    if num_bytes:
        operations.append(dist.P2POp(dist.irecv, theirs.memory, group=world.host_group, group_peer=before))
    for work in dist.batch_isend_irecv(operations) if operations else ():
        world.wait(work, "copying its part to another worker")
    return {before: theirs}
