"""How long messages take between workers of different hosts: small datagrams, a few a second, to each in turn.

    ping   from A, with the time it was sent
    pong   from B, with the times the ping came and the pong was sent

Arrivals are stamped by the kernel where it can, so how long a busy interpreter took to look does not count. Where both
read one clock, a ping gives both ways apart; else their sum, and of the round trips the shortest gives the offset of
the clocks. Datagrams, and not a stream: a lost one is not sent again by the kernel, which would look like a slow one;
and one socket and one thread serve all peers.

The socket listens on the address by which the worker reaches the meeting point. Datagrams that do not carry the run's
token are dropped.
"""

import collections
import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

_PING, _PONG = 1, 2
_FORM = struct.Struct("!QBIqqq")
_EVERY_S = 0.1
_KEPT = 15
"""Pings to each peer that count."""
_KEPT_FOR_CLOCK = 100
_SO_TIMESTAMPNS = 35
"""Linux's number for it, which Python's socket module does not name."""


@dataclass(frozen=True, slots=True)
class Trip:
    """One ping and its pong; nanoseconds on the two calendar clocks."""

    there: int
    back: int

    @property
    def round_trip(self) -> int:
        """Without the time that the other needed to answer."""
        return self.there + self.back

    @property
    def ahead(self) -> int:
        """What the other's clock is ahead of this worker's, if both ways take the same time."""
        return (self.there - self.back) // 2


class Probes:
    """This worker's socket, and what it found out about each peer."""

    def __init__(self, rank: int, size: int, reached: tuple[str, int], token: int, find: Callable[[int], str | None]):
        self._rank, self._size, self._token = rank, size, token
        self._find = find
        """Where a peer answers; None while it is not known."""
        self._peers: dict[int, tuple[str, int]] = {}
        self._trips: dict[int, collections.deque[Trip]] = {}
        self._socket = socket.socket(_family(reached[0]), socket.SOCK_DGRAM)
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self._socket.bind((_own_address(reached), 0))
        self.address = "{} {}".format(*self._socket.getsockname()[:2])
        """Where pings are answered."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-probes", daemon=True)

    def start(self) -> None:
        """Answer, and ask."""
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._is_over.set()
        self._thread.join(2.0)
        self._socket.close()

    def delays(self) -> dict[int, list[list[int]]]:
        """By peer: the last trips, each as nanoseconds there and back."""
        return {peer: [[t.there, t.back] for t in list(trips)[-_KEPT:]] for peer, trips in list(self._trips.items())}

    def ahead(self, peer: int) -> int | None:
        """What the peer's calendar clock is ahead of this worker's, by the shortest of many trips."""
        trips = list(self._trips.get(peer, ()))
        return min(trips, key=lambda trip: trip.round_trip).ahead if trips else None

    def _run(self) -> None:
        turn, due = 0, time.monotonic()
        try:
            while not self._is_over.is_set():
                if select.select([self._socket], [], [], max(0.0, due - time.monotonic()))[0]:
                    self._answer()
                if time.monotonic() >= due:
                    turn, due = turn + 1, time.monotonic() + _EVERY_S
                    self._ask((self._rank + 1 + turn % (self._size - 1)) % self._size)
        except (OSError, RuntimeError, ValueError):
            return  # The socket or the store is gone, and the world with it.

    def _ask(self, peer: int) -> None:
        where = self._peers.get(peer)
        if where is None:
            found = self._find(peer)
            if found is None:
                return
            host, _, port = found.partition(" ")
            where = self._peers[peer] = (host, int(port))
        with contextlib.suppress(OSError):  # Unreachable now, perhaps not later.
            self._socket.sendto(_FORM.pack(self._token, _PING, self._rank, time.time_ns(), 0, 0), where)

    def _answer(self) -> None:
        data, ancillary, _, sender = self._socket.recvmsg(_FORM.size, 128)
        now = _stamp(ancillary) or time.time_ns()
        if len(data) != _FORM.size:
            return
        token, kind, rank, asked, came, answered = _FORM.unpack(data)
        if token != self._token or rank >= self._size:
            return
        if kind == _PING:
            with contextlib.suppress(OSError):
                pong = _FORM.pack(self._token, _PONG, self._rank, asked, now, time.time_ns())
                self._socket.sendto(pong, sender)
        elif kind == _PONG:
            trips = self._trips.setdefault(rank, collections.deque(maxlen=_KEPT_FOR_CLOCK))
            trips.append(Trip(came - asked, now - answered))


def meeting_point(store: dist.Store | None) -> tuple[str, int] | None:
    """Address and port of the store's server, if it has one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, dist.TCPStore) else None


def _stamp(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(data) >= 16:
            seconds, nanoseconds = struct.unpack("qq", data[:16])
            return int(seconds * 1_000_000_000 + nanoseconds)
    return None


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][0]


def _own_address(reached: tuple[str, int]) -> str:
    """The address of the interface by which `reached` is reached; nothing is sent to find it out."""
    with socket.socket(_family(reached[0]), socket.SOCK_DGRAM) as finder:
        finder.connect(reached)
        return str(finder.getsockname()[0])
