"""The memory that all workers of one host see: how it is made and handed over, and where tensors lie in it.

A segment is one memfd: it has no name in any file system, counts against no /dev/shm limit, and the kernel frees it
when the last process that holds it is gone, however that process ended. The first worker of a group makes it and
hands the descriptor over a Unix socket whose random abstract name travels through the store; both sides let only a
process of the same user through. Its size is sealed, so that no peer can shrink it under another's feet (SIGBUS).

A segment is cut into one slice per worker, all of one size and on page borders. Its memory stays mapped as long as
a tensor over it lives, since the tensor holds the mapping.
"""

import errno
import fcntl
import mmap
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.channel import is_same_user
from lockstep.comm.peers import Peer
from lockstep.errors import LaunchError, WorkerLost

PAGE = mmap.PAGESIZE
LINE = 64
BLOCK_BYTES = 256 << 10
"""Reduced and written back while still in the cache (tuned by bench/collectives.py: 32 KB to 1 MB)."""
SLICE_S = 0.2
"""How long a wait during the handing over lasts before `watch` is called again."""

Watch = Callable[[str], None]
"""Called between the slices of a wait with what is waited for; raises when a peer will not come."""
Location = tuple[int, int]
"""Segment and offset in a worker's slice of it."""
Part = tuple[int, Location, int, int]
"""Elements of a worker's tensor: its rank, where the tensor begins, and the first and last-but-one element."""
UNSHARED = (-1, -1)
"""The location of what does not lie in shared memory."""


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


class Heap:
    """The segments of one group, and where flat tensors lie in them, as worker `rank` finds its way."""

    def __init__(self, store: dist.Store, rank: int, size: int, watch: Callable[[], Watch]) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._watch = watch
        """Makes what watches the peers while one segment is handed over."""
        self._segments: dict[int, Segment] = {}
        """Those from `allocate`, by the number of their opening."""
        self._num_opened = 0
        self._blocks: dict[tuple[tuple[Part, ...], torch.dtype], list[list[Tensor]]] = {}

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed tensor of this worker's own, in memory that others see; every worker of the group calls this."""
        number = self._num_opened
        segment = self._segments[number] = self._open(numel, dtype, self._size)
        return segment.slice(self._rank)[: numel * dtype.itemsize].view(dtype)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A zeroed tensor that exists once, and that every worker of the group sees; all of them call this."""
        return self._open(numel, dtype, 1).bytes[: numel * dtype.itemsize].view(dtype)

    def _open(self, numel: int, dtype: torch.dtype, slices: int) -> Segment:
        key = f"segment/{self._num_opened}"
        self._num_opened += 1
        num_bytes = max(numel, 1) * dtype.itemsize
        return open_segment(
            key, num_bytes, store=self._store, rank=self._rank, size=self._size, watch=self._watch(), slices=slices
        )

    def release(self, tensor: Tensor) -> None:
        """Give back the memory that `allocate` gave for `tensor`, once no tensor over it is left."""
        number, _ = self.locate(tensor)
        self._blocks.clear()  # They refer to the memory.
        self._segments.pop(number, None)

    def locate(self, flat: Tensor) -> Location:
        """Segment and offset of `flat` in this worker's slice, or UNSHARED."""
        if not self._segments:
            return UNSHARED
        address, num_bytes = flat.data_ptr(), flat.numel() * flat.itemsize
        for number, segment in self._segments.items():
            offset = segment.offset_of(address, num_bytes, self._rank)
            if offset is not None:
                return (number, offset) if offset % flat.itemsize == 0 else UNSHARED
        return UNSHARED

    def at(self, rank: int, location: Location, begin: int, end: int, dtype: torch.dtype) -> Tensor:
        """Elements `begin` to `end` of what `rank` has at `location`."""
        number, offset = location
        segment = self._segments[number]
        start = rank * segment.slice_bytes + offset
        return segment.bytes[start + begin * dtype.itemsize : start + end * dtype.itemsize].view(dtype)

    def blocks(self, parts: tuple[Part, ...], dtype: torch.dtype) -> list[list[Tensor]]:
        """`parts`, all of one length, block by block: for each block, by part, its memory.

        Kept, since training asks for the same ones for ever.
        """
        found = self._blocks.get((parts, dtype))
        if found is None:
            if len(self._blocks) > 256:
                self._blocks.clear()
            step = BLOCK_BYTES // dtype.itemsize
            rows = [self.at(rank, location, begin, end, dtype).split(step) for rank, location, begin, end in parts]
            found = self._blocks[parts, dtype] = [list(block) for block in zip(*rows, strict=True)]
        return found

    def locate_row(self, tensors: Sequence[Tensor]) -> Location:
        """Where `tensors` lie, if they lie one behind the other in one shared segment."""
        address = tensors[0].data_ptr()
        for tensor in tensors:
            if tensor.data_ptr() != address and tensor.numel():
                return UNSHARED
            address += tensor.numel() * tensor.itemsize
        number, offset = self.locate(tensors[0])
        if number < 0:
            return UNSHARED
        total = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return (number, offset) if offset + total <= self._segments[number].slice_bytes else UNSHARED


