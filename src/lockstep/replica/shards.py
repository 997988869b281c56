"""The side of a replica that runs several shards a step, and adds everything along one tree.

`Trainer` makes it and drives it; `DataParallel` is given it and lets its reducer use it:

    begin      before each shard's forward pass
    end        after the forward pass of each
    put_away   after the backward pass of each but the last, which sends
    skip       instead of all three, where a shard has no samples
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.ordered import ByMessages, InMemory, Ordered
from lockstep.comm.shard_tree import ShardTree
from lockstep.comm.shm.group import ShmGroup
from lockstep.replica.partials import Partials
from lockstep.replica.reduction import Tree
from lockstep.replica.shard_buffers import ShardBuffers
from lockstep.world import World


class Shards:
    """What this worker has of the step in flight."""

    scale = 1.0
    """What losses are multiplied by, besides their share of the batch."""

    def __init__(self, tree: ShardTree, rank: int) -> None:
        self.tree = tree
        self.partials = Partials(tree, rank)
        self.buffers: ShardBuffers
        self._params: Sequence[Tensor] = ()

    def open(
        self,
        world: World,
        group: dist.ProcessGroup | None,
        device: torch.device,
        params: Sequence[Tensor],
        owners: Sequence[tuple[nn.Module, str]],
    ) -> Tree | None:
        """Get to know the model; returns how its buckets are added, if there are others to add with."""
        self._params = params
        by_messages = ByMessages(self.tree, group, device) if group is not None else None
        self.buffers = ShardBuffers(world, owners, self.tree, by_messages)
        if by_messages is None:
            return None
        ordered: Ordered = by_messages
        if isinstance(group, ShmGroup) and device.type == "cpu":
            ordered = InMemory(self.tree, group)
        return Tree(ordered)

    def begin(self) -> None:
        """A shard is about to run."""
        self.buffers.begin_shard()

    def undo(self) -> None:
        """A pass has run that counts for nothing."""
        self.buffers.put_back()

    def end(self, shard: int, share: float) -> None:
        """The forward pass of `shard`, which has this `share` of the samples, is over."""
        self.buffers.end_shard(shard, share)

    def put_away(self, shard: int) -> None:
        """The backward pass of `shard` is over, and others follow here."""
        self.partials.take(shard, self._params)

    def skip(self, shard: int, *, is_last: bool) -> None:
        """`shard` has no samples."""
        self.buffers.skip(shard)
        if not is_last:
            self.partials.add(shard, {})

    def finish_alone(self, last: int, *, is_empty: bool) -> None:
        """All shards have run, on a lone worker: let parameters and buffers have the result."""
        if is_empty:
            self.partials.add(last, {})
        else:
            self.put_away(last)
        self.partials.total(self._params)
        self.buffers.sync_alone()

    def reset(self) -> None:
        """The step is over, or void."""
        self.partials.clear()
        self.buffers.reset()

    def see_buffers(self) -> None:
        """Buffers have been set to something else."""
        self.buffers.see()
