"""The process group that torch gets for `shm`: workers of one host, all through shared memory."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from lockstep.comm.flat_group import AddAlong, Cuts, FlatGroup, Place, Spans, by_nccl, flatten, write_back
from lockstep.comm.shm import NAME
from lockstep.comm.shm.host import Host
from lockstep.comm.shm.p2p import ANYBODY
from lockstep.comm.shm.queue import Queue, ShmWork, Turn
from lockstep.comm.shm.segment import as_bytes, meet

if TYPE_CHECKING:
    from lockstep.comm.tree import ShardTree


class ShmGroup(FlatGroup):
    """A process group in shared memory."""

    backend_name = NAME

    def __init__(self, store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta) -> None:
        turn = Turn()
        host = Host(store, rank, meet(store, rank, size, ranks, timeout), timeout, turn)
        queue = Queue("lockstep-shm", host.barrier.fail, turn)
        super().__init__(store, Place(rank, size), host, host.reductions, host.copies, queue)
        self._messages = host.messages

    def adder(self, tree: "ShardTree") -> AddAlong:
        """See FlatGroup."""

        def add(lanes: Tensor, cuts: Cuts, out: Tensor | None) -> None:
            self._host.reductions.add_along(lanes, tree.contributions, tree.sums, cuts, out)

        return add

    def share(self, flats: Sequence[tuple[Tensor, Spans]]) -> ShmWork:
        """See FlatGroup: all is there, once all workers are."""
        return self.submit("barrier", self._host.reductions.barrier, [])

    @property
    def writes_for(self) -> tuple[int, ...]:
        """See FlatGroup."""
        return (self._place.rank,)

    def _get_sequence_number_for_group(self) -> int:
        return self._host.barrier.phase

    def _close(self) -> None:
        self._messages.close()

    @by_nccl("send")
    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        """Send to one worker."""
        work = ShmWork("send", tensors)
        self._messages.send(as_bytes(flatten(tensors[0])), target, tag, work)
        return self._collect(work)

    @by_nccl("recv")
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        """Receive from one worker."""
        flat = flatten(tensors[0])
        work = ShmWork("recv", tensors, before=lambda: write_back(flat, tensors[0]))
        self._messages.receive(as_bytes(flat), source, tag, work)
        return self._collect(work)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive from whichever worker sends first."""
        return self.recv(tensors, ANYBODY, tag)
