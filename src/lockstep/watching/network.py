"""How long messages take between workers, how their clocks differ, and whose link is slow.

Processes under one kernel read the same monotonic clock, unless they were given time namespaces of their own; so the
offset is zero there, also between containers and network namespaces. Between hosts clocks and links are measured by
small datagrams, a few a second, to each peer in turn:

    ping   from A, with the time it was sent
    pong   from B, with the times the ping came and the pong was sent

Arrivals are stamped by the kernel where it can, so how long a busy interpreter took to look does not count. Where both
read one clock, a ping gives both ways apart; else their sum, and of the round trips the shortest gives the offset of
the clocks. Where nothing answers, the hosts' calendar clocks are trusted, which NTP keeps within some milliseconds.
Datagrams, and not a stream: a lost one is not sent again by the kernel, which would look like a slow one; and one
socket and one thread serve all peers.

The socket listens on the address at which workers of other hosts reach this one. A datagram carries a MAC under a key
of the run, and one that does not is dropped; a pong counts if its ping was among the last.
"""

import collections
import contextlib
import hmac
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.comm.channel import mac

_PING, _PONG = 1, 2
_FORM = struct.Struct("!BIqqq")
_MAC_BYTES = 16
_EVERY_S = 0.1
_KEPT = 15
"""Pings to each peer that count."""
_KEPT_FOR_CLOCK = 100
_SO_TIMESTAMPNS = 35
"""Linux's number for it, which Python's socket module does not name."""
_LEAST_DELAY_NS = 3_000_000
"""Probes between processes on busy cores scatter by a millisecond or two."""


# Clocks


@dataclass(frozen=True, slots=True)
class HostClock:
    """Which clock a worker reads, and where that stands."""

    kernel: str
    """Equal for workers that read the same monotonic clock; empty where that cannot be told."""
    calendar_ns: int
    """What the calendar clock is ahead of the monotonic one, in nanoseconds."""

    @classmethod
    def mine(cls) -> "HostClock":
        """Of this process, now."""
        calendar, monotonic = time.time_ns(), time.perf_counter_ns()
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            kernel = f"{boot}/{Path('/proc/self/ns/time').stat().st_ino}"
        except OSError:
            kernel = ""
        return cls(kernel, calendar - monotonic)

    def is_same_as(self, other: "HostClock") -> bool:
        """Whether the two read one clock."""
        return bool(self.kernel) and self.kernel == other.kernel

    def offset_of(self, other: "HostClock", calendar_ahead_ns: int) -> int:
        """What to add to `other`'s monotonic clock to get this one's, if its calendar is ahead of this by so much."""
        if self.is_same_as(other):
            return 0
        return other.calendar_ns - calendar_ahead_ns - self.calendar_ns


# Links


@dataclass(frozen=True, slots=True)
class SlowLink:
    """The worker whose messages stand out."""

    worker: int
    excess_ns: int
    """By how much its messages take longer than the others'."""


class Network:
    """What worker 0 knows of the workers' clocks and links."""

    def __init__(self, size: int, clock: HostClock) -> None:
        self._size, self.clock = size, clock
        """The clock is worker 0's."""
        self._clocks: dict[int, HostClock] = {0: clock}
        self._trips: dict[int, Mapping[str, list[list[int]]]] = {}
        self.offsets: dict[int, int] = {}
        """What to add to each worker's clock to get worker 0's."""
        self.slow: SlowLink | None = None
        """Whose link is slow, if anybody's."""

    def add(self, rank: int, clock: HostClock, ahead_ns: int | None, trips: Mapping[str, list[list[int]]]) -> None:
        """Take what worker `rank` tells: its clock, what worker 0's calendar is ahead of its, and its last trips."""
        self._clocks[rank] = clock
        self.offsets[rank] = self.clock.offset_of(clock, -int(ahead_ns or 0))
        if trips:
            self._trips[rank] = trips
            self.slow = self._slow_link()

    def _slow_link(self) -> SlowLink | None:
        are_one_way = all(self.clock.is_same_as(clock) for clock in self._clocks.values())
        found: dict[tuple[int, int], list[int]] = {}
        for rank, by_peer in self._trips.items():
            for peer, trips in by_peer.items():
                for there, back in trips:
                    if not are_one_way:
                        there = back = (there + back) // 2
                    found.setdefault((rank, int(peer)), []).append(there)
                    found.setdefault((int(peer), rank), []).append(back)
        return slow_link(found, self._size, are_one_way=are_one_way)


