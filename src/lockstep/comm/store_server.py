"""Serves the keys under which the workers of a run meet, to those who know its secret: see `channel`.

One thread and one `select` loop own all connections and all keys, so nothing needs a lock and nobody can hold the
others up: every socket is non-blocking, a request that waits for keys is parked until they are set, and answers that a
client does not take are kept up to a limit. Strangers cost a bounded amount: a connection that has not proved itself
has `HANDSHAKE_S` and at most `MAX_UNPROVED` of them are kept. The oldest goes first, since a worker needs a millisecond
for its proof and a stranger who stays silent is older than that; a worker that is turned out tries again. Over a Unix
socket, processes of other users are turned out before they say a word.

It imports no torch: the launcher serves it, and starts workers before anybody has waited for torch.

On the wire a request is an operation and its operands, an answer a list of values: see `pack`.
"""

import collections
import contextlib
import enum
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.comm.channel import MAX_MESSAGE_BYTES, Session, Stranger, is_same_user

PURPOSE = b"store"
LATEST = "lockstep/latest"
"""The key that says which world was formed last: see `roster`."""
HANDSHAKE_S = 5.0
MAX_UNPROVED = 256
_MAX_BACKLOG_BYTES = 2 * MAX_MESSAGE_BYTES
_LENGTH = struct.Struct("<I")


class Op(bytes, enum.Enum):
    """What a client asks for."""

    SET = b"s"
    """Pairs of key and value."""
    GET = b"g"
    """The values of some keys, once all are there."""
    WAIT = b"w"
    """Nothing, once all keys are there."""
    CHECK = b"c"
    """Whether all keys are there."""
    ADD = b"a"
    """Key and number: the sum."""
    COMPARE_SET = b"x"
    """Key, expected and desired value: what is there then, as torch's stores define it."""
    APPEND = b"p"
    DELETE = b"d"
    COUNT = b"n"
    LIST = b"l"
    """All keys that begin with one of the operands, each followed by its value."""
    FORGET = b"f"
    """Drop the keys that begin with the operand, and break off waits for such keys."""


