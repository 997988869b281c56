"""A socket on which both sides have proved to know the run's secret.

Used by the workers' store (and so by everything that watches through it) and by the connections of `Async`. What it
holds against: other users of the machine and other machines of the network, who find the port and connect, replay,
send garbage, or say nothing.

**Proof.** The client sends 32 random bytes. The server answers with 32 of its own and a MAC over both (HMAC-SHA256
under the secret); the client checks it and answers with a MAC of its own. Both MACs are over all random bytes, the
role of the sender and the `purpose` of the connection: an answer cannot be replayed, sent back to its sender, nor
carried to another service of the run. The server proves itself first, so a client tells nothing to a stranger who took
the port. What a stranger learns by asking is a MAC under 128 random bits, which is no use.

**Messages** that follow are a length, a MAC and the content. The MAC is under a key made from the secret and both
random parts, and over the direction and the number of the message: none can be changed, left out, repeated or moved to
another connection. Nothing is encrypted: who can read the wire can read values, as with gloo and NCCL.

**Nothing is spent on strangers.** Before the proof a side takes exactly the bytes of the next handshake message, of a
fixed length, and answers at most one; the first byte that cannot be right ends the connection. `Session` knows no
socket and never waits: the server reads it from one loop, clients from blocking sockets with one deadline.
"""

import hashlib
import hmac
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Iterator

SECRET_BYTES = 16
_NONCE_BYTES = 32
MAC_BYTES = 32
_HEAD = struct.Struct(f"<I{MAC_BYTES}s")
MAX_MESSAGE_BYTES = 256 << 20
"""A longer message is not believed, even of a peer: a store is no place for models."""
_GREETING = b"lockstep1"


class Stranger(ConnectionError):
    """The other side has not proved that it knows the run's secret, or a message is not what its MAC says."""


def mac(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over `parts`, each with its length, so that no two lists of parts have the same."""
    return hmac.digest(key, b"".join(struct.pack("<Q", len(part)) + part for part in parts), hashlib.sha256)


class Session:
    """One side of a connection: bytes in, bytes and messages out."""

    def __init__(self, secret: bytes, purpose: bytes, *, is_server: bool) -> None:
        self._secret, self._purpose, self._is_server = secret, purpose, is_server
        self._mine = secrets.token_bytes(_NONCE_BYTES)
        self._nonces = b""
        self._key = b""
        self._sent = self._received = 0
        self._buffer = bytearray()
        self.is_proved = False
        """Whether the other side is known to know the secret."""
        self.outgoing = b"" if is_server else _GREETING + self._mine
        """What the handshake wants to be sent now."""

    @property
    def missing_bytes(self) -> int:
        """How many bytes the next step needs: who reads no more leaves what follows a handshake on the socket."""
        return self._expected_bytes() - len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take what has arrived; gives the messages that are complete. Raises Stranger."""
        self._buffer += data
        while len(self._buffer) >= (expected := self._expected_bytes()):
            if not self.is_proved:
                self._prove(self._take(expected))
            else:
                yield self._open(self._take(expected))
        self._check_greeting()

    def seal(self, content: bytes) -> bytes:
        """The bytes of one message."""
        if len(content) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(content)} bytes is more than {MAX_MESSAGE_BYTES}")
        head = _HEAD.pack(len(content), self._mac(self._is_server, self._sent, content))
        self._sent += 1
        return head + content

    def _expected_bytes(self) -> int:
        if not self.is_proved:
            if self._is_server:
                return MAC_BYTES if self._nonces else len(_GREETING) + _NONCE_BYTES
            return _NONCE_BYTES + MAC_BYTES
        return _HEAD.size + (self._body_bytes() if len(self._buffer) >= _HEAD.size else 0)

    def _body_bytes(self) -> int:
        num_bytes: int = _HEAD.unpack_from(self._buffer)[0]
        if num_bytes > MAX_MESSAGE_BYTES:
            raise Stranger(f"a message of {num_bytes} bytes was announced")
        return num_bytes

    def _take(self, num_bytes: int) -> bytes:
        taken = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        return taken

    def _check_greeting(self) -> None:
        """End a connection of another protocol at its first wrong byte."""
        if self._is_server and not self._nonces and not _GREETING.startswith(bytes(self._buffer[: len(_GREETING)])):
            raise Stranger("the other side speaks another protocol")

    def _prove(self, data: bytes) -> None:
        """One step of the handshake."""
        if self._is_server and not self._nonces:
            if not data.startswith(_GREETING):
                raise Stranger("the other side speaks another protocol")
            self._nonces = data[len(_GREETING) :] + self._mine
            self.outgoing = self._mine + self._proof(b"server")
            return
        if not self._is_server:
            self._nonces = self._mine + data[:_NONCE_BYTES]
            self.outgoing = self._proof(b"client")
        if not hmac.compare_digest(data[-MAC_BYTES:], self._proof(b"client" if self._is_server else b"server")):
            self.outgoing = b""
            raise Stranger("the other side does not know the secret of this run")
        self._key = self._proof(b"session")
        self.is_proved = True

    def _proof(self, role: bytes) -> bytes:
        return mac(self._secret, role, self._purpose, self._nonces)

    def _mac(self, by_server: bool, number: int, content: bytes) -> bytes:
        return mac(self._key, struct.pack("<?Q", by_server, number), content)

    def _open(self, data: bytes) -> bytes:
        content = data[_HEAD.size :]
        if not hmac.compare_digest(_HEAD.unpack_from(data)[1], self._mac(not self._is_server, self._received, content)):
            raise Stranger("a message was changed on its way")
        self._received += 1
        return content


def prove(channel: socket.socket, secret: bytes, purpose: bytes, *, is_server: bool, timeout_s: float) -> Session:
    """The handshake on a connected socket; not a byte more is read. Raises Stranger, TimeoutError, other OSErrors."""
    session = Session(secret, purpose, is_server=is_server)
    until = time.monotonic() + timeout_s
    while session.outgoing or not session.is_proved:
        channel.settimeout(max(0.001, until - time.monotonic()))
        channel.sendall(session.outgoing)
        session.outgoing = b""
        if not session.is_proved:
            data = channel.recv(session.missing_bytes)
            if not data:
                raise Stranger("the other side closed the connection instead of proving that it knows the secret")
            list(session.feed(data))
        if time.monotonic() > until:
            raise TimeoutError("the handshake took too long")
    return session


def is_same_user(channel: socket.socket) -> bool:
    """Whether the process at the other end of a Unix socket belongs to this user; the kernel says so."""
    if channel.family != socket.AF_UNIX or sys.platform != "linux":
        return True
    credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())
