"""glibc's heap, as far as tensors use it: what blocks that come and go make of the memory of a process.

A process has more memory than its live tensors take, since a free block between two that are in use cannot always serve
the next request. How much more follows from the order of requests, which a trace knows, so the heap is played through:

- The smallest free block that is large enough is taken; what is left of it stays free. Free neighbours are merged.
- torch asks for blocks aligned to 64 bytes, and glibc looks for 96 bytes more than that takes, so a hole does not serve
  a request of its own size. That alone costs a fifth of the activations of some models.
- What is left before and behind an aligned block is a few dozen bytes, which small objects take: parts of the nodes of
  the graph, mostly. As long as they are there, the holes on their two sides do not merge. So some of these rests are
  pinned: those of a forward pass until the next one has ended, since a loop's `loss` holds the graph as long; those of
  a backward pass as long as the longest-lived of the tensors that come next; and of those of the first step one in
  KEPT_EVERY for good. Which ones is drawn, so a plan plays several times.
- Blocks of `mmap_bytes` and more are mapped by themselves, and given back when they are freed. All else is kept for
  the next step, as DataParallel asks for (see replica/allocator.py), until `trim`.
"""

import bisect
import math
import random
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
NEIGHBOURS = 6
PINNED_SHARE, PINNED_ELSEWHERE = 0.4, 0.1
"""Of rests, where one of the next NEIGHBOURS tensors is saved for the backward pass, and where none is. By the heaps of
single processes that trained four models: see docs/plan_memory.md."""
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
    def phase(self) -> str:
        """In which part of the step it comes."""

    @property
    def is_saved(self) -> bool:
        """Whether it comes in the forward pass and goes later."""


FORWARD, BACKWARD = "forward", "backward"
"""Phases of a step, as a use has them."""


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
    held: list[Span] = field(default_factory=list)
    """Rests that the graph of the last forward pass pins."""
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


def replay(heap: Heap, uses: Sequence[Use], drawn: random.Random, *, is_first: bool = False) -> int:
    """Have `uses`, in the order in which they come, take and give blocks; the most that the heap then has.

    is_first: it is a first step, some of whose small objects stay.
    """
    moments = [(use.born, 1, number) for number, use in enumerate(uses)]
    moments += [(use.died, 0, number) for number, use in enumerate(uses) if use.died is not None]
    blocks: dict[int, Block] = {}
    rests: dict[int, list[Span]] = {}
    """By the tensor with which they go."""
    held: list[Span] = []
    peak = heap.resident_bytes
    num_given = 0

    def give(spans: Sequence[Span]) -> None:
        nonlocal num_given
        for span in spans:
            num_given += 1
            if not (is_first and num_given % KEPT_EVERY == 0):
                heap.give_rests([span])

    for _, is_born, number in sorted(moments):
        if not is_born:
            heap.give(blocks.pop(number))
            give(rests.pop(number, ()))
            continue
        use = uses[number]
        if use.phase == BACKWARD:
            give(heap.held)
            heap.held = []
        block = blocks[number] = heap.take(use.num_bytes)
        peak = max(peak, heap.resident_bytes)
        is_near = any(each.is_saved for each in uses[number : number + NEIGHBOURS])
        for rest in block.rests:
            is_pinned = drawn.random() < (PINNED_SHARE if is_near or use.phase != FORWARD else PINNED_ELSEWHERE)
            if is_pinned and use.phase == FORWARD:
                held.append(rest)
            else:
                holder = _longest_lived(uses, number) if is_pinned else number
                rests.setdefault(holder, []).append(rest)
    heap.held = [*heap.held, *held]
    return peak


def _longest_lived(uses: Sequence[Use], number: int) -> int:
    """Of this one and those that come next."""
    last = min(number + NEIGHBOURS + 1, len(uses))
    return max(range(number, last), key=lambda each: math.inf if (died := uses[each].died) is None else died)


def _rounded(num_bytes: int, step: int) -> int:
    return -(-num_bytes // step) * step
