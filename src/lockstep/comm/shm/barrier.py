"""Where the workers of one host are: their barrier, the calls they compare, and how they learn of an error.

Every worker owns a page of shared memory: the word `phase`, which counts the barriers that the worker has come to; the
word `bell`, rung by others for point-to-point messages; the word `state` (here, left, broken); two places for what it
is calling; and the text of its error. All but the bell have one writer.

**The barrier.** `meet` adds one to the own phase and returns when every other worker's phase has come as far. Workers
call the same collectives in the same order, each made of the same number of barriers, so equal phases mean the same
moment. Whatever a worker leaves for others (the call it makes, bytes in the staging window) goes into the half
`phase & 1` before barrier number `phase`, and is read by others after it. A half is written again two barriers later.
That is safe: a worker writes for barrier p+2 after it has left barrier p+1, so every other worker had come to p+1, and
came there only after it had read what was left for p.

**Calls.** Before the first barrier of a collective each worker posts what it calls. After it every worker compares the
posts: where they differ, all raise the same UsageError, naming who called what, and nothing was moved.

**Never for ever.** A wait sleeps in slices. Between them it looks whether a peer has said that it is broken or has
left, whether its process is gone, and whether the deadline has passed. The first error breaks the group: the worker
writes the text on its page, marks itself broken and wakes all others; all raise, and every later call raises at once.
"""

import ctypes
import functools
import itertools
import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from lockstep import limits
from lockstep.comm.notices import RAISED, farewell
from lockstep.comm.peers import Peer, advice
from lockstep.comm.shm.futex import WRAP, Futex, reached
from lockstep.comm.shm.queue import Turn
from lockstep.comm.shm.segment import PAGE, UNSHARED, Location, Segment
from lockstep.errors import LockstepError, UsageError, WorkerLost

SLICE_S = 0.2
FIRST_SLICE_S = 0.025
"""The first slice of a wait; later ones are twice as long each, up to SLICE_S. Most deaths fall into the others'
compute, and are seen at the end of the first slice: 0.2 s was half of a recovery (bench/elastic.py --stages)."""
SPIN_S = 100e-6
"""How long a wait looks before it sleeps, where every worker has a core, giving way to others after each look.

About the time that a sleep and a wake-up take: one worker woken late then does not make the next one sleep too.
"""

PHASE, BELL, STATE = 0, 16, 32
"""Places of the words on a page, in words: one cache line each."""
CALL_AT, CALL_BYTES = 256, 128
"""Place of the two posts on a page, and the size of each."""
ERROR_AT = 512
PAGE_BYTES = max(PAGE, 4096)
HERE, LEFT, BROKEN = 0, 1, 2

_POST = struct.Struct("<Qiq")
"""What a worker adds to its call: bytes of the longest piece, then segment and offset of its tensor."""
CALL_TEXT_BYTES = CALL_BYTES - _POST.size


