"""The board on which the workers of one host show each other where they are.

Every worker owns a page of it: the word `phase`, which counts the meetings that the worker has come to; the word
`bell`, rung by others for point-to-point messages; the word `state` (here, left, broken); two places for what it is
calling; and the text of its error. All but the bell have one writer.

**Meetings.** `meet` adds one to the own phase and returns when every other worker's phase has come as far. Workers
call the same collectives in the same order, each made of the same number of meetings, so equal phases mean the same
moment. Whatever a worker leaves for others (the call it makes, bytes in the staging window) goes into the half
`phase & 1` before meeting number `phase`, and is read by others after it. A half is written again two meetings
later. That is safe: a worker writes for meeting p+2 after it has left meeting p+1, so every other worker had come
to p+1, and came there only after it had read what was left for p.

**Calls.** Before the first meeting of a collective each worker posts what it calls. After it everybody compares the
posts: where they differ, everybody raises the same UsageError, naming who called what, and nothing was moved.

**Never for ever.** A wait sleeps in slices. Between them it looks whether a peer has said that it is broken or has
left, whether its process is gone, and whether the deadline has passed. The first error breaks the group: the worker
writes the text on its page, marks itself broken and wakes everybody; all raise, and every later call raises at once.
"""

import contextlib
import ctypes
import itertools
import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch

from lockstep.comm.futex import WRAP, Futex, reached
from lockstep.comm.peers import Peer
from lockstep.comm.segment import PAGE, Segment
from lockstep.errors import LockstepError, UsageError, WorkerLost

SLICE_S = 0.2
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

DTYPES = tuple(sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str))
"""Every dtype of torch in an order that all workers share, since they run the same torch."""
NUMBER_OF_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}

_SAME = struct.Struct("<24s16sHiQ")
"""What all workers must call alike: name, reduction, dtype, root, elements."""
_OWN = struct.Struct("<Qiqiq")
"""What may differ: bytes of the longest piece, then segment and offset of input and output (-1: not shared)."""
POST_BYTES = _SAME.size + _OWN.size
UNSHARED = (-1, -1)

HasCome = Callable[[int], bool]


@dataclass(frozen=True, slots=True)
class Call:
    """What all workers of a group must call alike."""

    name: str
    dtype: torch.dtype = torch.uint8
    numel: int = 0
    """Elements, where they must be the same everywhere; 0 where they need not."""
    reduction: str = ""
    root: int = -1

    def pack(self) -> bytes:
        """The bytes that are posted and compared."""
        dtype = NUMBER_OF_DTYPE[self.dtype]
        return _SAME.pack(self.name.encode(), self.reduction.encode(), dtype, self.root, self.numel)

    @classmethod
    def unpack(cls, packed: bytes) -> "Call":
        """The call that `packed` was made from."""
        name, reduction, dtype, root, numel = _SAME.unpack(packed)
        return cls(name.rstrip(b"\0").decode(), DTYPES[dtype], numel, reduction.rstrip(b"\0").decode(), root)

    def __str__(self) -> str:
        what = f"{self.numel} x {str(self.dtype).removeprefix('torch.')}" if self.numel else ""
        root = f"root {self.root}" if self.root >= 0 else ""
        return f"{self.name}({', '.join(part for part in (what, self.reduction, root) if part)})"


@dataclass(frozen=True, slots=True)
class Post:
    """What one worker added to its call."""

    longest: int
    """Bytes of the longest piece that the worker sends."""
    source: tuple[int, int]
    """Segment and offset of its input, or UNSHARED."""
    target: tuple[int, int]
    """The same for its output."""


