"""Messages from one worker to another: send and receive with tags.

Every ordered pair of workers has a ring of a few fragments in the sender's slice. The word `pushed` counts what the
sender has put in, `taken` what the receiver has taken out; each has one writer. A message is a row of fragments,
each with the message's tag and length. The worker that moves something rings the other's bell.

The receiver takes a message if a receive for its tag is posted: straight into that tensor. If only receives for
other tags wait for this sender, the message is put aside, so that what they wait for can come. If none waits, it
stays in the ring, and the sender waits: memory is bounded by what the receiver has asked for.

Sends and receives move in `progress`, called when one is given and else by one thread, which sleeps on the bell and
is only awake while something is unfinished. It never waits for one message alone, so it makes no difference in
which order two workers send to and receive from each other.
"""

import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.comm.shm.barrier import SLICE_S, Barrier
from lockstep.comm.shm.futex import WRAP, Futex
from lockstep.comm.shm.queue import ShmWork
from lockstep.comm.shm.segment import LINE, Segment
from lockstep.errors import LockstepError, UsageError

FRAGMENTS = 4
FRAGMENT_BYTES = 64 << 10
HEADER = struct.Struct("<qQQ")
"""Tag, bytes of the message, bytes of this fragment."""
RING_BYTES = 2 * LINE + FRAGMENTS * (LINE + FRAGMENT_BYTES)
ANYBODY = -1


@dataclass(slots=True)
class _Send:
    """A message on its way out."""

    tag: int
    raw: Tensor
    work: ShmWork
    deadline: float
    sent: int = 0


@dataclass(slots=True)
class _Receive:
    """A receive that waits for its message."""

    source: int
    tag: int
    raw: Tensor
    work: ShmWork
    deadline: float

    def fits(self, source: int, tag: int) -> bool:
        """Whether a message from `source` with `tag` is the one."""
        return self.tag == tag and self.source in (source, ANYBODY)


@dataclass(slots=True)
class _Message:
    """A message on its way in."""

    tag: int
    raw: Tensor
    receive: _Receive | None
    """The receive that waits for it; None if it is put aside."""
    got: int = 0


class _Ring:
    """The fragments from one worker to another."""

    def __init__(self, segment: Segment, sender: int, begin: int, futex: Futex) -> None:
        start = sender * segment.slice_bytes + begin
        self._futex = futex
        self._memory = memoryview(segment.memory)
        self._words = self._memory.cast("I")
        self._pushed, self._taken = start // 4, (start + LINE) // 4
        self._headers = [start + 2 * LINE + number * (LINE + FRAGMENT_BYTES) for number in range(FRAGMENTS)]
        self._bodies = [segment.bytes[at + LINE : at + LINE + FRAGMENT_BYTES] for at in self._headers]

    def has_room(self) -> bool:
        """Whether the sender may push."""
        return (self._words[self._pushed] - self._words[self._taken]) % WRAP < FRAGMENTS

    def has_mail(self) -> bool:
        """Whether the receiver may take."""
        return self._words[self._pushed] != self._words[self._taken]

    def push(self, tag: int, total: int, part: Tensor) -> None:
        """Put one fragment in."""
        self._futex.observe()
        count = self._words[self._pushed]
        place = count % FRAGMENTS
        HEADER.pack_into(self._memory, self._headers[place], tag, total, part.numel())
        self._bodies[place][: part.numel()].copy_(part)
        self._futex.publish()
        self._words[self._pushed] = (count + 1) % WRAP

    def peek(self) -> tuple[int, int, Tensor]:
        """Tag, bytes of the whole message, and body of the next fragment."""
        self._futex.observe()
        place = self._words[self._taken] % FRAGMENTS
        tag, total, length = HEADER.unpack_from(self._memory, self._headers[place])
        return tag, total, self._bodies[place][:length]

    def take(self) -> None:
        """Free the next fragment."""
        self._futex.publish()
        self._words[self._taken] = (self._words[self._taken] + 1) % WRAP


