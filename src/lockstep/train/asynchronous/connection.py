"""Connections between workers for messages of a few known lengths, without a collective.

Every worker listens, tells the others where and by which token it knows them, connects to each of them, and stops
listening once all have connected to it. Both sides prove to know the token, which nobody sends (see `comm.channel`).
Tensors go from and to where they lie, without a MAC, as over gloo; nothing is pickled. What waits for a message waits
as for any operation of the world: `peers.wait` names who is missing.
"""

import contextlib
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Self

import torch
from torch import Tensor

from lockstep.comm import meeting
from lockstep.comm.channel import prove
from lockstep.errors import LaunchError, WorkerLost
from lockstep.world import World

LOOK_S = 0.2
"""A wait looks up this often: has a worker been lost elsewhere?"""
HELLO_S = 5.0
"""Who connects must say who it is within this time."""
MAX_UNPROVED = 64
"""Strangers that are listened to at a time."""
TOKEN_BYTES = 32
PURPOSE = b"async"


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

    def send_all(self, *views: bytes | memoryview) -> None:
        """Send all of `views`, however long that takes."""
        self._channel.settimeout(None)
        for view in views:
            self._channel.sendall(view)

    def receive_all(self, *views: bytearray | memoryview) -> None:
        """Receive all of `views`, however long that takes."""
        for whole in views:
            view = memoryview(whole)
            while view.nbytes:
                view = view[self.receive(view) :]

    def close(self) -> None:
        """End every wait on it, here and there."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()


class Transfer:
    """Messages to be moved one after the other; `check` is as of Until."""

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check
        self._moves: deque[tuple[Connection, Callable[[memoryview, float | None], int], memoryview]] = deque()

    def send(self, connection: Connection, *views: bytes | memoryview) -> None:
        """Then send `views`."""
        self._moves.extend((connection, connection.send, memoryview(view)) for view in views)

    def receive(self, connection: Connection, *views: bytearray | memoryview) -> None:
        """Then receive `views`."""
        self._moves.extend((connection, connection.receive, memoryview(view)) for view in views)

    def move(self, timeout_s: float) -> bool:
        """Move some bytes of what comes next, if that is possible within the time; returns whether all is done."""
        if not self._moves:
            return True
        connection, move, view = self._moves.popleft()
        try:
            count = move(view, timeout_s) if view.nbytes else 0
        except TimeoutError:
            count = 0
        except OSError as error:
            self._check()  # This connection may have ended because another one has.
            rank = connection.rank
            raise WorkerLost(f"the connection to worker {rank} broke: {error}", (rank,)) from error
        if count < view.nbytes:
            self._moves.appendleft((connection, move, view[count:]))
        return not self._moves


class Until:
    """A condition as something that `peers.wait` can wait for: a function that tries for some seconds.

    `check` raises if a worker is known to be lost, or something has failed here.
    """

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
                # Not 0, which would make a socket say that it would block.
                if self._attempt(max(0.001, min(until - time.monotonic(), LOOK_S))):
                    return True
            except Exception as error:
                self._error = error
                raise
            if time.monotonic() >= until:
                raise RuntimeError("not yet")


def connect(world: World) -> tuple[dict[int, Connection], dict[int, Connection]]:
    """Connections by rank, those that this worker opened and those that were opened to it; every worker calls this."""
    token = secrets.token_bytes(TOKEN_BYTES)
    host = meeting.towards_others(world.peers.me, world.peers.all)
    if not host:
        raise LaunchError(
            f"worker {world.rank} found no address at which the other hosts reach it. Set MASTER_ADDR to an address "
            "that is not loopback, or let the hosts know each other by name."
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=max(128, world.size)) as listener:
        told = world.gather_json([host, listener.getsockname()[1], token.hex()])
        with _Door(world, listener, token) as door:
            opened = {}
            for distance in range(1, world.size):  # From the next one on, so that not all begin with the same.
                rank = (world.rank + distance) % world.size
                name, port, theirs = told[rank]
                opened[rank] = _open(world, rank, (str(name), int(port)), bytes.fromhex(theirs))
            world.wait(Until(door.are_all_here.wait, lambda: None), "waiting for the other workers to connect")
            return opened, door.accepted


def _open(world: World, rank: int, address: tuple[str, int], token: bytes) -> Connection:
    """Connect to worker `rank`, and prove it."""
    timeout_s = world.timeout.total_seconds()
    try:
        channel = socket.create_connection(address, timeout=timeout_s)
        session = prove(channel, token, PURPOSE, is_server=False, timeout_s=timeout_s)
        channel.sendall(session.seal(world.rank.to_bytes(4)))
    except OSError as error:
        raise LaunchError(
            f"worker {world.rank} could not connect to worker {rank} at {address[0]}:{address[1]}: {error}. Async "
            "needs every worker to reach every other by TCP: check that no firewall is between the hosts."
        ) from error
    return Connection(channel, rank)


class _Door:
    """Where connections are proved, each in a thread of its own: a silent stranger holds nobody up."""

    def __init__(self, world: World, listener: socket.socket, token: bytes) -> None:
        self._num_others, self._listener, self._token = world.size - 1, listener, token
        self.accepted: dict[int, Connection] = {}
        self.are_all_here = threading.Event()
        self._room = threading.BoundedSemaphore(MAX_UNPROVED + world.size)
        self._is_closed = False
        self._thread = threading.Thread(target=self._attend, daemon=True)

    def __enter__(self) -> Self:
        if self._num_others:
            self._thread.start()
        else:
            self.are_all_here.set()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        if self._num_others:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # Which ends a wait in accept.
            self._thread.join()

    def _attend(self) -> None:
        self._listener.settimeout(LOOK_S)
        while not self._is_closed and not self.are_all_here.is_set():
            if self._room.acquire(timeout=LOOK_S):
                try:
                    threading.Thread(target=self._admit, args=(self._listener.accept()[0],), daemon=True).start()
                except OSError:
                    self._room.release()

    def _admit(self, channel: socket.socket) -> None:
        try:
            session, messages = prove(channel, self._token, PURPOSE, is_server=True, timeout_s=HELLO_S), list[bytes]()
            while not messages:
                data = channel.recv(session.missing_bytes)
                if not data:
                    raise ConnectionResetError("the connection was closed")
                messages = list(session.feed(data))
            rank = int.from_bytes(messages[0])
            self.accepted[rank] = Connection(channel, rank)
            if len(self.accepted) == self._num_others:
                self.are_all_here.set()
        except OSError:
            channel.close()
        finally:
            self._room.release()
