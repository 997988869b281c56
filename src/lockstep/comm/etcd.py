"""The keys of a run in an etcd cluster, over its HTTP gateway: a client for launchers and workers, see `key_client`.

Any minority of the cluster's members may die: what fails at one is tried at the next. etcd keeps nobody out, so a value
is stored behind a MAC under the run's secret, over the key and the value: who does not know the secret can neither make
nor move one, and what has a wrong MAC is refused. Such a one can still delete keys, or put back an older value of the
same key: that can hold up or end a run, as taking the cluster away can. Let only the run's hosts reach it.

    lockstep/RUN/KEY              a key; RUN follows from the secret
    lockstep/RUN/forgotten/KEY    written by FORGET: waits that began before it, for keys that begin so, are broken off

What changes a value on the strength of what it was (ADD and the like) is done by a transaction that looks whether
it has changed since. Each value has random letters of its own, so that one who has lost the answer sees whether it was
done. Waits look again and again, after 5 to 100 ms: a watch would need a connection and a parser of its own.
"""

import base64
import contextlib
import hmac
import http.client
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.comm.channel import MAC_BYTES, Stranger, mac
from lockstep.comm.routes import is_loopback, route_to
from lockstep.comm.store_server import Op
from lockstep.errors import LaunchError

SCHEME = "etcd://"
_TOKEN_BYTES = 8
_ATTEMPT_S = 1.5
"""How long one member of the cluster has for an answer, until the next one is asked."""
_PAUSES_S = (0.005, 0.1)
_FORGOTTEN = "forgotten/"
_MOST_KEYS = 100
"""etcd takes 128 operations in a transaction."""
LEASE_S = 5


class Deposed(Exception):
    """Another launcher decides by now: what was to be written was not."""


def endpoints(where: str) -> list[str]:
    """The members of `etcd://a:2379,b:2379`; LaunchError where it is none of that."""
    found = [each for each in where.removeprefix(SCHEME).partition("/")[0].split(",") if each]
    if not found or any(not each.rpartition(":")[2].isdigit() for each in found):
        raise LaunchError(f"--store {where}: give the members of an etcd cluster, as etcd://a:2379,b:2379,c:2379.")
    return found


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