@functools.lru_cache(maxsize=1024)
def pack_call(
    name: str, dtype: torch.dtype | None = None, numel: int = 0, reduction: str = "", root: int = -1
) -> bytes:
    """What all workers of a group must call alike, as it is posted and compared: a text, with zeros behind it.

    Kept, since making it takes as long as a small message, and training makes the same calls for ever.
    """
    elements = f"{numel} x " if numel else ""
    what = f"{elements}{str(dtype).removeprefix('torch.')}" if dtype is not None else ""
    parts = (what, reduction, f"root {root}" if root >= 0 else "")
    text = f"{name}({', '.join(part for part in parts if part)})".encode()
    assert len(text) <= CALL_TEXT_BYTES
    return text.ljust(CALL_TEXT_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class Post:
    """What one worker added to its call."""

    longest: int
    """Bytes of the longest piece that the worker sends."""
    location: Location
    """Segment and offset of the tensor that others read, or reduce in place; UNSHARED where they cannot."""


def pack_post(longest: int = 0, location: Location = UNSHARED) -> bytes:
    """What a worker adds to its call, as bytes."""
    return _POST.pack(longest, *location)


NOTHING = pack_post()


@functools.lru_cache(maxsize=1024)
def _unpack_post(packed: bytes) -> Post:
    longest, segment, offset = _POST.unpack(packed)
    return Post(longest, (segment, offset))


class Pages:
    """The pages of all workers, as worker `rank` reads them and writes its own."""

    def __init__(self, segment: Segment, rank: int) -> None:
        self.rank, self.size = rank, segment.size
        self.stride = segment.slice_bytes // 4
        """From a word of one worker's page to that of the next, in words."""
        self.memory = memoryview(segment.memory)
        self.words = self.memory.cast("I")
        self.futex = Futex()
        self._segment = segment
        self._rings = itertools.count(1)

    def place(self, other: int, word: int) -> int:
        """Where in `words` a word of the page of `other` is."""
        return other * self.stride + word

    def address(self, place: int) -> int:
        """Where in this process's memory a word is."""
        return self._segment.address + place * 4

    def start(self, other: int, at: int) -> int:
        """Where in `memory` byte `at` of the page of `other` is."""
        return other * self._segment.slice_bytes + at

    def state(self, other: int) -> int:
        """Whether `other` is here, has left or is broken."""
        return self.words[self.place(other, STATE)]

    def show(self, state: int, said: dict[str, Any]) -> None:
        """Say why, set the own state, and wake every worker wherever it sleeps, so that it looks."""
        start = self.start(self.rank, ERROR_AT)
        raw = json.dumps(said).encode()[: PAGE_BYTES - ERROR_AT - 4]
        self.memory[start : start + 4 + len(raw)] = struct.pack("<I", len(raw)) + raw
        self.futex.publish()
        self.words[self.place(self.rank, STATE)] = state
        for other in range(self.size):
            self.futex.wake(ctypes.c_void_p(self.address(self.place(other, PHASE))))
            self.ring(other)

    def said(self, other: int) -> dict[str, Any]:
        """What `other` said when it broke the group or left; empty if that cannot be read."""
        self.futex.observe()
        start = self.start(other, ERROR_AT)
        (length,) = struct.unpack("<I", self.memory[start : start + 4])
        try:
            return dict(json.loads(bytes(self.memory[start + 4 : start + 4 + length])))
        except ValueError:
            return {}

    def ring(self, other: int) -> None:
        """Make `other` look at its messages.

        The bell is the only word with several writers. Every value written to it is new (the low bits name the writer,
        the high bits count), so a sleeper that saw any older value wakes up; the value itself means nothing.
        """
        count = next(self._rings) % (WRAP // 1024)
        place = self.place(other, BELL)
        self.futex.publish()
        self.words[place] = count * 1024 + self.rank % 1024
        self.futex.wake(ctypes.c_void_p(self.address(place)))

    def bell(self) -> int:
        """What the own bell shows now."""
        seen = self.words[self.place(self.rank, BELL)]
        self.futex.observe()
        return seen

    def sleep_on_bell(self, seen: int, seconds: float) -> None:
        """Sleep until the own bell is rung, unless it no longer shows `seen`."""
        self.futex.wait(self.address(self.place(self.rank, BELL)), seen, seconds)


class Barrier:
    """One worker's side of the barrier. Not for several threads at once, but for `fail` and `look`."""

    def __init__(
        self, segment: Segment, rank: int, peers: tuple[Peer, ...], timeout: timedelta, turn: Turn | None = None
    ) -> None:
        self.pages = Pages(segment, rank)
        self.peers = peers
        """The process behind each rank of the group; its own `rank` is the one in the world."""
        self.timeout = timeout
        self.error: LockstepError | None = None
        """The first error: with it the group is broken."""
        self.phase = 0
        self._turn = turn or Turn()
        self._phases = [(other, self.pages.place(other, PHASE)) for other in range(segment.size) if other != rank]
        self._my_phase = self.pages.place(rank, PHASE)
        self._my_phase_address = ctypes.c_void_p(self.pages.address(self._my_phase))
        self._spins = len(os.sched_getaffinity(0)) >= segment.size
        self._posts = [
            [self.pages.start(other, CALL_AT + half * CALL_BYTES) for other in range(segment.size)] for half in (0, 1)
        ]

    @property
    def rank(self) -> int:
        """This worker's rank in the group."""
        return self.pages.rank

    @property
    def size(self) -> int:
        """How many workers the group has."""
        return self.pages.size

    @property
    def name(self) -> str:
        """This worker, as errors call it."""
        return f"worker {self.peers[self.rank].rank}"

    @property
    def half(self) -> int:
        """Which half of the window and of the posts belongs to the next barrier."""
        return (self.phase + 1) & 1

    def agree(self, call: bytes, own: bytes) -> list[Post]:
        """Meet, having posted `call`; return what every worker added to it, or raise if the calls differ."""
        if self.error is not None:
            raise self._again()
        memory, starts, posted = self.pages.memory, self._posts[self.half], call + own
        mine = starts[self.pages.rank]
        memory[mine : mine + CALL_BYTES] = posted
        self.meet(call)
        for start in starts:
            if memory[start : start + CALL_BYTES] != posted:
                return self._compare(call, starts)
        return [_unpack_post(own)] * len(starts)

    def _compare(self, call: bytes, starts: Sequence[int]) -> list[Post]:
        posts = [bytes(self.pages.memory[start : start + CALL_BYTES]) for start in starts]
        if any(post[:CALL_TEXT_BYTES] != call for post in posts):
            raise self.fail(self._disagreement([post[:CALL_TEXT_BYTES] for post in posts]))
        return [_unpack_post(post[CALL_TEXT_BYTES:]) for post in posts]

    def meet(self, call: bytes) -> None:
        """Return when all workers have come to this barrier, which is part of `call`."""
        words, futex = self.pages.words, self.pages.futex
        self.phase = target = (self.phase + 1) % WRAP
        futex.publish()
        words[self._my_phase] = target
        futex.wake(self._my_phase_address)
        for _, place in self._phases:
            if (words[place] - target) % WRAP >= 2**31:
                self._await(place, target, call)
        futex.observe()

    def _await(self, place: int, target: int, call: bytes) -> None:
        words = self.pages.words
        if self._spins and self._turn.is_callers:
            clock = time.perf_counter
            give_up = clock() + SPIN_S
            while clock() < give_up:
                if reached(words[place], target):
                    return
                os.sched_yield()  # Where the peer waits for this very core, looking on would only keep it away.
        deadline = time.monotonic() + self.timeout.total_seconds()
        slice_s = FIRST_SLICE_S
        while not reached(seen := words[place], target):
            self.look()
            self.pages.futex.wait(self.pages.address(place), seen, slice_s)
            slice_s = min(2 * slice_s, SLICE_S)
            if not reached(words[place], target):
                self._turn.between()
                late = [other for other, at in self._phases if not reached(words[at], target)]
                self.mind(late, call, deadline, lambda other: reached(words[self.pages.place(other, PHASE)], target))

    def _disagreement(self, calls: Sequence[bytes]) -> UsageError:
        said = "; ".join(f"worker {peer.rank} {_doing(call)}" for peer, call in zip(self.peers, calls, strict=True))
        return UsageError(
            f"the workers of a group called different collectives at the same point: {said}. All of them must call "
            "the same ones in the same order, with the same sizes; look for a condition that depends on the rank."
        )

    # Errors

    def look(self) -> None:
        """Raise if this worker or a peer has broken the group."""
        if self.error is not None:
            raise self._again()
        for other, _ in self._phases:
            if self.pages.state(other) == BROKEN:
                raise self.fail(self._error_of(other))

    def mind(self, late: Sequence[int], call: bytes, deadline: float, has_come: Callable[[int], bool]) -> None:
        """Raise if one of `late` is gone or the deadline has passed, unless it `has_come` after all."""
        self.look()
        dead = [other for other in late if self.peers[other].is_dead()]
        left = [other for other in late if self.has_left(other)]
        self.pages.futex.observe()
        # It may have come just before it ended: only what is still missing now will never come. Who has left before it
        # ended was often told so by the loss of another.
        dead = [other for other in dead if other not in left and not has_come(other)]
        left = [other for other in left if not has_come(other)]
        if dead or left:
            raise self.fail(self._lost(dead or left, "ended" if dead else "left the group", call))
        if time.monotonic() > deadline:
            missing = [other for other in late if not has_come(other)]
            if missing:
                raise self.fail(
                    self._lost(
                        missing, f"did not come within {self.timeout}, the timeout of the group (timed out)", call
                    )
                )

    def has_left(self, other: int) -> bool:
        """Whether `other` has said that it comes no more."""
        return self.pages.state(other) == LEFT

    def leave(self) -> None:
        """Tell those who may still wait that this worker comes no more."""
        if self.error is None:
            self.pages.show(LEFT, {"text": farewell()})

    def fail(self, error: BaseException) -> LockstepError:
        """Break the group for all workers because of `error`; returns what to raise. The first error counts."""
        raised = error if isinstance(error, LockstepError) else limits.explain(error, self.name)
        raised = raised or LockstepError(f"{type(error).__name__}: {error}")
        if self.error is None:
            self.error = raised
            ranks = list(raised.ranks)[:64] if isinstance(raised, WorkerLost) else None
            is_usage = isinstance(raised, UsageError)
            self.pages.show(BROKEN, {"usage": is_usage, "ranks": ranks, "text": str(raised)[:1000]})
        return raised

    def _error_of(self, other: int) -> LockstepError:
        """The error for which `other` has broken the group."""
        said = {"usage": False, "ranks": None, "text": "its error could not be read", **self.pages.said(other)}
        if said["usage"]:
            return UsageError(str(said["text"]))
        text = f"worker {self.peers[other].rank} gave up on this group: {said['text']}"
        ranks = said["ranks"]
        return WorkerLost(text, tuple(ranks)) if isinstance(ranks, list) else LockstepError(text)

    def _again(self) -> LockstepError:
        """The error of every call after the first error."""
        assert self.error is not None
        text = f"this group is broken by an earlier error and takes no more work: {self.error}"
        if isinstance(self.error, WorkerLost):
            return WorkerLost(text, self.error.ranks)
        return type(self.error)(text)

    def _lost(self, others: Sequence[int], how: str, call: bytes) -> WorkerLost:
        known = [self._account(other, how) for other in others]
        names = ", ".join(f"{self.peers[other]} {text}" for other, text in zip(others, known, strict=True))
        return WorkerLost(
            f"{self.name}: {names} while this worker was in {_doing(call)}. {advice(known)}",
            tuple(self.peers[other].rank for other in others),
        )

    def _account(self, other: int, how: str) -> str:
        """What is known of a peer that is missing: what it wrote when it left, and what the kernel tells."""
        if self.has_left(other):
            left = str(self.pages.said(other).get("text", ""))
            return left if left.startswith(RAISED) else f"{how} (it destroyed it, or its program came to its end)"
        is_stopped = self.peers[other].is_stopped()
        return f"{how}: it is stopped (process state T)" if is_stopped else how


def _doing(call: bytes) -> str:
    """A call in words."""
    return call.rstrip(b"\0").decode()
