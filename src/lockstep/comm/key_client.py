"""The keys of a run, asked for by a process that need not import torch: a launcher, and under `store` a worker.

A client has one method, `call`: an operation of `store_server.Op` and its operands, as bytes, and the time that it may
take. It raises TimeoutError when that is over, and another OSError where the keys cannot be reached. There are two:
`StoreClient` here, for a store that a launcher or a worker serves, and `EtcdClient` (see `etcd`).

**Threads.** Any number may use one client at once: each call takes an idle connection or opens one, so a call that
waits for a key holds nobody up. A connection is never shared with a fork: a child that uses the client opens its own.
"""

import contextlib
import os
import socket
import time
from typing import Protocol

from lockstep.comm.channel import Session, Stranger, is_same_user, prove
from lockstep.comm.etcd import SCHEME, EtcdClient
from lockstep.comm.store_server import HANDSHAKE_S, PURPOSE, Op, pack, unpack

RETRY_S = 0.05
"""A process that finds nobody at the meeting point tries again this often."""

Address = str | tuple[str, int]
"""The name of an abstract Unix socket, or host and port."""


class KeyClient(Protocol):
    """Asks for the keys of one run."""

    host: str
    """Where the keys are; empty if on this host."""

    def call(self, operation: Op, *operands: str | bytes, timeout_s: float) -> list[bytes]:
        """The answer to one request."""

    def close(self) -> None:
        """End the connections that are idle; the client itself stays usable."""


class _Link:
    """One connection to the server."""

    def __init__(self, channel: socket.socket, session: Session) -> None:
        self._channel, self._session = channel, session
        self.pid = os.getpid()

    def call(self, request: bytes, timeout_s: float) -> list[bytes]:
        """The answer to one request; raises TimeoutError, or another OSError if the server is gone."""
        until = time.monotonic() + timeout_s
        self._channel.settimeout(max(0.001, timeout_s))
        self._channel.sendall(self._session.seal(request))
        while True:
            self._channel.settimeout(max(0.001, until - time.monotonic()))
            data = self._channel.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the server has ended the connection")
            for answer in self._session.feed(data):
                return unpack(answer)

    def close(self) -> None:
        self._channel.close()


class StoreClient:
    """Asks the StoreServer at `address`."""

    def __init__(self, address: Address, secret: bytes, timeout_s: float) -> None:
        """Made when a first connection stands, which is tried for `timeout_s`."""
        self.address = address
        self.host = "" if isinstance(address, str) else address[0]
        self._secret = secret
        self._idle: list[_Link] = []
        self._idle.append(self._connect(timeout_s))

    def call(self, operation: Op, *operands: str | bytes, timeout_s: float) -> list[bytes]:
        """See KeyClient."""
        request = pack([operation.value, *(part.encode() if isinstance(part, str) else part for part in operands)])
        link = self._take() or self._connect(min(timeout_s, 2 * HANDSHAKE_S))
        try:
            answer = link.call(request, timeout_s)
        except BaseException:
            link.close()  # What it would say later is no answer to the next question.
            raise
        self._idle.append(link)
        return answer

    def close(self) -> None:
        """See KeyClient."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> _Link | None:
        with contextlib.suppress(IndexError):
            while (link := self._idle.pop()).pid != os.getpid():
                link.close()  # The parent's: this process only closes its own handle of it.
            return link
        return None

    def _connect(self, timeout_s: float) -> _Link:
        """A connection on which both sides are proved; tries again until the time is over."""
        until = time.monotonic() + timeout_s
        while True:
            left = until - time.monotonic()
            channel = _open(self.address)
            try:
                channel.settimeout(max(0.001, min(left, HANDSHAKE_S)))
                channel.connect("\0" + self.address if isinstance(self.address, str) else self.address)
                if not is_same_user(channel):
                    raise Stranger("the process at the meeting point belongs to another user")
                return _Link(channel, prove(channel, self._secret, PURPOSE, is_server=False, timeout_s=HANDSHAKE_S))
            except (OSError, ValueError):
                channel.close()
                if left <= 0:
                    raise
            time.sleep(RETRY_S)


def _open(address: Address) -> socket.socket:
    if isinstance(address, str):
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
    channel = socket.socket(family, socket.SOCK_STREAM)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return channel


def open_client(where: str, secret: bytes, timeout_s: float) -> KeyClient:
    """A client of the keys at `where`: the name of a Unix socket, HOST:PORT, or the members of an etcd cluster."""
    if where.startswith(SCHEME):
        return EtcdClient(where, secret, timeout_s)
    host, colon, port = where.rpartition(":")
    return StoreClient((host.strip("[]"), int(port)) if colon else where, secret, timeout_s)
