"""What a group in shared memory is made of, what torch asks it about itself, and how it carries operations out."""

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.segment import Segment, open_segment
from lockstep.comm.shard_tree import ShardTree
from lockstep.comm.shm import reduction as reductions
from lockstep.comm.shm.board import PAGE_BYTES, Board
from lockstep.comm.shm.mail import RING_BYTES, Mail
from lockstep.comm.shm.meeting import meet, watch_peers
from lockstep.comm.shm.moves import Moves
from lockstep.comm.shm.places import Places
from lockstep.comm.shm.queue import Queue
from lockstep.comm.shm.reduction import RedOpType, Reduction
from lockstep.comm.shm.reductions import Reductions
from lockstep.comm.shm.window import Window, half_bytes
from lockstep.comm.shm.work import ShmWork, await_all
from lockstep.errors import UsageError, WorkerLost

NAME = "shm"
PREMUL_SUM = RedOpType.PREMUL_SUM.value

TorchGroup: Any = dist.ProcessGroup
"""Untyped, since torch's stubs give every method several overloads of which it calls only one."""


class GroupBase(TorchGroup):  # type: ignore[misc]  # Any, see above
    """A process group in shared memory, but for its collectives."""

    supports_splitting = False
    supports_coalescing = False

    def __init__(self, store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, store
        self._group_name = self._group_desc = ""
        self._peers = meet(store, rank, size, ranks, timeout)
        self._segments: dict[int, Segment] = {}
        self._num_allocated = 0
        watch = watch_peers(self._peers, rank, timeout)
        rings_at = PAGE_BYTES + 2 * half_bytes(size)
        slice_bytes = rings_at + size * RING_BYTES
        control = open_segment("control", slice_bytes, store=store, rank=rank, size=size, watch=watch)
        self._board = Board(control, rank, self._peers, timeout)
        window = Window(control, PAGE_BYTES)
        self._places = Places(rank, self._segments)
        self._reducing = Reductions(self._board, window, self._places)
        self._moving = Moves(self._board, window, self._places)
        self._mail = Mail(self._board, control, rings_at)
        is_full = len(os.sched_getaffinity(0)) <= size
        self._queue = Queue("lockstep-shm", self._board.fail, can_be_helped=True, leaves=is_full)
        self._board.between, self._board.is_awaited = self._queue.between, self._queue.is_awaited
        self._reductions: dict[tuple[int, torch.dtype], Reduction] = {}
        self._coalescing: list[ShmWork] | None = None
        self._nccl: Any = None
        self._process, self._is_open = os.getpid(), True
        atexit.register(_close, weakref.ref(self))

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the function of this name."""
        number = self._num_allocated
        segment = self._open(numel, dtype, self._size)
        self._segments[number] = segment
        return segment.slice(self._rank)[: numel * dtype.itemsize].view(dtype)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the function of this name."""
        return self._open(numel, dtype, 1).bytes[: numel * dtype.itemsize].view(dtype)

    def _open(self, numel: int, dtype: torch.dtype, slices: int) -> Segment:
        key = f"segment/{self._num_allocated}"
        self._num_allocated += 1
        watch = watch_peers(self._peers, self._rank, self._board.timeout, self._board)
        num_bytes = max(numel, 1) * dtype.itemsize
        opened: list[Segment] = []

        def open_next() -> None:
            opened.append(
                open_segment(
                    key, num_bytes, store=self._store, rank=self._rank, size=self._size, watch=watch, slices=slices
                )
            )

        self._queue.run("allocate", open_next, [])
        return opened[0]

    def release(self, tensor: Tensor) -> None:
        """Give back the memory that `allocate` gave for `tensor`, once no tensor over it is left."""
        number, _ = self._places.locate(tensor)
        self._places.forget_plans()
        self._segments.pop(number, None)

    def add_along(self, tree: ShardTree, lanes: Tensor, cuts: Sequence[tuple[int, int]], out: Tensor | None) -> ShmWork:
        """Start adding everybody's lanes along `tree`, see comm/ordered.py; returns what to wait for."""

        def operate() -> None:
            self._reducing.add_along(lanes, tree.contributions, tree.sums, cuts, out)

        return self._queue.submit("add_along", operate, [lanes])

    # What torch asks a group

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """This worker's rank in the group."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """How many workers the group has."""
        return self._size

    rank, size = getRank, getSize

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name of the backend."""
        return NAME

    name = getBackendName

    # torch's own group keeps its names in its backends, of which this group has none. C++ asks by the long names.

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Keep the name under which torch finds this group."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """The name under which torch finds this group."""
        return self._group_name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802 - torch's name
        """Keep what the user calls this group."""
        self._group_desc = text

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """What the user calls this group."""
        return self._group_desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])

    def _get_backend(self, device: torch.device) -> "GroupBase":
        return self if torch.device(device).type == "cpu" else self._cuda()

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the board counts."""

    def _get_sequence_number_for_group(self) -> int:
        return self._board.phase

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of every wait."""
        self._board.timeout = timeout

    def shutdown(self) -> None:
        """Leave the group; peers that still wait for this worker are told."""
        if not self._is_open or self._process != os.getpid():  # A forked child must not leave in its parent's name.
            return
        self._is_open = False
        self._queue.close()
        self._mail.close()
        self._board.leave()
        if self._nccl is not None:
            self._nccl.shutdown()

    def abort(self) -> None:
        """Break the group: whoever waits in it is told at once."""
        self._board.fail(WorkerLost(f"worker {self._peers[self._rank].rank} aborted the group.", ()))
        if self._nccl is not None:
            self._nccl.abort()

    # Carrying out

    def _do(self, name: str, operation: Callable[[], None], outputs: Any, options: Any) -> ShmWork:
        """Carry out now if the caller waits anyway, else when its turn comes."""
        if self._coalescing is None and not options.asyncOp:
            return self._queue.run(name, operation, outputs)
        work = self._queue.submit(name, operation, outputs)
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._cuda()._start_coalescing()
        else:
            self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self._cuda()._end_coalescing()
        works, self._coalescing = self._coalescing or [], None
        return self._queue.submit("coalesced", lambda: await_all(works), [])

    def _cuda(self) -> Any:
        """The NCCL backend that carries CUDA tensors of this group, opened when the first one comes."""
        if self._nccl is None:
            nccl = getattr(dist, "ProcessGroupNCCL", None)
            if nccl is None or not torch.cuda.is_available():
                raise UsageError("backend shm carries tensors in host memory, and NCCL is not there for CUDA tensors.")
            options = nccl.Options()
            options._timeout = self._board.timeout
            self._nccl = nccl(dist.PrefixStore("nccl", self._store), self._rank, self._size, options)
        return self._nccl

    def _reduction(self, op: Any, dtype: torch.dtype) -> tuple[Reduction, Any]:
        """The reduction that torch calls `op`, and the factor of a premultiplied sum."""
        kind = getattr(op, "op", op)
        key = (kind.value, dtype)
        found = self._reductions.get(key)
        if found is None:
            found = self._reductions[key] = reductions.reduction(kind, dtype, self._size)
        return found, op.__getstate__()[1] if kind.value == PREMUL_SUM else None


def _close(group: "weakref.ref[GroupBase]") -> None:
    """Let the threads of a group that was never destroyed end before the interpreter does."""
    alive = group()
    if alive is not None:
        with contextlib.suppress(Exception):
            alive.shutdown()
