"""glibc's heap, as far as tensors use it: what blocks that come and go make of the memory of a process.

A process has more memory than its live tensors take, since a free block between two that are in use cannot always serve
the next request. How much more follows from the order of requests, which a trace knows, so the heap is played through:

- The smallest free block that is large enough is taken; what is left of it stays free. Free neighbours are merged.
- torch asks for blocks aligned to 64 bytes, and glibc looks for 96 bytes more than that takes, so a hole does not serve
  a request of its own size. That alone costs a fifth of the activations of some models.
- What is left before and behind an aligned block is a few dozen bytes, which small objects take: nodes of the graph,
  mostly. Until they go, holes on their two sides do not merge. Those of a forward pass go when what the same operation
  saved goes; of those of the first step one in KEPT_EVERY stays for good.
- Blocks of `mmap_bytes` and more are mapped by themselves, and given back when they are freed. All else is kept for
  the next step, as DataParallel asks for (see replica/allocator.py), until `trim`.
"""

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

PAGE_BYTES = 4096
ALIGNMENT_BYTES = 64
"""Of torch's tensors on CPUs."""
HEADER_BYTES = 16
"""What glibc keeps in front of a block, and rounds blocks to."""
LEAST_BYTES = 32
"""Of a block with that."""
SLACK_BYTES = ALIGNMENT_BYTES + LEAST_BYTES
"""What glibc asks for on top, to find an aligned place."""
KEPT_EVERY = 20
"""By what glibc's malloc_info shows: after the first step its free memory lies in 20 to 30 pieces, and stays so."""

Span = tuple[int, int]
"""Begin and length."""


class Use(Protocol):
    """One block of a sequence, see tracing.StorageUse."""

    @property
    def num_bytes(self) -> int:
        """How large it is."""

    @property
    def born(self) -> int:
        """When it comes."""

    @property
    def died(self) -> int | None:
        """When it goes."""

    @property
    def is_of_forward(self) -> bool:
        """Whether it came in the forward pass."""

    @property
    def is_saved(self) -> bool:
        """Whether it goes in the backward pass that follows."""


@dataclass(slots=True)
class Block:
    """Memory in use."""

    span: Span
    is_mapped: bool = False
    rests: tuple[Span, ...] = ()
    """What aligning left over, which small objects have."""


@dataclass(slots=True)
class Heap:
    """One arena of blocks."""

    mmap_bytes: int
    """Blocks from here on are mapped by themselves."""
    _free: list[Span] = field(default_factory=list)
    """Free blocks below the top, begin and end, by address."""
    _top: int = 0
    _touched: bytearray = field(default_factory=bytearray)
    """A byte for every page: whether the kernel has given it."""
    _num_pages: int = 0
    _mapped: int = 0

    @property
    def resident_bytes(self) -> int:
        """What the kernel counts for the process."""
        return self._num_pages * PAGE_BYTES + self._mapped

    def take(self, num_bytes: int) -> Block:
        """A block for one tensor."""
        if num_bytes + SLACK_BYTES >= self.mmap_bytes:
            size = _rounded(num_bytes + SLACK_BYTES, PAGE_BYTES)
            self._mapped += size
            return Block((0, size), is_mapped=True)
        size = max(LEAST_BYTES, _rounded(num_bytes + HEADER_BYTES // 2, HEADER_BYTES))
        begin, end = self._find(size + SLACK_BYTES)
        first = _rounded(begin + HEADER_BYTES, ALIGNMENT_BYTES) - HEADER_BYTES
        if 0 < first - begin < LEAST_BYTES:
            first += ALIGNMENT_BYTES
        rests = [(begin, first - begin)] if first > begin else []
        last = begin + size + SLACK_BYTES
        if last - first - size < LEAST_BYTES:
            size = last - first
        else:
            rests.append((first + size, last - first - size))
        if end > last:
            self._insert(last, end)
        self._touch(begin, last)
        return Block((first, size), rests=tuple(rests))

    def give(self, block: Block) -> None:
        """Free it; what aligning left over is given back by `give_rests`."""
        begin, size = block.span
        if block.is_mapped:
            self._mapped -= size
        else:
            self._insert(begin, begin + size)

    def give_rests(self, rests: Iterable[Span]) -> None:
        """The small objects beside a block are gone."""
        for begin, size in rests:
            self._insert(begin, begin + size)

    def trim(self) -> None:
        """Give free pages back to the kernel, as malloc_trim does."""
        for begin, end in self._free:
            first, last = -(-begin // PAGE_BYTES), end // PAGE_BYTES
            if last > first:
                self._num_pages -= self._touched.count(1, first, last)
                self._touched[first:last] = bytes(last - first)

    def _find(self, size: int) -> Span:
        """The smallest free block of `size` or more, which is free no longer; the heap grows if there is none."""
        best = None
        for place, (begin, end) in enumerate(self._free):
            if end - begin >= size and (best is None or end - begin < best[0]):
                best = (end - begin, place)
        if best is not None:
            return self._free.pop(best[1])
        begin = self._free.pop()[0] if self._free and self._free[-1][1] == self._top else self._top
        self._top = begin + size
        return begin, self._top

    def _insert(self, begin: int, end: int) -> None:
        place = bisect.bisect(self._free, (begin, end))
        if place < len(self._free) and self._free[place][0] == end:
            end = self._free.pop(place)[1]
        if place and self._free[place - 1][1] == begin:
            place -= 1
            begin = self._free.pop(place)[0]
        self._free.insert(place, (begin, end))

    def _touch(self, begin: int, end: int) -> None:
        first, last = begin // PAGE_BYTES, -(-end // PAGE_BYTES)
        if last > len(self._touched):
            self._touched.extend(bytes(last - len(self._touched)))
        fresh = self._touched.count(0, first, last)
        if fresh:
            self._num_pages += fresh
            self._touched[first:last] = b"\x01" * (last - first)


def replay(heap: Heap, uses: Sequence[Use], *, kept: int | None = None) -> int:
    """Have `uses`, in the order in which they come, take and give blocks; the most that the heap then has.

    kept: it is a first step, some of whose small objects stay: those with this number, and every KEPT_EVERY from there.
    """
    moments = [(use.born, 1, number) for number, use in enumerate(uses)]
    moments += [(use.died, 0, number) for number, use in enumerate(uses) if use.died is not None]
    holders = _holders_of_rests(uses)
    blocks: dict[int, Block] = {}
    rests: dict[int, list[Span]] = {}
    peak = heap.resident_bytes
    num_given = 0
    for _, is_born, number in sorted(moments):
        if is_born:
            block = blocks[number] = heap.take(uses[number].num_bytes)
            rests.setdefault(holders[number], []).extend(block.rests)
            peak = max(peak, heap.resident_bytes)
            continue
        heap.give(blocks.pop(number))
        for rest in rests.pop(number, ()):
            num_given += 1
            if kept is None or (num_given - kept) % KEPT_EVERY:
                heap.give_rests([rest])
    return peak


def _holders_of_rests(uses: Sequence[Use]) -> list[int]:
    """For each use the one with which the small objects beside it go: in a forward pass the next that is saved."""
    holders = list(range(len(uses)))
    saved: int | None = None
    for number in reversed(holders):
        if uses[number].is_of_forward:
            saved = number if uses[number].is_saved else saved
            holders[number] = number if saved is None else saved
    return holders


def _rounded(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step
