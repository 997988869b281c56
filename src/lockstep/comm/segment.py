"""Anonymous memory that all workers of one host see.

A segment is one memfd: it has no name in any file system, counts against no /dev/shm limit, and the kernel frees it
when the last process that holds it is gone, however that process ended. The first worker of a group makes it and
hands the descriptor over a Unix socket whose random abstract name travels through the store; both sides let only a
process of the same user through. Its size is sealed, so that no peer can shrink it under another's feet (SIGBUS).

A segment is cut into one slice per worker, all of one size and on page borders. Its memory stays mapped as long as
a tensor over it lives, since the tensor holds the mapping.
"""

import contextlib
import fcntl
import mmap
import os
import platform
import secrets
import socket
import struct
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import LaunchError

PAGE = mmap.PAGESIZE
SLICE_S = 0.2
"""How long a wait during the handing over lasts before `watch` is called again."""

Watch = Callable[[str], None]
"""Called between the slices of a wait with what is waited for; raises when a peer will not come."""


class Segment:
    """Memory of `size` equal slices, that every worker of a group maps whole."""

    def __init__(self, descriptor: int, slice_bytes: int, size: int) -> None:
        self.slice_bytes = slice_bytes
        self.size = size
        self.memory = mmap.mmap(descriptor, slice_bytes * size)
        self.bytes: Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        """The whole segment; torch keeps the mapping alive for every view of it."""
        self.address = self.bytes.data_ptr()

    def slice(self, rank: int) -> Tensor:
        """Bytes of the slice of worker `rank`."""
        return self.bytes[rank * self.slice_bytes : (rank + 1) * self.slice_bytes]

    def offset_of(self, address: int, num_bytes: int, rank: int) -> int | None:
        """Where the `num_bytes` at `address` begin in the slice of `rank`; None if they do not lie within it."""
        offset = address - self.address - rank * self.slice_bytes
        return offset if offset >= 0 and offset + num_bytes <= self.slice_bytes else None


def await_keys(store: dist.Store, keys: list[str], watch: Watch, doing: str) -> list[bytes]:
    """The values of `keys` once all are there. Asks again and again, since a store's own wait cannot be watched."""
    pause = 0.001
    while not store.check(keys):
        watch(doing)
        time.sleep(pause)
        pause = min(2 * pause, SLICE_S)
    return [store.get(key) for key in keys]


def pages(num_bytes: int) -> int:
    """`num_bytes` rounded up to whole pages, at least one."""
    return max(1, -(-num_bytes // PAGE)) * PAGE


def open_segment(
    key: str,
    slice_bytes: int,
    *,
    store: dist.Store,
    rank: int,
    size: int,
    watch: Watch,
    slices: int | None = None,
) -> Segment:
    """A new segment, the same on all `size` workers; every worker of the group calls this with one `key`.

    It has one slice per worker, unless another number of `slices` is asked for.
    """
    _require_linux()
    slice_bytes, slices = pages(slice_bytes), slices or size
    descriptor = _create(slice_bytes * slices) if rank == 0 else _receive(key, store, watch)
    try:
        if rank == 0 and size > 1:
            _hand_over(descriptor, key, store, size, watch)
        return Segment(descriptor, slice_bytes, slices)
    finally:
        os.close(descriptor)  # The mapping keeps the memory.


def _require_linux() -> None:
    if platform.system() != "Linux":
        raise LaunchError(
            f"backend shm needs Linux (memfd and futex), and this is {platform.system()}. Use gloo: "
            "join(backend='gloo') or init_process_group('gloo')."
        )


def _create(num_bytes: int) -> int:
    descriptor = os.memfd_create("lockstep", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        raise LaunchError(f"backend shm: could not make {num_bytes} bytes of shared memory: {error}.") from error
    return descriptor


def _hand_over(descriptor: int, key: str, store: dist.Store, size: int, watch: Watch) -> None:
    """Give the descriptor to every other worker of the group, whoever of them comes first."""
    name = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listener:
        listener.bind("\0" + name)
        listener.listen(size)
        listener.settimeout(SLICE_S)
        store.set(key, name)
        served = 0
        while served < size - 1:
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                watch("handing over shared memory")
                continue
            with connection:
                if _is_same_user(connection):
                    socket.send_fds(connection, [b"\0"], [descriptor])
                    served += 1


def _receive(key: str, store: dist.Store, watch: Watch) -> int:
    """The descriptor that worker 0 of the group hands over under `key`."""
    name = await_keys(store, [key], watch, "waiting for shared memory")[0].decode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(SLICE_S)
        _connect(connection, name, watch)
        if not _is_same_user(connection):
            raise LaunchError("backend shm: the process that offers shared memory belongs to another user. Use gloo.")
        return _receive_descriptor(connection, watch)


def _receive_descriptor(connection: socket.socket, watch: Watch) -> int:
    while True:
        with contextlib.suppress(TimeoutError):
            message, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
            if len(descriptors) == 1:
                return descriptors[0]
            if not message:
                watch("waiting for shared memory")
                raise LaunchError(
                    "backend shm: worker 0 of the group refused to hand over shared memory: it runs as another user, "
                    "or it ended. Run all workers as one user, or use gloo."
                )
        watch("waiting for shared memory")


def _connect(connection: socket.socket, name: str, watch: Watch) -> None:
    while True:
        try:
            connection.connect("\0" + name)
            return
        except (TimeoutError, BlockingIOError):
            watch("connecting to worker 0 for shared memory")
            time.sleep(0.01)
        except OSError as error:
            watch("connecting to worker 0 for shared memory")
            raise LaunchError(
                f"backend shm: worker 0 of the group cannot be reached over a Unix socket ({error}). All workers must "
                "run on one host, in one network namespace. Use gloo where they do not."
            ) from error


def _is_same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())
