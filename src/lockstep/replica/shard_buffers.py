"""Buffers (running statistics and the like) when a worker runs several shards of one step.

Every shard sees the buffers as they were when the step began. What it made of them counts by its share of the samples:

    after the step = before it + sum over the shards of share * (after the shard - before the step)

added along the tree over the shards, so with the same bits on any number of workers. That is the mean where every shard
has as many samples. Buffers that are not floating-point get what the first shard made of them.

torch's version counters cannot tell what changed: batch norm updates its statistics without counting. So in host memory
each buffer is compared with a copy of what it was, which costs their size once more. On a GPU reading a comparison
would make the host wait: there all floating-point buffers of modules in training count as changed.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.ordered import Ordered
from lockstep.comm.shard_tree import ShardTree
from lockstep.replica.agreement import broadcast
from lockstep.replica.partials import Grads, Partials
from lockstep.world import World


class ShardBuffers:
    """The buffers of one replica. Takes the place of `Buffers` where a tree adds."""

    def __init__(
        self, world: World, owners: Sequence[tuple[nn.Module, str]], tree: ShardTree, ordered: Ordered | None
    ) -> None:
        self._world, self._owners, self._tree = world, owners, tree
        self._ordered = ordered
        self._deltas = Partials(tree, world.rank)
        self._first: dict[int, Tensor] = {}
        """What the first shard that this worker ran made of the buffers that are not floating-point."""
        self._changed: set[int] = set()
        self._before: list[Tensor] = []
        self.see()

    def see(self) -> None:
        """Take the buffers as they are now for equal on all workers."""
        self._before = [self._buffer(number).detach().clone() for number in range(len(self._owners))]

    def __len__(self) -> int:
        return len(self._owners)

    @torch.no_grad()
    def begin_shard(self) -> None:
        """Put the buffers back to what they were when the step began."""
        for number in self._changed:
            self._buffer(number).copy_(self._before[number])

    @torch.no_grad()
    def put_back(self) -> None:
        """The same for whatever a pass that does not count may have changed."""
        for number, before in enumerate(self._before):
            self._buffer(number).copy_(before)

    def end_shard(self, shard: int, share: float) -> None:
        """The forward pass of `shard`, which has this `share` of the samples, has changed the buffers."""
        deltas: Grads = {}
        for number, before in enumerate(self._before):
            buffer = self._buffer(number)
            if not self._differs(number, buffer, before):
                continue
            self._changed.add(number)
            if buffer.is_floating_point():
                deltas[number] = (buffer - before).mul_(share)
            else:
                self._first.setdefault(number, buffer.clone())
        self._deltas.add(shard, deltas)

    def skip(self, shard: int) -> None:
        """`shard` has no samples."""
        self._deltas.add(shard, {})

    def changed(self) -> list[int]:
        """Numbers of the buffers that this worker's shards have changed."""
        return sorted(self._changed)

    def sync(self, numbers: Sequence[int], source: int, group: dist.ProcessGroup) -> None:
        """Give the buffers `numbers`, which some worker has changed, their values after the step."""
        floating = [number for number in numbers if self._before[number].is_floating_point()]
        with torch.no_grad():
            if floating:
                self._add_up(floating)
            rest = [number for number in numbers if number not in floating]
            for number in rest:
                self._buffer(number).copy_(self._first.get(number, self._before[number]))
            if rest:
                broadcast([self._buffer(number) for number in rest], self._world, source, group)
            for number in numbers:
                self._before[number].copy_(self._buffer(number))

    def sync_alone(self) -> None:
        """The same on a lone worker."""
        with torch.no_grad():
            (deltas,) = self._deltas.roots
            for number in self._changed:
                if number in deltas:
                    self._buffer(number).copy_(self._before[number].add_(deltas[number]))
                else:
                    self._buffer(number).copy_(self._before[number].copy_(self._first[number]))

    def reset(self) -> None:
        """The step is over, or void: then the buffers are put back."""
        self.begin_shard()
        self._deltas.clear()
        self._first.clear()
        self._changed.clear()

    def _add_up(self, numbers: Sequence[int]) -> None:
        """Along the tree, over all workers; one message for all of them."""
        assert self._ordered is not None
        like = [self._before[number] for number in numbers]
        dtype = torch.float64 if any(each.dtype == torch.float64 for each in like) else torch.float32
        lanes = torch.zeros(self._tree.lanes, sum(each.numel() for each in like), dtype=dtype, device=like[0].device)
        for root, deltas in enumerate(self._deltas.roots):
            parts = lanes[self._tree.lane(self._world.rank, root)].split([each.numel() for each in like])
            for number, part in zip(numbers, parts, strict=True):
                if number in deltas:
                    part.copy_(deltas[number].flatten())
        work = self._ordered.all_reduce(lanes)
        self._world.await_on_device(work, "adding up buffers")
        sums = lanes[-1].split([each.numel() for each in like])
        for number, before, total in zip(numbers, like, sums, strict=True):
            self._buffer(number).copy_(before + total.view(before.shape).to(before.dtype))

    def _differs(self, number: int, buffer: Tensor, before: Tensor) -> bool:
        if buffer.device.type == "cpu":
            return not torch.equal(buffer, before)
        return self._owners[number][0].training

    def _buffer(self, number: int) -> Tensor:
        owner, name = self._owners[number]
        buffer = owner._buffers[name]
        assert buffer is not None
        return buffer