class EtcdClient:
    """Asks the cluster at `where`."""

    def __init__(self, where: str, secret: bytes, timeout_s: float) -> None:
        """Made when the cluster has answered, which is tried for `timeout_s`."""
        self._endpoints = endpoints(where)
        self._secret = secret
        self._run = f"lockstep/{mac(secret, b'etcd run')[:8].hex()}/"
        self._idle: list[tuple[int, http.client.HTTPConnection]] = []
        self._at = 0
        """The member that has answered last."""
        self._trouble = "nothing was tried"
        """What the member said, or what became of the connection, that was asked last without success."""
        self.guard: tuple[str, int] | None = None
        """A key, and the revision that made it: without it, what is set is not set, and Deposed is raised."""
        hosts = [each.rpartition(":")[0].strip("[]") for each in self._endpoints]
        self.host = next((host for host in hosts if not is_loopback(route_to(host))), hosts[0])
        self.call(Op.CHECK, "any", timeout_s=timeout_s)

    def close(self) -> None:
        """See KeyClient."""
        while self._idle:
            self._idle.pop()[1].close()

    # Operations

    def call(self, operation: Op, *operands: str | bytes, timeout_s: float) -> list[bytes]:
        """See KeyClient."""
        until = time.monotonic() + timeout_s
        parts = [part.encode() if isinstance(part, str) else part for part in operands]
        keys = [part.decode() for part in parts] if operation in (Op.GET, Op.WAIT, Op.CHECK, Op.LIST) else []
        match operation:
            case Op.SET:
                token = secrets.token_bytes(_TOKEN_BYTES)
                pairs = zip(parts[::2], parts[1::2], strict=True)
                self._write([self._put(key.decode(), value, token) for key, value in pairs], until)
                return []
            case Op.GET | Op.WAIT:
                values = self._await(keys, until)
                return values if operation is Op.GET else []
            case Op.CHECK:
                return [b"1" if None not in self._read(keys, until)[0] else b""]
            case Op.LIST:
                return self._list(keys, until)
            case Op.FORGET:
                prefix = parts[0].decode()
                marker = self._put(f"{_FORGOTTEN}{prefix}", b"1", secrets.token_bytes(_TOKEN_BYTES))
                self._write([{"requestDeleteRange": self._range(prefix)}, marker], until)
                return []
            case Op.DELETE:
                request = {"requestDeleteRange": {"key": self._name(parts[0].decode())}}
                done = self._write([request], until)["responses"][0]["response_delete_range"]
                return [b"1" if int(done.get("deleted", 0)) else b""]
            case Op.COUNT:
                found = self._ask("kv/range", self._range("", count_only=True), until)
                return [str(found.get("count", 0)).encode()]
            case _:
                value = self._change(parts[0].decode(), _changes(operation, parts), until)
                return [parts[1] if value is None else value]  # As torch's stores have it, of a key that is missing.

    def _change(self, key: str, change: Callable[[bytes | None], bytes | None], until: float) -> bytes | None:
        """Replace the value of a key by what `change` makes of it, None for no change; returns the value then."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        while True:
            found = self._ask("kv/range", {"key": self._name(key)}, until).get("kvs", [{}])[0]
            value, mine = (None, b"") if not found else self._open(key, found)
            if mine == token:  # An earlier attempt was done, and its answer was lost.
                return value
            changed = change(value)
            if changed is None:
                return value
            compare = {"key": self._name(key), "target": "MOD", "mod_revision": found.get("mod_revision", "0")}
            txn = {"compare": [compare], "success": [self._put(key, changed, token)]}
            with contextlib.suppress(_Unclear):
                if self._ask("kv/txn", txn, until, is_write=True).get("succeeded"):
                    return changed

    def _await(self, keys: Sequence[str], until: float) -> list[bytes]:
        """The values of some keys, once all are there."""
        pause_s, begun = _PAUSES_S[0], 0
        while True:
            values, revision, forgotten = self._read(keys, until)
            begun = begun or revision
            there = [value for value in values if value is not None]
            if len(there) == len(values):
                return there
            if any(at > begun and key.startswith(prefix) for prefix, at in forgotten for key in keys):
                raise ConnectionResetError("the wait was broken off: what was waited for will not come")
            if time.monotonic() + pause_s > until:
                raise TimeoutError(f"waited for {', '.join(keys[:8])}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    def _read(self, keys: Sequence[str], until: float) -> tuple[list[bytes | None], int, list[tuple[str, int]]]:
        """The values of keys; the cluster's revision; what has been forgotten, at which revisions."""
        values: list[bytes | None] = []
        answer: dict[str, Any] = {}
        for first in range(0, len(keys), _MOST_KEYS):
            some = keys[first : first + _MOST_KEYS]
            requests: list[dict[str, Any]] = [{"requestRange": {"key": self._name(key)}} for key in some]
            requests.append({"requestRange": self._range(_FORGOTTEN, keys_only=True)})
            answer = self._ask("kv/txn", {"success": requests}, until)
            for key, found in zip(some, answer["responses"], strict=False):
                kvs = found["response_range"].get("kvs", [])
                values.append(self._open(key, kvs[0])[0] if kvs else None)
        markers = answer["responses"][-1]["response_range"].get("kvs", []) if answer else []
        start = len(self._run) + len(_FORGOTTEN)
        forgotten = [(base64.b64decode(kv["key"]).decode()[start:], int(kv["mod_revision"])) for kv in markers]
        return values, int(answer["header"]["revision"]) if answer else 0, forgotten

    def _list(self, prefixes: Sequence[str], until: float) -> list[bytes]:
        answer = self._ask("kv/txn", {"success": [{"requestRange": self._range(each)} for each in prefixes]}, until)
        parts: list[bytes] = []
        for found in answer["responses"]:
            for kv in found["response_range"].get("kvs", []):
                key = base64.b64decode(kv["key"]).decode().removeprefix(self._run)
                with contextlib.suppress(Stranger):  # As if it were not there: launchers look at all that is.
                    value = self._open(key, kv)[0]
                    parts += [key.encode(), value]
        return parts

    def _write(self, requests: list[dict[str, Any]], until: float) -> dict[str, Any]:
        """Carry out requests that may be done twice, all or none."""
        txn: dict[str, Any] = {"success": requests}
        if self.guard is not None:
            key, revision = self.guard
            txn["compare"] = [{"key": self._name(key), "target": "CREATE", "create_revision": str(revision)}]
        while True:
            with contextlib.suppress(_Unclear):
                answer = self._ask("kv/txn", txn, until, is_write=True)
                if not answer.get("succeeded"):
                    raise Deposed
                return answer

    # Who decides

    def grant_lease(self, until: float) -> str:
        """A lease of LEASE_S."""
        return str(self._ask("lease/grant", {"TTL": str(LEASE_S)}, until)["ID"])

    def keep_lease(self, lease: str, until: float) -> bool:
        """Have a lease for LEASE_S more; False if it is over."""
        return int(self._ask("lease/keepalive", {"ID": lease}, until).get("result", {}).get("TTL", 0)) > 0

    def revoke_lease(self, lease: str, until: float) -> None:
        """End a lease, and with it the keys that it holds."""
        self._ask("lease/revoke", {"ID": lease}, until)

    def claim(self, key: str, value: str, lease: str, until: float) -> int:
        """Make a key that nobody has made, as long as the lease lasts; the revision that made it, or 0."""
        put = self._put(key, value.encode(), secrets.token_bytes(_TOKEN_BYTES))
        put["requestPut"]["lease"] = lease
        compare = [{"key": self._name(key), "target": "CREATE", "create_revision": "0"}]
        look = {"requestRange": {"key": self._name(key)}}
        with contextlib.suppress(_Unclear):
            self._ask("kv/txn", {"compare": compare, "success": [put]}, until, is_write=True)
        found = self._ask("kv/range", look["requestRange"], until).get("kvs", [{}])[0]
        return int(found["create_revision"]) if found.get("lease") == lease else 0

    def wipe(self, key: str, value: str, seen: str | None, until: float) -> bool:
        """Drop all keys of the run, but for `key`, which is set; only if it was still as `seen`."""
        found = self._ask("kv/range", {"key": self._name(key)}, until).get("kvs", [{}])[0]
        now = self._open(key, found)[0].decode() if found else None
        if now != seen:
            return now == value
        compare = [{"key": self._name(key), "target": "MOD", "mod_revision": found.get("mod_revision", "0")}]
        before = {"key": self._range("")["key"], "range_end": self._name(key)}
        after = {"key": self._name(key + "\0"), "range_end": self._range("")["range_end"]}
        requests = [{"requestDeleteRange": before}, {"requestDeleteRange": after}]
        requests.append(self._put(key, value.encode(), secrets.token_bytes(_TOKEN_BYTES)))
        with contextlib.suppress(_Unclear):
            return bool(
                self._ask("kv/txn", {"compare": compare, "success": requests}, until, is_write=True).get("succeeded")
            )
        return False

    def clear(self, until: float) -> None:
        """Drop all keys of the run, which is over."""
        self._ask("kv/deleterange", self._range(""), until)

    # Keys and values

    def _name(self, key: str) -> str:
        return _encode((self._run + key).encode())

    def _range(self, prefix: str, **options: bool) -> dict[str, Any]:
        first = (self._run + prefix).encode()
        return {"key": _encode(first), "range_end": _encode(first[:-1] + bytes([first[-1] + 1])), **options}

    def _put(self, key: str, value: bytes, token: bytes) -> dict[str, Any]:
        sealed = mac(self._secret, b"etcd", self._run.encode(), key.encode(), token, value) + token + value
        return {"requestPut": {"key": self._name(key), "value": _encode(sealed)}}

    def _open(self, key: str, kv: dict[str, Any]) -> tuple[bytes, bytes]:
        """A value and its token; Stranger if it was not put there by one who knows the secret."""
        sealed = base64.b64decode(kv.get("value", ""))
        given, token, value = sealed[:MAC_BYTES], sealed[MAC_BYTES:][:_TOKEN_BYTES], sealed[MAC_BYTES + _TOKEN_BYTES :]
        if not hmac.compare_digest(given, mac(self._secret, b"etcd", self._run.encode(), key.encode(), token, value)):
            raise Stranger(f"what etcd has under {key} was not put there by a process of this run")
        return value, token

    # Asking

    def _ask(self, path: str, request: dict[str, Any], until: float, *, is_write: bool = False) -> dict[str, Any]:
        """The cluster's answer; of a write whose answer was lost, _Unclear, since it may have been done."""
        body = json.dumps(request)
        while True:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no member of the etcd cluster has done what was asked for ({self._trouble})")
            connection = self._take(min(left, _ATTEMPT_S))
            try:
                connection.request("POST", f"/v3/{path}", body)
                response = connection.getresponse()
                content = response.read()
                if response.status != 200:
                    raise ConnectionError(f"etcd: {response.status} {content[:200]!r}")
                answer: dict[str, Any] = json.loads(content)
                if "error" in answer:
                    raise ConnectionError(f"etcd: {answer['error']}")
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                self._trouble = f"{type(error).__name__}: {error}"
                self._at += 1
                time.sleep(min(0.05, max(0.0, left)))
                if is_write and time.monotonic() < until:
                    raise _Unclear from error
                continue
            self._idle.append((os.getpid(), connection))
            return answer

    def _take(self, timeout_s: float) -> http.client.HTTPConnection:
        host, _, port = self._endpoints[self._at % len(self._endpoints)].rpartition(":")
        with contextlib.suppress(IndexError):
            while True:
                pid, connection = self._idle.pop()
                if pid == os.getpid() and (connection.host, connection.port) == (host.strip("[]"), int(port)):
                    connection.timeout = timeout_s
                    if connection.sock is not None:
                        connection.sock.settimeout(timeout_s)
                    return connection
                connection.close()
        return http.client.HTTPConnection(host.strip("[]"), int(port), timeout=timeout_s)


class _Unclear(Exception):
    """A write was asked for, and whether it was done is not known."""


def _changes(operation: Op, parts: Sequence[bytes]) -> Callable[[bytes | None], bytes | None]:
    """What becomes of a value by ADD, APPEND and COMPARE_SET."""
    if operation is Op.ADD:
        return lambda value: str(int(value or b"0") + int(parts[1])).encode()
    if operation is Op.APPEND:
        return lambda value: (value or b"") + parts[1]
    assert operation is Op.COMPARE_SET
    return lambda value: parts[2] if (value or b"") == parts[1] else None