class Board:
    """One worker's view of the board. Not for several threads at once, but for `break_down` and `look`."""

    def __init__(self, segment: Segment, rank: int, peers: tuple[Peer, ...], timeout: timedelta) -> None:
        self.rank, self.size = rank, segment.size
        self.peers = peers
        """Who is behind each rank of the group; their own `rank` is the one in the world."""
        self.timeout = timeout
        self.error: LockstepError | None = None
        """The first error: with it the group is broken."""
        self.between: Callable[[], None] = lambda: None
        """Called between the slices of a wait for a meeting, by who waits."""
        self.is_awaited: Callable[[], bool] = lambda: True
        """Whether whoever wants the operation at hand does nothing but wait for it, and so leaves its core free."""
        self.futex = Futex()
        self.phase = 0
        self._segment = segment
        self._stride = segment.slice_bytes // 4
        self._memory = memoryview(segment.memory)
        self._words = self._memory.cast("I")
        self._others = [other for other in range(self.size) if other != rank]
        self._phases = [(other, other * self._stride + PHASE) for other in self._others]
        self._my_phase = rank * self._stride + PHASE
        self._my_phase_address = self._pointer(self._my_phase)
        self._spins = len(os.sched_getaffinity(0)) >= self.size
        self._rings = itertools.count(1)
        self._agreed: dict[bytes, list[Post]] = {}
        """What everybody added to a call, by what everybody posted alike."""
        self._posts = [
            [rank * segment.slice_bytes + CALL_AT + half * CALL_BYTES for rank in range(self.size)] for half in (0, 1)
        ]

    @property
    def half(self) -> int:
        """Which half of the window and of the posts belongs to the next meeting."""
        return (self.phase + 1) & 1

    # Meetings

    def agree(self, call: bytes, own: bytes) -> Sequence[Post]:
        """Meet, having posted `call`; return what everybody added to it, or raise if the calls differ."""
        if self.error is not None:
            raise self._again()
        posted = call + own
        starts = self._posts[self.half]
        mine = starts[self.rank]
        self._memory[mine : mine + POST_BYTES] = posted
        self.meet(call)
        for start in starts:
            if self._memory[start : start + POST_BYTES] != posted:
                return self._compare(call, starts)
        posts = self._agreed.get(posted)
        return posts if posts is not None else self._compare(call, starts)

    def meet(self, call: bytes) -> None:
        """Return when all workers have come to this meeting, which is part of `call`."""
        words, futex = self._words, self.futex
        self.phase = target = (self.phase + 1) % WRAP
        futex.publish()
        words[self._my_phase] = target
        futex.wake(self._my_phase_address)
        for other, place in self._phases:
            if (words[place] - target) % WRAP >= 2**31:
                self._await(other, place, target, call)
        futex.observe()

    def _await(self, other: int, place: int, target: int, call: bytes) -> None:
        words = self._words
        if self._spins and self.is_awaited():
            clock = time.perf_counter
            give_up = clock() + SPIN_S
            while clock() < give_up:
                if reached(words[place], target):
                    return
                os.sched_yield()  # Where the peer waits for this very core, looking on would only keep it away.
        deadline = time.monotonic() + self.timeout.total_seconds()
        address = self._segment.address + place * 4
        while not reached(seen := words[place], target):
            self.look(call)
            self.futex.wait(address, seen, SLICE_S)
            if not reached(words[place], target):
                self.between()
                self._mind(target, call, deadline)

    def _compare(self, call: bytes, starts: Sequence[int]) -> list[Post]:
        pages = [bytes(self._memory[start : start + POST_BYTES]) for start in starts]
        if any(page[: _SAME.size] != call for page in pages):
            raise self.fail(self._disagreement([Call.unpack(page[: _SAME.size]) for page in pages]))
        posts = [_unpack_post(page[_SAME.size :]) for page in pages]
        if len(set(pages)) == 1:  # Kept, since training makes the same calls for ever.
            if len(self._agreed) > 512:
                self._agreed.clear()
            self._agreed[pages[0]] = posts
        return posts

    def _disagreement(self, calls: Sequence[Call]) -> UsageError:
        said = "; ".join(f"worker {peer.rank} {call}" for peer, call in zip(self.peers, calls, strict=True))
        return UsageError(
            f"the workers of a group called different collectives at the same point: {said}. All of them must call "
            "the same ones in the same order, with the same sizes; look for a condition that depends on the rank."
        )

    # Errors

    def look(self, call: bytes) -> None:
        """Raise if this worker or a peer has broken the group."""
        if self.error is not None:
            raise self._again()
        for other in self._others:
            if self._words[other * self._stride + STATE] == BROKEN:
                self.futex.observe()
                raise self.fail(self._read_error(other))

    def _mind(self, target: int, call: bytes, deadline: float) -> None:
        """Raise if a peer that has not come will not come."""
        late = [other for other in self._others if not self._has_come(other, target)]
        self.mind(late, call, deadline, lambda other: self._has_come(other, target))

    def mind(self, late: Sequence[int], call: bytes, deadline: float, has_come: HasCome) -> None:
        """Raise if one of `late` is gone or the deadline has passed, unless it `has_come` after all."""
        self.look(call)
        dead = [other for other in late if self.peers[other].is_dead()]
        left = [other for other in late if self.has_left(other)]
        self.futex.observe()
        # It may have come just before it ended: only what is still missing now will never come. Who has left before it
        # ended was often told so by the loss of another.
        dead = [other for other in dead if other not in left and not has_come(other)]
        left = [other for other in left if not has_come(other)]
        if dead or left:
            raise self.fail(self._lost(dead or left, "ended" if dead else "left the group", call))
        if time.monotonic() > deadline:
            missing = [other for other in late if not has_come(other)]
            if missing:
                raise self.fail(self._lost(missing, f"did not come within {self.timeout}", call))

    def _has_come(self, other: int, target: int) -> bool:
        return reached(self._words[other * self._stride + PHASE], target)

    def _lost(self, others: Sequence[int], how: str, call: bytes) -> WorkerLost:
        names = ", ".join(str(self.peers[other]) for other in others)
        return WorkerLost(
            f"worker {self.peers[self.rank].rank}: {names} {how} while this worker was in {doing(call)}. "
            "Its own output says why; a process that was killed without a word often ran out of memory.",
            tuple(self.peers[other].rank for other in others),
        )

    def fail(self, error: BaseException) -> LockstepError:
        """Break the group for everybody because of `error`; returns what to raise. The first error counts."""
        raised = error if isinstance(error, LockstepError) else LockstepError(f"{type(error).__name__}: {error}")
        if self.error is None:
            self.error = raised
            self._write_error(raised)
            self._show(BROKEN)
        return raised

    def has_left(self, other: int) -> bool:
        """Whether `other` has said that it comes no more."""
        return self._words[other * self._stride + STATE] == LEFT

    def leave(self) -> None:
        """Tell those who may still wait that this worker comes no more."""
        if self.error is None:
            self._show(LEFT)

    def _show(self, state: int) -> None:
        """Set the own state, and wake everybody wherever they sleep, so that they look."""
        self.futex.publish()
        self._words[self.rank * self._stride + STATE] = state
        for other in range(self.size):
            self.futex.wake(self._pointer(other * self._stride + PHASE))
            self.ring(other)

    def _again(self) -> LockstepError:
        assert self.error is not None
        text = f"this group is broken by an earlier error and takes no more work: {self.error}"
        if isinstance(self.error, WorkerLost):
            return WorkerLost(text, self.error.ranks)
        return type(self.error)(text)

    def _write_error(self, error: LockstepError) -> None:
        ranks = list(error.ranks)[:64] if isinstance(error, WorkerLost) else None
        text = json.dumps({"usage": isinstance(error, UsageError), "ranks": ranks, "text": str(error)[:1000]})
        start = self.rank * self._segment.slice_bytes + ERROR_AT
        raw = text.encode()[: PAGE_BYTES - ERROR_AT - 4]
        self._memory[start : start + 4 + len(raw)] = struct.pack("<I", len(raw)) + raw

    def _read_error(self, other: int) -> LockstepError:
        start = other * self._segment.slice_bytes + ERROR_AT
        (length,) = struct.unpack("<I", self._memory[start : start + 4])
        said = {"usage": False, "ranks": None, "text": "its error could not be read"}
        with contextlib.suppress(ValueError):
            said = json.loads(bytes(self._memory[start + 4 : start + 4 + length]))
        if said["usage"]:
            return UsageError(str(said["text"]))
        text = f"worker {self.peers[other].rank} gave up on this group: {said['text']}"
        ranks = said["ranks"]
        return WorkerLost(text, tuple(ranks)) if isinstance(ranks, list) else LockstepError(text)

    # Bells, for point-to-point messages

    def ring(self, other: int) -> None:
        """Make `other` look at its mail.

        The only word with several writers. Every value written to it is new (the low bits name the writer, the high
        bits count), so a sleeper that saw any older value wakes up; the value itself means nothing.
        """
        count = next(self._rings) % (WRAP // 1024)
        place = other * self._stride + BELL
        self.futex.publish()
        self._words[place] = count * 1024 + self.rank % 1024
        self.futex.wake(self._pointer(place))

    def bell(self) -> int:
        """What the own bell shows now."""
        seen = self._words[self.rank * self._stride + BELL]
        self.futex.observe()
        return seen

    def sleep_on_bell(self, seen: int, seconds: float) -> None:
        """Sleep until the own bell is rung, unless it no longer shows `seen`."""
        self.futex.wait(self._segment.address + (self.rank * self._stride + BELL) * 4, seen, seconds)

    def _pointer(self, place: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._segment.address + place * 4)


def doing(call: bytes) -> str:
    """A call in words."""
    return str(Call.unpack(call)) if len(call) == _SAME.size else call.decode()


def pack_post(longest: int = 0, source: tuple[int, int] = UNSHARED, target: tuple[int, int] = UNSHARED) -> bytes:
    """What a worker adds to its call, as bytes."""
    return _OWN.pack(longest, *source, *target)


def _unpack_post(packed: bytes) -> Post:
    longest, source, source_at, target, target_at = _OWN.unpack(packed)
    return Post(longest, (source, source_at), (target, target_at))
