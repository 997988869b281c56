"""The order of a sum: one fixed binary tree over the shards of a global batch, and reductions along it.

**The tree** belongs to the shards, not to the workers: whoever computes a shard, sums come about in the same order, and
so with the same bits on any number of workers and any backend. A node covers shards `begin` to `end`; its left half is
the largest power of two that leaves something for the right one:

    8 shards:  ((0 1)(2 3)) ((4 5)(6 7))        6 shards:  ((0 1)(2 3)) (4 5)        3:  (0 1) 2

A worker owns a run of shards. It adds within the largest nodes that lie in its run, its roots, and sends these:

    8 shards on 3 workers:  (0 1) 2 | 3 (4 5) | (6 7)

**Reductions.** Every worker has its roots in the lanes of one stretch of memory. Of each lane, the owner of a part gets
that part from all workers, adds along the tree, and either keeps the result or sends it to all. That moves the bytes of
a ring: (N-1)/N of a lane each way, and once more per further root on the way there.

    InMemory       over shm, in memory of the group: owners read the others' lanes where they are; over hosts, so within
                   each host, and what these have is added between them (see hosts/operations.py)
    ByMessages     anywhere else, by sends and receives, beside the backward pass

**Several messages in a row.** A reduction by messages is more than one collective: what is sent second depends on what
the first one brought, so it cannot be launched and waited for as one message can. On the CPU a thread goes through such
operations, on a GPU they are queued in a stream of their own (`carrier_of`): in the order in which they were given,
which must be the same on all workers, over a group that nothing else uses at the same time. So the n-th message of the
group is the n-th for all. What an operation raises is raised where it is waited for; a connection that breaks ends all
waits in gloo, and so the operation.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.flat_group import AddAlong, Cuts, FlatGroup
from lockstep.comm.shm.queue import Queue
from lockstep.comm.shm.segment import BLOCK_BYTES, cut

Node = tuple[int, int]
"""First and last-but-one shard."""


@dataclass(frozen=True, slots=True)
class Sums:
    """How several contributions become one sum: which two are added when."""

    steps: tuple[tuple[int, int], ...]
    """Numbers of what is added in each step: of a contribution, or, counted on from those, of an earlier step."""

    def __call__(self, contributions: Sequence[Tensor], out: Tensor) -> None:
        """Set `out`, which may be one of the contributions, to their sum."""
        values = list(contributions)
        if not self.steps:
            if out.data_ptr() != values[0].data_ptr():
                out.copy_(values[0])
            return
        for left, right in self.steps[:-1]:
            values.append(torch.add(values[left], values[right]))
        left, right = self.steps[-1]
        torch.add(values[left], values[right], out=out)


class ShardTree:
    """The tree over `shards`, cut between `workers`."""

    def __init__(self, shards: int, workers: int, counts: Sequence[int] | None = None) -> None:
        """`counts`: how many shards each worker owns; as equal as can be if not given."""
        self.shards, self.workers = shards, workers
        ends = list(itertools.accumulate(counts)) if counts is not None else []
        even = [run(shards, workers, rank) for rank in range(workers)]
        self.runs = list(zip([0, *ends], ends, strict=False)) or even
        """What each worker owns."""
        self.roots = [_roots((0, shards), mine) for mine in self.runs]
        """What each worker sends, in the order of the shards."""
        self.lanes = max(len(roots) for roots in self.roots)
        """As many flat buffers does a worker need; its last root is always in the last one."""

    def lane(self, rank: int, number: int) -> int:
        """The buffer that root `number` of worker `rank` is in."""
        return self.lanes - len(self.roots[rank]) + number

    @property
    def contributions(self) -> list[tuple[int, int]]:
        """Worker and lane of everything that is sent, in the order of the shards."""
        return [(rank, self.lane(rank, n)) for rank, roots in enumerate(self.roots) for n in range(len(roots))]

    @functools.cached_property
    def sums(self) -> Sums:
        """How the contributions are added."""
        return sums_of((0, self.shards), [root for roots in self.roots for root in roots])

    def are_halves(self, left: Node, right: Node) -> bool:
        """Whether these two nodes are what one node of the tree is the sum of."""
        return left[1] == right[0] and _has((0, self.shards), (left[0], right[1]), left[1])


def sums_of(node: Node, leaves: Sequence[Node]) -> Sums:
    """How `node` is added from `leaves`, nodes of the tree that it consists of."""
    numbers = {leaf: number for number, leaf in enumerate(leaves)}
    steps: list[tuple[int, int]] = []

    def number_of(each: Node) -> int:
        if each in numbers:
            return numbers[each]
        left, right = halves(each)
        steps.append((number_of(left), number_of(right)))
        return len(leaves) + len(steps) - 1

    number_of(node)
    return Sums(tuple(steps))


def run(shards: int, workers: int, rank: int) -> Node:
    """The shards of worker `rank`: runs differ by at most one shard, the longer ones come first."""
    least, more = divmod(shards, workers)
    begin = rank * least + min(rank, more)
    return begin, begin + least + (rank < more)


def halves(node: Node) -> tuple[Node, Node]:
    """What a node of two or more shards is the sum of."""
    begin, end = node
    middle = begin + (1 << ((end - begin - 1).bit_length() - 1))
    return (begin, middle), (middle, end)


def _roots(node: Node, mine: Node) -> list[Node]:
    """The largest nodes under `node` that lie within `mine`."""
    if node[1] <= mine[0] or mine[1] <= node[0]:
        return []
    if mine[0] <= node[0] and node[1] <= mine[1]:
        return [node]
    return [root for half in halves(node) for root in _roots(half, mine)]


def _has(node: Node, wanted: Node, middle: int) -> bool:
    """Whether `wanted` is a node at or under `node`, and falls into halves at `middle`."""
    if node == wanted:
        return halves(node)[0][1] == middle
    if node[1] - node[0] < 2:
        return False
    return any(half[0] <= wanted[0] and wanted[1] <= half[1] and _has(half, wanted, middle) for half in halves(node))


# --- Reductions along the tree ---


class Ordered(Protocol):
    """Adds along a tree. `lanes` is a matrix: one row per lane, all workers' alike."""

    tree: ShardTree

    def all_reduce(self, lanes: Tensor) -> Any:
        """Start setting the last lane of every worker to the sum; returns what to wait for."""

    def reduce_scatter(self, lanes: Tensor, cuts: Cuts, out: Tensor) -> Any:
        """Start setting `out` to the sum over this worker's part of `cuts`; returns what to wait for."""

    def release(self) -> None:
        """Let go of the group."""


