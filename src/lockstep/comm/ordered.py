"""Reductions with the same bits on any number of workers and any backend: along the tree over the shards.

Every worker has its roots (see shard_tree.py) in the lanes of one stretch of memory. Of each lane, the owner of a part
gets that part from everybody, adds along the tree, and either keeps the result or sends it to all. That moves the
bytes of a ring: (N-1)/N of a lane each way, and once more per further root on the way there.

    InMemory       over shm, in memory from `shm.allocate`: owners read the others' lanes where they are
    ByMessages     anywhere else, by sends and receives, beside the backward pass (see carrier.py)
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.carrier import carrier_of
from lockstep.comm.shard_tree import ShardTree
from lockstep.comm.shm.group import ShmGroup
from lockstep.comm.shm.places import BLOCK_BYTES, cut

Cuts = Sequence[tuple[int, int]]
"""First and last-but-one element of the part that each worker adds."""


class Ordered(Protocol):
    """Adds along a tree. `lanes` is a matrix: one row per lane, all workers' alike."""

    tree: ShardTree

    def all_reduce(self, lanes: Tensor) -> Any:
        """Start setting everybody's last lane to the sum; returns what to wait for."""

    def reduce_scatter(self, lanes: Tensor, cuts: Cuts, out: Tensor) -> Any:
        """Start setting `out` to the sum over this worker's part of `cuts`; returns what to wait for."""

    def release(self) -> None:
        """Let go of the group."""


def even_cuts(numel: int, size: int, itemsize: int) -> Cuts:
    """Parts of about one length, on cache lines."""
    return [cut(numel, size, rank, itemsize) for rank in range(size)]


class InMemory:
    """Over shm: everybody's lanes are in shared memory."""

    def __init__(self, tree: ShardTree, group: ShmGroup) -> None:
        self.tree, self._group = tree, group

    def all_reduce(self, lanes: Tensor) -> Any:
        """See Ordered."""
        cuts = even_cuts(lanes.shape[1], self.tree.workers, lanes.itemsize)
        return self._group.add_along(self.tree, lanes, cuts, None)

    def reduce_scatter(self, lanes: Tensor, cuts: Cuts, out: Tensor) -> Any:
        """See Ordered."""
        return self._group.add_along(self.tree, lanes, cuts, out)

    def release(self) -> None:
        """Let go of the group."""
        del self._group


class ByMessages:
    """By sends and receives of a group that nobody else uses at the same time."""

    def __init__(self, tree: ShardTree, group: dist.ProcessGroup, device: torch.device) -> None:
        self.tree, self._group = tree, group
        self._rank = group.rank()
        self._carrier = carrier_of(device, "ordered")
        self.num_bytes_sent = 0

    def all_reduce(self, lanes: Tensor) -> Any:
        """See Ordered."""
        cuts = even_cuts(lanes.shape[1], self.tree.workers, lanes.itemsize)

        def operate() -> None:
            total = lanes[-1]
            begin, end = cuts[self._rank]
            self._add(lanes, cuts, total[begin:end])
            self._exchange(
                [(rank, total[begin:end]) for rank in range(self.tree.workers)],
                [(rank, total[slice(*cuts[rank])]) for rank in range(self.tree.workers)],
            )

        return self._carrier.carry_out(operate)

    def reduce_scatter(self, lanes: Tensor, cuts: Cuts, out: Tensor) -> Any:
        """See Ordered."""
        return self._carrier.carry_out(lambda: self._add(lanes, cuts, out))

    def release(self) -> None:
        """Let go of the group."""
        self._carrier.close()
        del self._group

    def _add(self, lanes: Tensor, cuts: Cuts, out: Tensor) -> None:
        """Set `out` to the sum over this worker's part."""
        begin, end = cuts[self._rank]
        sources: list[Tensor] = []
        for rank, lane in self.tree.contributions:
            mine = rank == self._rank
            sources.append(lanes[lane, begin:end] if mine else lanes.new_empty(end - begin))
        own_lanes = [lane for rank, lane in self.tree.contributions if rank == self._rank]
        self._exchange(
            [(rank, lanes[lane, slice(*cuts[rank])]) for rank in range(self.tree.workers) for lane in own_lanes],
            [(rank, source) for (rank, _), source in zip(self.tree.contributions, sources, strict=True)],
        )
        step = BLOCK_BYTES // lanes.itemsize if lanes.device.type == "cpu" else max(1, end - begin)
        for at in range(0, end - begin, step):
            self.tree.sums([source[at : at + step] for source in sources], out[at : at + step])

    def _exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send to and receive from the others; what goes to oneself, and what is empty, does not travel."""
        operations = []
        for operation, messages in ((dist.isend, sends), (dist.irecv, receives)):
            for rank, part in messages:
                if rank != self._rank and part.numel():
                    operations.append(dist.P2POp(operation, part, group=self._group, group_peer=rank))
                    self.num_bytes_sent += part.numel() * part.itemsize * (operation is dist.isend)
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
