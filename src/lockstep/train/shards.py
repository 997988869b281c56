"""The shards of a step that one worker runs, everything of which is added along one tree over all shards.

`Synchronous` makes it and drives it; `DataParallel` is given it and lets its reducer use it:

    begin          before each shard: buffers as they were when the step began
    end_forward    the forward pass of a shard is over: what it made of the buffers is kept
    end_backward   the shard is done: its gradients are kept, unless it is the worker's last, whose pass sends
    commit         the step takes effect: the buffers have what all shards made of them
    reset          the step is over, or void

Every shard sees the buffers (running statistics and the like) as they were when the step began. What it made of them
counts by its share of the samples:

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

from lockstep.comm.tree import ByMessages, Ordered, ShardTree, in_memory
from lockstep.replica import modules
from lockstep.replica.agreement import broadcast
from lockstep.replica.buffers import Buffers
from lockstep.replica.reduction import Grads, Partials, TreeReduction
from lockstep.world import World


class Shards:
    """What this worker has of the step in flight; every worker makes one, before the model is wrapped with it."""

    def __init__(self, tree: ShardTree, world: World, module: nn.Module, dtype: torch.dtype | None = None) -> None:
        """`dtype`: see Partials."""
        self.dtype = dtype
        _, self._params, owners = modules.contents(module)
        self._tree = tree
        self._last = tree.runs[world.rank][1] - 1
        self.partials = Partials(tree, world.rank, dtype)
        """Sums of the gradients of the shards that are done."""
        self.group: dist.ProcessGroup | None = None
        """Of this replica alone; None on a lone worker, like `reduction`."""
        self.reduction: TreeReduction | None = None
        """How buckets are added."""
        by_messages: ByMessages | None = None
        if world.group is not None and world.size > 1:
            device = next((param.device for param in self._params if not param.is_meta), world.device)
            self.group = world.own_groups.take(world.group, device, world.timeout, world.gather_json)
            by_messages = ByMessages(tree, self.group, device)
            self.reduction = TreeReduction(in_memory(tree, self.group, device) or by_messages)
        self.buffers = ShardBuffers(world, owners, tree, by_messages)
        """What the shards make of the buffers."""

    def begin(self) -> None:
        """A shard is about to run."""
        self.buffers.put_back_changed()

    def end_forward(self, shard: int, share: float) -> None:
        """The forward pass of `shard`, which has this `share` of the samples, is over; 0 for a shard without any.

        Called before its backward pass, in which activation checkpointing would run the module once more.
        """
        self.buffers.add_changes(shard, share)

    def end_backward(self, shard: int) -> None:
        """`shard` is done here. On a lone worker the last one gives parameters and buffers the result."""
        is_last = shard == self._last
        if is_last and self._tree.workers > 1:
            return  # Its gradients are in the buckets.
        if is_last:
            self.partials.total(shard, self._params)
            self.buffers.sync_alone()
        else:
            self.partials.take(shard, self._params)

    def commit(self) -> None:
        """The step takes effect."""
        self.buffers.commit()

    def release(self) -> None:
        """The world is left, or another one: let go of the group."""
        self.group = self.reduction = None
        self.buffers.release()

    def reset(self) -> None:
        """The step is over, or void."""
        self.partials.clear()
        self.buffers.reset()


class ShardBuffers(Buffers):
    """The buffers of one replica, where a tree adds."""

    def __init__(
        self, world: World, owners: Sequence[tuple[nn.Module, str]], tree: ShardTree, ordered: Ordered | None
    ) -> None:
        self._tree, self._ordered = tree, ordered
        self._deltas = Partials(tree, world.rank)
        self._first: dict[int, Tensor] = {}
        """What the first shard that this worker ran made of the buffers that are not floating-point."""
        self._changed: set[int] = set()
        self._after: dict[int, Tensor] = {}
        """What buffers are to be once the step takes effect."""
        self._before: list[Tensor] = []
        super().__init__(world, owners)

    def see(self) -> None:
        """Take the buffers as they are now for equal on all workers."""
        self._before = [self._buffer(number).detach().clone() for number in range(len(self.owners))]

    @torch.no_grad()
    def put_back_changed(self) -> None:
        """Put back to what they were when the step began the buffers that a shard has changed."""
        for number in self._changed:
            self._buffer(number).copy_(self._before[number])

    @torch.no_grad()
    def put_back_all(self) -> None:
        """Put back all of them, after a pass that does not count."""
        for number, before in enumerate(self._before):
            self._buffer(number).copy_(before)

    def add_changes(self, shard: int, share: float) -> None:
        """Keep what the forward pass of `shard` has made of the buffers."""
        deltas: Grads = {}
        for number, before in enumerate(self._before if share else ()):
            buffer = self._buffer(number)
            if not self._differs(number, buffer, before):
                continue
            self._changed.add(number)
            if buffer.is_floating_point():
                deltas[number] = (buffer - before).mul_(share)
            else:
                self._first.setdefault(number, buffer.clone())
        self._deltas.add(shard, deltas)

    def changed(self) -> list[int]:
        """Numbers of the buffers that this worker's shards have changed."""
        return sorted(self._changed)

    def sync(self, numbers: Sequence[int], source: int, group: dist.ProcessGroup) -> None:
        """Find the values that the buffers `numbers`, which some worker has changed, are to have after the step."""
        floating = [number for number in numbers if self._before[number].is_floating_point()]
        with torch.no_grad():
            if floating:
                self._add_up(floating)
            rest = {n: self._first.get(n, self._before[n]).clone() for n in numbers if n not in floating}
            if rest:
                broadcast(list(rest.values()), self._world, source, group)
            self._after |= rest

    def sync_alone(self) -> None:
        """The same on a lone worker."""
        with torch.no_grad():
            (deltas,) = self._deltas.roots
            for number in self._changed:
                is_sum = number in deltas
                self._after[number] = self._before[number] + deltas[number] if is_sum else self._first[number]

    @torch.no_grad()
    def commit(self) -> None:
        """The step takes effect: not before, since a step that comes to nothing must leave no trace."""
        for number, value in self._after.items():
            self._before[number].copy_(value)
            self._buffer(number).copy_(value)
        self._after.clear()

    def release(self) -> None:
        """The world is left, or another one: let go of the group."""
        self._ordered = None

    def reset(self) -> None:
        """The step is over, or void: then the buffers are put back."""
        self.put_back_changed()
        self._deltas.clear()
        self._first.clear()
        self._changed.clear()
        self._after.clear()

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
            self._after[number] = before + total.view(before.shape).to(before.dtype)

    def _differs(self, number: int, buffer: Tensor, before: Tensor) -> bool:
        if buffer.device.type == "cpu":
            return not torch.equal(buffer, before)
        return self.owners[number][0].training