def cut(numel: int, size: int, rank: int, itemsize: int) -> tuple[int, int]:
    """First and last-but-one element of the part of `rank`: parts cover all, and begin on cache lines."""
    line = max(1, LINE // itemsize)
    lines = -(-numel // line)
    begin, end = lines * rank // size * line, lines * (rank + 1) // size * line
    return min(begin, numel), min(end, numel)


def as_bytes(flat: Tensor) -> Tensor:
    """The bytes of a flat tensor."""
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


# --- Meeting, and handing over ---


def meet(store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta) -> tuple[Peer, ...]:
    """Who is behind each rank; raises LaunchError if they are not all on this host."""
    peers = roll_call(store, rank, size, ranks, timeout)
    elsewhere = [peer for peer in peers if peer.host != peers[rank].host]
    if elsewhere:
        raise LaunchError(
            f"worker {peers[rank].rank}: backend shm needs all workers on one host (and in one container), and "
            f"{', '.join(map(str, elsewhere))} run elsewhere. Use hosts, or gloo."
        )
    return peers


def roll_call(store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta) -> tuple[Peer, ...]:
    """Who is behind each rank, wherever that is."""
    me = Peer.me(ranks[rank])
    store.set(f"peer/{rank}", me.format())
    deadline = time.monotonic() + timeout.total_seconds()

    def watch(doing: str) -> None:
        if time.monotonic() > deadline:
            missing = [str(ranks[other]) for other in range(size) if not store.check([f"peer/{other}"])]
            raise LaunchError(
                f"worker {me.rank}: waited {timeout} for the workers of a group (timed out); missing: "
                f"{', '.join(missing)}. All of them must make the group."
            )

    values = await_keys(store, [f"peer/{other}" for other in range(size)], watch, "meeting")
    return tuple(Peer.parse(value.decode()) for value in values)


def watch_peers(
    peers: tuple[Peer, ...], rank: int, timeout: timedelta, look: Callable[[], None] | None = None
) -> Watch:
    """What a wait while memory is handed over looks at: a broken group, the dead, and the deadline."""
    deadline = time.monotonic() + timeout.total_seconds()

    def watch(doing: str) -> None:
        if look is not None:
            look()
        dead = [peer for peer in peers if peer.rank != peers[rank].rank and peer.is_dead()]
        if dead:
            names = ", ".join(map(str, dead))
            raise WorkerLost(
                f"worker {peers[rank].rank}: {names} ended while this worker was {doing}. Its own output says why.",
                tuple(peer.rank for peer in dead),
            )
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"worker {peers[rank].rank}: {doing} took longer than {timeout} (timed out). All workers of the group "
                "must make the same groups and allocations in the same order."
            )

    return watch


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
    slice_bytes, slices = pages(slice_bytes), slices or size
    descriptor = _create(slice_bytes * slices) if rank == 0 else _receive(key, store, watch)
    try:
        if rank == 0 and size > 1:
            _hand_over(descriptor, key, store, size, watch)
        return Segment(descriptor, slice_bytes, slices)
    finally:
        os.close(descriptor)  # The mapping keeps the memory.


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
                if is_same_user(connection):
                    socket.send_fds(connection, [b"\0"], [descriptor])
                    served += 1


def _receive(key: str, store: dist.Store, watch: Watch) -> int:
    """The descriptor that worker 0 of the group hands over under `key`."""
    doing = "waiting for shared memory"
    name = await_keys(store, [key], watch, doing)[0].decode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(SLICE_S)
        try:
            connection.connect("\0" + name)  # Never blocks: the listener has room for all workers.
            if not is_same_user(connection):
                raise ConnectionError("it belongs to another user")
            while True:
                try:
                    message, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
                except TimeoutError:
                    watch(doing)
                    continue
                if descriptors:
                    return descriptors[0]
                if message:  # It came, and the system has dropped it.
                    raise OSError(errno.EMFILE, "Too many open files")
                raise ConnectionError("it ended, or belongs to another user")
        except OSError as error:
            watch(doing)
            if error.errno == errno.EMFILE:
                raise
            raise LaunchError(
                f"backend shm: worker 0 of the group does not hand over shared memory ({error}). All workers must run "
                "on one host, in one network namespace, as one user. Use gloo where they do not."
            ) from error
