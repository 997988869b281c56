"""Connections between workers for messages of a few known lengths, without a collective.

Every worker listens, tells the others where and by which token it knows them, connects to each of them, and stops
listening once all have connected to it. Tensors go from and to where they lie; nothing is pickled. What waits for a
message waits as for any operation of the world: `peers.wait` names who is missing.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.peers import Peers
from lockstep.environment import LOOPBACK
from lockstep.errors import LaunchError, WorkerLost
from lockstep.world import World

LOOK_S = 0.2
"""A wait looks up this often: has a worker been lost elsewhere?"""
HELLO_S = 5.0
"""Who connects must say who it is within this time."""
TOKEN_BYTES = 32
HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")


def bytes_of(flat: Tensor) -> memoryview:
    """The memory of a flat tensor on the host."""
    return flat.detach().view(torch.uint8).numpy().data


class Connection:
    """To one worker, in both directions."""

    def __init__(self, channel: socket.socket, rank: int) -> None:
        self.rank = rank
        self._channel = channel
        channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, view: memoryview, timeout_s: float | None = None) -> int:
        """Send some of `view`; returns how much. Raises TimeoutError, or another OSError if the worker is gone."""
        self._channel.settimeout(timeout_s)
        return self._channel.send(view)

    def receive(self, view: memoryview, timeout_s: float | None = None) -> int:
        """Receive some of `view`, likewise."""
        self._channel.settimeout(timeout_s)
        count = self._channel.recv_into(view)
        if not count:
            raise ConnectionResetError("the connection was closed")
        return count

    def close(self) -> None:
        """End every wait on it, here and there."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()


class Transfer:
    """Messages to be moved one after the other, as something that `peers.wait` can wait for."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._moves: list[tuple[Connection, Callable[[memoryview, float | None], int], memoryview]] = []
        self._at = 0
        self._error: Exception | None = None

    def send(self, connection: Connection, view: bytes | memoryview) -> None:
        """Then send `view`."""
        self._moves.append((connection, connection.send, memoryview(view)))

    def receive(self, connection: Connection, view: bytearray | memoryview) -> None:
        """Then receive `view`."""
        self._moves.append((connection, connection.receive, memoryview(view)))

    def is_completed(self) -> bool:
        """See Waitable."""
        return self._error is not None or self._at == len(self._moves)

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """See Waitable."""
        if self._error is not None:
            raise self._error
        until = time.monotonic() + timeout.total_seconds()
        while self._at < len(self._moves):
            left = until - time.monotonic()
            if left <= 0:
                raise RuntimeError("not yet")
            try:
                self._move(min(left, LOOK_S))
            except Exception as error:
                self._error = error
                raise
        return True

    def _move(self, timeout_s: float) -> None:
        self._check()
        connection, move, view = self._moves[self._at]
        try:
            count = move(view, timeout_s) if view.nbytes else 0
        except TimeoutError:
            return
        except OSError as error:
            self._check()  # This one may have ended because another one has.
            rank = connection.rank
            raise WorkerLost(f"the connection to worker {rank} broke: {error}", (rank,)) from error
        self._moves[self._at] = (connection, move, view[count:])
        self._at += count == view.nbytes


class Until:
    """A condition as something that `peers.wait` can wait for: a function that tries for some seconds."""

    def __init__(self, attempt: Callable[[float], bool], check: Callable[[], None]) -> None:
        self._attempt, self._check = attempt, check
        self._error: Exception | None = None

    def is_completed(self) -> bool:
        """See Waitable: whether it has failed; of success `wait` returns."""
        return self._error is not None

    def wait(self, timeout: timedelta = timedelta.max) -> bool:
        """See Waitable."""
        if self._error is not None:
            raise self._error
        until = time.monotonic() + timeout.total_seconds()
        while True:
            try:
                self._check()
                if self._attempt(max(0.0, min(until - time.monotonic(), LOOK_S))):
                    return True
            except Exception as error:
                self._error = error
                raise
            if time.monotonic() >= until:
                raise RuntimeError("not yet")


def connect(world: World) -> tuple[dict[int, Connection], dict[int, Connection]]:
    """Connections by rank, those that this worker opened and those that were opened to it; every worker calls this."""
    token = secrets.token_bytes(TOKEN_BYTES)
    host = _address(world.peers)
    with socket.create_server((host, 0), backlog=max(128, world.size)) as listener:
        places = world.gather((host, listener.getsockname()[1], token))
        opened = {rank: _open(world, rank, places[rank]) for rank in _others(world)}
        accepted: dict[int, Connection] = {}

        def accept(timeout_s: float) -> bool:
            _accept(listener, token, world, accepted, timeout_s)
            return len(accepted) == world.size - 1

        if world.size > 1:
            world.wait(Until(accept, lambda: None), "waiting for the other workers to connect")
    return opened, accepted


def _others(world: World) -> Sequence[int]:
    """All but this worker, from the next one on, so that not all begin with the same."""
    return [(world.rank + distance) % world.size for distance in range(1, world.size)]


def _open(world: World, rank: int, place: tuple[str, int, bytes]) -> Connection:
    host, port, token = place
    try:
        channel = socket.create_connection((host, port), timeout=world.timeout.total_seconds())
        channel.sendall(HELLO.pack(token, world.rank))
    except OSError as error:
        raise LaunchError(
            f"worker {world.rank} could not connect to worker {rank} at {host}:{port}: {error}. Async needs every "
            "worker to reach every other by TCP: check that no firewall is between the hosts."
        ) from error
    return Connection(channel, rank)


def _accept(
    listener: socket.socket, token: bytes, world: World, accepted: dict[int, Connection], timeout_s: float
) -> None:
    """Take one connection, if it comes in time and is one of the workers'."""
    listener.settimeout(timeout_s or LOOK_S)
    try:
        channel, _ = listener.accept()
        channel.settimeout(HELLO_S)
        hello = channel.recv(HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return
    said, rank = HELLO.unpack(hello) if len(hello) == HELLO.size else (b"", -1)
    if hmac.compare_digest(said, token) and 0 <= rank < world.size and rank not in accepted:
        accepted[rank] = Connection(channel, rank)
    else:
        channel.close()


def _address(peers: Peers) -> str:
    """Where the other workers reach this one: the interface that leads to where all met, or to another host."""
    if peers.are_on_one_host:
        return LOOPBACK
    store: Any = peers.store
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    away = [peer.host.partition("/")[0] for peer in peers.all if peer.host != peers.me.host]
    for target in (str(getattr(store, "host", "")), *away):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # Sends nothing: it only asks for the route.
            if not (address := str(probe.getsockname()[0])).startswith("127."):
                return address
    raise LaunchError(
        f"worker {peers.me.rank} found no address at which the other hosts reach it. Set MASTER_ADDR to an address "
        "that is not loopback, or let the hosts know each other by name."
    )