class Messages:
    """One worker's messages within a group. Everything but `_closed` and the thread is touched with the lock held."""

    def __init__(self, barrier: Barrier, segment: Segment, begin: int) -> None:
        self._barrier = barrier
        rank, others, futex = barrier.rank, range(barrier.size), barrier.pages.futex
        self._out = [_Ring(segment, rank, begin + other * RING_BYTES, futex) for other in others]
        self._in = [_Ring(segment, other, begin + rank * RING_BYTES, futex) for other in others]
        self._sends: list[deque[_Send]] = [deque() for _ in others]
        self._receives: list[_Receive] = []
        self._arriving: dict[int, _Message] = {}
        """The message that is being taken out of a ring, by its sender."""
        self._aside: list[list[_Message]] = [[] for _ in others]
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def send(self, raw: Tensor, target: int, tag: int, work: ShmWork) -> None:
        """Send the bytes `raw` to `target`; `work` is done when they are out of this worker's hands."""
        with self._change:
            self._sends[target].append(_Send(tag, raw, work, self._deadline()))
            self._begin()

    def receive(self, raw: Tensor, source: int, tag: int, work: ShmWork) -> None:
        """Receive into `raw` from `source` (or ANYBODY); `work` is done when all has arrived."""
        with self._change:
            self._receives.append(_Receive(source, tag, raw, work, self._deadline()))
            self._begin()

    def close(self) -> None:
        """Let the thread end once nothing is under way, and wait a moment for it."""
        with self._change:
            self._closed = True
            self._change.notify()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=2)

    def _deadline(self) -> float:
        return time.monotonic() + self._barrier.timeout.total_seconds()

    def _begin(self) -> None:
        """Try at once; leave what cannot be done yet to the thread."""
        try:
            self._barrier.look()
            self._progress()
        except BaseException as error:
            self._give_up(self._barrier.fail(error))
            return
        if self._is_pending():
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="lockstep-shm-p2p", daemon=True)
                self._thread.start()
            self._change.notify()
            self._barrier.pages.ring(self._barrier.rank)

    def _is_pending(self) -> bool:
        return bool(self._receives or self._arriving) or any(self._sends)

    def _progress(self) -> bool:
        """Move what can be moved; whether anything was."""
        moved = False
        for target, sends in enumerate(self._sends):
            if sends and self._push(target, sends):
                self._barrier.pages.ring(target)
                moved = True
        if self._receives or self._arriving:
            moved |= self._match_aside()
            for source in range(self._barrier.size):
                if self._take(source):
                    self._barrier.pages.ring(source)
                    moved = True
        return moved

    def _push(self, target: int, sends: "deque[_Send]") -> bool:
        ring, moved = self._out[target], False
        while sends and ring.has_room():
            send = sends[0]
            part = send.raw[send.sent : send.sent + FRAGMENT_BYTES]
            ring.push(send.tag, send.raw.numel(), part)
            send.sent += part.numel()
            moved = True
            if send.sent == send.raw.numel():
                sends.popleft()
                send.work.finish()
        return moved

    def _take(self, source: int) -> bool:
        ring, moved = self._in[source], False
        while ring.has_mail():
            tag, total, body = ring.peek()
            message = self._arriving.get(source) or self._open(source, tag, total)
            if message is None:
                break
            self._arriving[source] = message
            message.raw[message.got : message.got + body.numel()].copy_(body)
            message.got += body.numel()
            ring.take()
            moved = True
            if message.got == total:
                del self._arriving[source]
                if message.receive is not None:
                    message.receive.work.finish(source=source)
                else:
                    self._aside[source].append(message)
        return moved

    def _open(self, source: int, tag: int, total: int) -> _Message | None:
        """Where the message at the head of the ring goes: to the receive that waits for it, aside, or nowhere yet."""
        for receive in self._receives:
            if receive.fits(source, tag):
                self._receives.remove(receive)
                self._check_size(receive, source, total)
                return _Message(tag, receive.raw, receive)
        if any(receive.source in (source, ANYBODY) for receive in self._receives):
            return _Message(tag, torch.empty(total, dtype=torch.uint8), None)
        return None

    def _match_aside(self) -> bool:
        moved = False
        for receive in list(self._receives):
            for source, aside in enumerate(self._aside):
                found = next((message for message in aside if receive.fits(source, message.tag)), None)
                if found is not None:
                    aside.remove(found)
                    self._receives.remove(receive)
                    self._check_size(receive, source, found.raw.numel())
                    receive.raw.copy_(found.raw)
                    receive.work.finish(source=source)
                    moved = True
                    break
        return moved

    def _check_size(self, receive: _Receive, source: int, total: int) -> None:
        if receive.raw.numel() != total:
            error = UsageError(
                f"worker {self._barrier.peers[source].rank} sent {total} bytes with tag {receive.tag}, and "
                f"{self._barrier.name} receives {receive.raw.numel()}. Give recv a tensor of the size and dtype that "
                "is sent."
            )
            receive.work.finish(error)
            raise error

    def _serve(self) -> None:
        """The thread."""
        while True:
            with self._change:
                while not self._is_pending():
                    if self._closed:
                        return
                    self._change.wait()
                seen = self._barrier.pages.bell()
                try:
                    moved = self._progress()
                    if not moved:
                        self._watch()
                except BaseException as error:
                    self._give_up(self._barrier.fail(error))
                    continue
            if not moved:
                self._barrier.pages.sleep_on_bell(seen, SLICE_S)

    def _watch(self) -> None:
        """Raise if a worker that is waited for is gone, or a deadline has passed."""
        self._barrier.look()
        busy = [(target, sends[0]) for target, sends in enumerate(self._sends) if sends]
        waits = [(target, f"send(tag {send.tag})", send.deadline) for target, send in busy]
        for receive in self._awaited():
            sources = self._may_send() if receive.source == ANYBODY else [receive.source]
            waits += [(source, f"recv(tag {receive.tag})", receive.deadline) for source in sources]
        for other, doing, deadline in waits:
            if other != self._barrier.rank:
                self._barrier.mind([other], doing.encode(), deadline, lambda _: self._progress())

    def _may_send(self) -> list[int]:
        """Those who have not left; all others once all have, so that a receive from anybody ends."""
        others = [other for other in range(self._barrier.size) if other != self._barrier.rank]
        return [other for other in others if not self._barrier.has_left(other)] or others

    def _awaited(self) -> list[_Receive]:
        return self._receives + [each.receive for each in self._arriving.values() if each.receive is not None]

    def _give_up(self, error: LockstepError) -> None:
        for sends in self._sends:
            for send in sends:
                send.work.finish(error)
            sends.clear()
        for receive in self._awaited():
            receive.work.finish(error)
        self._receives.clear()
        self._arriving.clear()