def in_memory(tree: ShardTree, group: dist.ProcessGroup | None, device: torch.device) -> "InMemory | None":
    """What adds along `tree` where workers of `group` see one another's memory (see memory.py); else None."""
    if not isinstance(group, FlatGroup) or device.type != "cpu":
        return None
    add = group.adder(tree)
    return InMemory(tree, group, add) if add is not None else None


def even_cuts(numel: int, size: int, itemsize: int) -> Cuts:
    """Parts of about one length, on cache lines."""
    return [cut(numel, size, rank, itemsize) for rank in range(size)]


class InMemory:
    """Over shm, or hosts: the lanes of the workers of a host are in shared memory."""

    def __init__(self, tree: ShardTree, group: FlatGroup, add: AddAlong) -> None:
        self.tree, self._group, self._add = tree, group, add

    def all_reduce(self, lanes: Tensor) -> Any:
        """See Ordered."""
        return self._start(lanes, even_cuts(lanes.shape[1], self.tree.workers, lanes.itemsize), None)

    def reduce_scatter(self, lanes: Tensor, cuts: Cuts, out: Tensor) -> Any:
        """See Ordered."""
        return self._start(lanes, cuts, out)

    def _start(self, lanes: Tensor, cuts: Cuts, out: Tensor | None) -> Any:
        return self._group.submit("add_along", functools.partial(self._add, lanes, cuts, out), [lanes])

    def release(self) -> None:
        """Let go of the group."""
        del self._group, self._add


class ByMessages:
    """By sends and receives of a group that nothing else uses at the same time."""

    def __init__(self, tree: ShardTree, group: dist.ProcessGroup, device: torch.device) -> None:
        self.tree, self._group = tree, group
        self._rank = group.rank()
        self._carrier = carrier_of(device, "ordered")
        self._adds_once = tree.workers == 2 and tree.lanes == 1
        """Whether the whole sum is one addition of two numbers: it has the same bits whoever adds, in either order, so
        the backend's own all-reduce serves."""
        self.num_bytes_sent = 0

    def all_reduce(self, lanes: Tensor) -> Any:
        """See Ordered."""
        if self._adds_once:
            self.num_bytes_sent += lanes[-1].nbytes
            return self._carrier.carry_out(lambda: dist.all_reduce(lanes[-1], group=self._group))
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


# --- Operations of several messages ---


class ThreadCarrier:
    """Carries out operations in a thread of its own, which ends when this is closed or gone, or with the process."""

    def __init__(self, name: str) -> None:
        self._queue = Queue(f"lockstep-{name}", lambda error: error)
        weakref.finalize(self, self._queue.close).atexit = False

    def carry_out(self, operate: Callable[[], object]) -> Any:
        """Start an operation; returns what to wait for."""
        return self._queue.submit("a reduction", operate, [])

    def close(self) -> None:
        """Let the thread end: no more operations will come."""
        self._queue.close()


class StreamCarrier:
    """Carries out operations in a stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def carry_out(self, operate: Callable[[], object]) -> torch.cuda.Event:
        """Queue an operation behind what the current stream has; returns what a stream is to wait for."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            operate()
            event: torch.cuda.Event = self._stream.record_event()
            return event

    def close(self) -> None:
        """Nothing to do: a stream ends by itself."""


def carrier_of(device: torch.device, name: str) -> ThreadCarrier | StreamCarrier:
    """What carries out operations on tensors of `device`."""
    return StreamCarrier(device) if device.type == "cuda" else ThreadCarrier(name)
