"""torch's key-value store over channels that only workers of this run can open: see `store_server`.

torch's own TCPStore lets in whoever finds its port. This one takes its place wherever the run has a secret; gloo, NCCL
and torch's groups use it through torch's C++ trampoline for stores written in Python.

**Threads.** Any number may use one store at once, C++ threads among them, and a call that waits for a key holds nobody
up: see `key_client`, whose clients do the work. `clone` only has a timeout of its own.

**Lifetime.** torch's C++ side may hold a store longer than Python does (a clone inside a PrefixStore, a group that
could not be ended), and would find a store without methods once the Python object is gone. So a store lives as long
as the process, kept by its registration to be closed at exit; that is a few hundred bytes for each `join`.
"""

import atexit
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lockstep.comm.etcd import SCHEME, EtcdClient
from lockstep.comm.key_client import Address, KeyClient, StoreClient, open_client
from lockstep.comm.store_server import Op


class KeyStore(dist.Store):
    """The store of a run, by whatever client reaches its keys."""

    def __init__(self, client: KeyClient, timeout: timedelta) -> None:
        super().__init__()
        self.set_timeout(timeout)
        self._client = client
        atexit.register(self.close)

    @property
    def host(self) -> str:
        """Where the server is; empty if on this host."""
        return self._client.host

    @property
    def _patience(self) -> timedelta:
        """How long a call may take: what `set_timeout` was given, by C++ too."""
        patience: timedelta = self.timeout  # type: ignore[attr-defined]  # Not in torch's stubs.
        return patience

    def close(self) -> None:
        """End the connections that are idle; the store itself stays usable."""
        self._client.close()

    def clone(self) -> "KeyStore":
        """Another store of the same keys, with a timeout of its own."""
        return KeyStore(self._client, self._patience)

    # What torch asks for, from Python and from C++.

    def set(self, key: str, value: str | bytes) -> None:
        """See torch.distributed.Store."""
        self._call(Op.SET, key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """See torch.distributed.Store."""
        self._call(Op.SET, *(part for pair in zip(keys, values, strict=True) for part in pair))

    def get(self, key: str) -> bytes:
        """See torch.distributed.Store."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See torch.distributed.Store."""
        return self._call(Op.GET, *keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See torch.distributed.Store."""
        self._call(Op.WAIT, *keys, timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """See torch.distributed.Store."""
        return self._call(Op.CHECK, *keys)[0] == b"1"

    def add(self, key: str, amount: int) -> int:
        """See torch.distributed.Store."""
        return int(self._call(Op.ADD, key, str(amount))[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See torch.distributed.Store."""
        return self._call(Op.COMPARE_SET, key, expected, desired)[0]

    def append(self, key: str, value: str | bytes) -> None:
        """See torch.distributed.Store."""
        self._call(Op.APPEND, key, value)

    def delete_key(self, key: str) -> bool:
        """See torch.distributed.Store."""
        return self._call(Op.DELETE, key)[0] == b"1"

    def num_keys(self) -> int:
        """See torch.distributed.Store."""
        return int(self._call(Op.COUNT)[0])

    def has_extended_api(self) -> bool:
        """See torch.distributed.Store."""
        return True

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 (the names that torch's trampoline looks for)

    def _call(self, operation: Op, *operands: str | bytes, timeout: timedelta | None = None) -> list[bytes]:
        seconds = (timeout or self._patience).total_seconds()
        try:
            return self._client.call(operation, *operands, timeout_s=seconds)
        except TimeoutError as error:
            keys = ", ".join(str(part) for part in operands[:8])
            raise dist.DistStoreError(f"wait timeout after {int(seconds * 1000)}ms, keys: {keys}") from error
        except OSError as error:
            raise dist.DistNetworkError(f"the place where the workers met is gone: {error}") from error


class SecretStore(KeyStore):
    """The store of a run with a secret, served at `address`; made when a first connection stands."""

    def __init__(self, address: Address, secret: bytes, timeout: timedelta) -> None:
        super().__init__(StoreClient(address, secret, timeout.total_seconds()), timeout)
        self.address = address


class EtcdStore(KeyStore):
    """The store of a run whose keys an etcd cluster keeps, as `etcd://a:2379,b:2379,c:2379`."""

    def __init__(self, where: str, secret: bytes, timeout: timedelta) -> None:
        super().__init__(EtcdClient(where, secret, timeout.total_seconds()), timeout)


def launchers_store(where: str, secret: bytes, timeout: timedelta) -> KeyStore:
    """The store that a launcher says is at `where`: the name of a Unix socket, HOST:PORT, or an etcd cluster."""
    if where.startswith(SCHEME):
        return EtcdStore(where, secret, timeout)
    return KeyStore(open_client(where, secret, timeout.total_seconds()), timeout)