def pack(parts: Sequence[bytes]) -> bytes:
    """Parts as one string of bytes."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def unpack(content: bytes) -> list[bytes]:
    """The parts that `pack` was given; raises ValueError for what it cannot have made."""
    parts, at = [], 0
    while at < len(content):
        if at + _LENGTH.size > len(content):
            raise ValueError("a list of parts that ends in the middle")
        (num_bytes,) = _LENGTH.unpack_from(content, at)
        at += _LENGTH.size + num_bytes
        if at > len(content):
            raise ValueError("a part that is longer than its message")
        parts.append(content[at - num_bytes : at])
    return parts


class _Client:
    """One connection."""

    def __init__(self, channel: socket.socket, secret: bytes) -> None:
        self.channel = channel
        self.session = Session(secret, PURPOSE, is_server=True)
        self.since = time.monotonic()
        self.outgoing = bytearray()
        self.awaited: tuple[Op, list[bytes]] | None = None
        """The request that waits for keys."""


class StoreServer:
    """The keys of one run, served on `listener` by a thread of this process until `close`."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._keys: dict[bytes, bytes] = {}
        self._unproved: dict[_Client, None] = {}
        """In the order of their coming."""
        self._clients: set[_Client] = set()
        self._selector = selectors.DefaultSelector()
        self._posted: collections.deque[tuple[bytes, bytes | None]] = collections.deque()
        """What this process sets by itself, for the loop to take; with None, a beginning of keys to be forgotten."""
        self._watched: tuple[bytes, int] | None = None
        listener.setblocking(False)
        self._wake_fd, self._wakes_fd = os.pipe()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_fd, selectors.EVENT_READ, self._wake_up)
        self._is_over = False
        self._busy = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="lockstep-store", daemon=True)
        self._thread.start()

    def get(self, key: str) -> str | None:
        """What a key holds now; for the process that serves, from any thread."""
        value = self._keys.get(key.encode())
        return None if value is None else value.decode()

    def under(self, prefix: str) -> dict[str, str]:
        """All keys that begin so, by what follows; for the process that serves, from any thread."""
        begin = prefix.encode()
        kept = list(self._keys.items())
        return {key[len(begin) :].decode(): value.decode() for key, value in kept if key.startswith(begin)}

    def set(self, key: str, value: str) -> None:
        """Set a key soon; for the process that serves, from any thread."""
        self._posted.append((key.encode(), value.encode()))
        os.write(self._wakes_fd, b"x")

    def forget(self, prefix: str) -> None:
        """Drop the keys that begin so, soon, and end the connections that wait for such keys; from any thread."""
        self._posted.append((prefix.encode(), None))
        os.write(self._wakes_fd, b"x")

    def watch(self, prefix: str) -> int:
        """A file that can be read from when a client has set a key that begins so; the caller reads it empty."""
        read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watched = (prefix.encode(), write_fd)
        return read_fd

    def resting(self) -> contextlib.AbstractContextManager[Any]:
        """A block in which the thread does nothing, so that a fork finds no lock taken: OpenSSL's, behind every MAC."""
        return self._busy

    def close(self) -> None:
        """End the thread, all connections and the listener."""
        self._is_over = True
        os.write(self._wakes_fd, b"x")
        self._thread.join()
        for client in self._clients | self._unproved.keys():
            client.channel.close()
        self._selector.close()
        self._listener.close()
        os.close(self._wake_fd)
        os.close(self._wakes_fd)
        if self._watched is not None:
            os.close(self._watched[1])

    def _run(self) -> None:
        while not self._is_over:
            ready = self._selector.select(self._until_next_expiry())
            with self._busy:
                for key, _ in ready:
                    key.data()
                now = time.monotonic()
                while self._unproved and now > next(iter(self._unproved)).since + HANDSHAKE_S:
                    self._drop(next(iter(self._unproved)))

    def _wake_up(self) -> None:
        os.read(self._wake_fd, 1 << 12)
        while self._posted:
            key, value = self._posted.popleft()
            if value is None:
                self._forget(key)
            else:
                self._keys[key] = value
        self._answer_all_awaited()

    def _forget(self, prefix: bytes) -> None:
        for key in [key for key in self._keys if key.startswith(prefix)]:
            del self._keys[key]
        for client in list(self._clients):
            if client.awaited is not None and any(key.startswith(prefix) for key in client.awaited[1]):
                self._drop(client)

    def _until_next_expiry(self) -> float | None:
        if not self._unproved:
            return None
        return max(0.0, next(iter(self._unproved)).since + HANDSHAKE_S - time.monotonic()) + 0.01

    def _accept(self) -> None:
        try:
            channel, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # No file handle is left, or the client has gone: others are served first.
            time.sleep(0.01)
            return
        if not is_same_user(channel):
            channel.close()
            return
        channel.setblocking(False)
        if channel.family != socket.AF_UNIX:
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self._unproved) >= MAX_UNPROVED:
            self._drop(next(iter(self._unproved)))
        client = _Client(channel, self._secret)
        self._unproved[client] = None
        self._selector.register(channel, selectors.EVENT_READ, self._attendant(client))

    def _attendant(self, client: _Client) -> Callable[[], None]:
        """What is done for a client when its socket can be read or written."""

        def attend() -> None:
            if client not in self._clients and client not in self._unproved:
                return  # Dropped since the loop last looked.
            try:
                self._flush(client)
                self._read(client)
            except (OSError, ValueError, LookupError):  # Gone, a stranger, or one that does not speak our language.
                self._drop(client)

        return attend

    def _drop(self, client: _Client) -> None:
        self._unproved.pop(client, None)
        self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.channel)
        client.channel.close()

    def _read(self, client: _Client) -> None:
        try:
            data = client.channel.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise Stranger("closed")
        for content in client.session.feed(data):
            operation, *operands = unpack(content)
            self._serve(client, Op(operation), operands)
        if client.session.outgoing:
            client.outgoing += client.session.outgoing
            client.session.outgoing = b""
            self._flush(client)
        if client.session.is_proved and client in self._unproved:
            del self._unproved[client]
            self._clients.add(client)

    def _flush(self, client: _Client) -> None:
        """Send what can be sent now; watch for the rest to become possible."""
        with contextlib.suppress(BlockingIOError):
            while client.outgoing:
                del client.outgoing[: client.channel.send(client.outgoing)]
        if len(client.outgoing) > _MAX_BACKLOG_BYTES:
            raise Stranger("it takes no answers")
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
        if self._selector.get_key(client.channel).events != wanted:
            self._selector.modify(client.channel, wanted, self._selector.get_key(client.channel).data)

    def _serve(self, client: _Client, operation: Op, operands: list[bytes]) -> None:
        if operation in (Op.GET, Op.WAIT):
            client.awaited = (operation, operands)
            self._answer_awaited(client)
            return
        answer, has_new_keys = self._perform(operation, operands)
        self._send(client, answer)
        if has_new_keys:
            self._answer_all_awaited()

    def _answer_all_awaited(self) -> None:
        for client in [client for client in self._clients if client.awaited is not None]:
            try:
                self._answer_awaited(client)
            except OSError:
                self._drop(client)

    def _answer_awaited(self, client: _Client) -> None:
        assert client.awaited is not None
        operation, keys = client.awaited
        if all(key in self._keys for key in keys):
            client.awaited = None
            self._send(client, [self._keys[key] for key in keys] if operation is Op.GET else [])

    def _send(self, client: _Client, parts: Sequence[bytes]) -> None:
        client.outgoing += client.session.seal(pack(parts))
        self._flush(client)

    def _perform(self, operation: Op, operands: list[bytes]) -> tuple[list[bytes], bool]:
        """The answer, and whether keys may be there that were not."""
        keys, first = self._keys, operands[0] if operands else b""
        match operation:
            case Op.SET:
                keys.update(zip(operands[::2], operands[1::2], strict=True))
                if self._watched is not None and first.startswith(self._watched[0]):
                    with contextlib.suppress(BlockingIOError):
                        os.write(self._watched[1], b"x")
                return [], True
            case Op.CHECK:
                return [b"1" if all(key in keys for key in operands) else b""], False
            case Op.ADD:
                keys[first] = str(int(keys.get(first, b"0")) + int(operands[1])).encode()
                return [keys[first]], True
            case Op.COMPARE_SET:
                _, expected, desired = operands
                if keys.get(first, b"") == expected:  # A missing key is as good as an empty one.
                    keys[first] = desired
                return [keys.get(first, expected)], True
            case Op.APPEND:
                keys[first] = keys.get(first, b"") + operands[1]
                return [], True
            case Op.DELETE:
                return [b"1" if keys.pop(first, None) is not None else b""], False
            case Op.LIST:
                found = [key for key in keys if key.startswith(tuple(operands))]
                return [part for key in found for part in (key, keys[key])], False
            case Op.FORGET:
                self._forget(first)
                return [], False
            case _:
                return [str(len(keys)).encode()], False