def slow_link(one_way: Mapping[tuple[int, int], Sequence[int]], size: int, *, are_one_way: bool) -> SlowLink | None:
    """The worker whose links are slow, from the delays (ns) that were probed between pairs (from, to).

    Of a link, the third quartile counts: one that is too narrow delays probes while gradients are on their way, and
    only then. A worker's own delay is the lower median over its links, so that one slow worker does not taint the
    others. Where both ends of a link could be at fault, it is the sender's; where only round trips are known and there
    are but two workers, nobody can tell.
    """
    typical = {pair: sorted(found)[3 * len(found) // 4] for pair, found in one_way.items() if found}
    if size < 2 or (size == 2 and not are_one_way):
        return None
    best: tuple[float, int] | None = None
    for direction in (0, 1):
        by_worker: dict[int, float] = {}
        for worker in range(size):
            links = [delay for pair, delay in typical.items() if pair[direction] == worker]
            if links:
                by_worker[worker] = statistics.median_low(links)
        if len(by_worker) < size:
            continue
        for worker, delay in by_worker.items():
            rest = statistics.median_low([other for rank, other in by_worker.items() if rank != worker])
            if best is None or delay - rest > best[0] * 1.2:  # The sender is looked at first, and has the benefit.
                best = (delay - rest, worker)
    if best is None or best[0] < _LEAST_DELAY_NS:
        return None
    return SlowLink(best[1], round(best[0]))


class Probes:
    """This worker's socket, and what it found out about each peer: nanoseconds on the two calendar clocks."""

    def __init__(self, rank: int, address: str, key: bytes) -> None:
        self._rank, self._key = rank, key
        self._addresses: list[tuple[str, int] | None] = []
        self._trips: dict[int, collections.deque[tuple[int, int]]] = {}
        """By peer: how long the last pings took there, and their pongs back."""
        self._asked: collections.deque[int] = collections.deque(maxlen=_KEPT_FOR_CLOCK)
        """When the last pings were sent."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.bind((address, 0))
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        """Where pings are answered."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-probes", daemon=True)

    def start(self, addresses: Sequence[tuple[str, int] | None]) -> None:
        """Answer, and ask: the workers at `addresses`, by rank, where they have one."""
        self._addresses = list(addresses)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._is_over.set()
        self._thread.join(2.0)
        self._socket.close()

    def delays(self) -> dict[int, list[list[int]]]:
        """By peer: the last trips, each as nanoseconds there and back."""
        return {peer: [[*trip] for trip in list(trips)[-_KEPT:]] for peer, trips in list(self._trips.items())}

    def ahead(self, peer: int) -> int | None:
        """What the peer's calendar clock is ahead of this worker's, by the shortest of many trips.

        If both ways take the same time; what the other needed to answer is in neither.
        """
        trips = list(self._trips.get(peer, ()))
        if not trips:
            return None
        there, back = min(trips, key=sum)
        return (there - back) // 2

    def _run(self) -> None:
        turn, due = 0, time.monotonic()
        try:
            while not self._is_over.is_set():
                if select.select([self._socket], [], [], max(0.0, due - time.monotonic()))[0]:
                    self._answer()
                if time.monotonic() >= due:
                    turn, due = turn + 1, time.monotonic() + _EVERY_S
                    size = len(self._addresses)
                    self._ask(self._addresses[(self._rank + 1 + turn % (size - 1)) % size])
        except (OSError, ValueError):
            return  # The socket is gone, and the world with it.

    def _ask(self, where: tuple[str, int] | None) -> None:
        if where is None:
            return
        with contextlib.suppress(OSError):  # Unreachable now, perhaps not later.
            self._asked.append(time.time_ns())
            self._socket.sendto(self._sealed(_PING, self._asked[-1], 0, 0), where)

    def _answer(self) -> None:
        data, ancillary, _, sender = self._socket.recvmsg(_FORM.size + _MAC_BYTES, 128)
        now = _kernel_stamp(ancillary) or time.time_ns()
        if not hmac.compare_digest(data[_FORM.size :], mac(self._key, data[: _FORM.size])[:_MAC_BYTES]):
            return
        kind, rank, asked, came, answered = _FORM.unpack_from(data)
        if kind == _PING:
            with contextlib.suppress(OSError):
                self._socket.sendto(self._sealed(_PONG, asked, now, time.time_ns()), sender)
        elif kind == _PONG and asked in self._asked:
            trips = self._trips.setdefault(rank, collections.deque(maxlen=_KEPT_FOR_CLOCK))
            trips.append((came - asked, now - answered))

    def _sealed(self, kind: int, asked: int, came: int, answered: int) -> bytes:
        data = _FORM.pack(kind, self._rank, asked, came, answered)
        return data + mac(self._key, data)[:_MAC_BYTES]


def _kernel_stamp(ancillary: list[tuple[int, int, Any]]) -> int | None:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) >= 16:
            seconds, nanoseconds = struct.unpack("qq", data[:16])
            return int(seconds * 1_000_000_000 + nanoseconds)
    return None
