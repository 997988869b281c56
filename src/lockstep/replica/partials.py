"""Gradients of the shards that this worker has done already, added along the tree while the others are still to come.

A worker runs its shards in order, and only the last one's backward pass sends. The gradients of each of the others are
taken from the parameters when its pass has ended:

    take, add  a shard is done: its gradients, alone or added to those of the other half of its node
    complete   a bucket has the gradients of the last shard: add the rest of its node; other roots go into their lanes
    total      on a lone worker: everything, as gradients of the parameters

At any time there are at most log2(shards) + 1 sets of gradients. A parameter that a shard did not use counts as zero,
everywhere: adding nothing would keep the sign of a negative zero, and so another bit than adding zero.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.shard_tree import Node, ShardTree
from lockstep.replica.bucket import Bucket

Grads = dict[int, Tensor]
"""Of the parameters that have one, by number."""


class Partials:
    """What one worker has added up of the step in flight."""

    def __init__(self, tree: ShardTree, rank: int) -> None:
        self.tree = tree
        self._rank = rank
        self._stack: list[tuple[Node, Grads]] = []
        """Sums of nodes, in the order of the shards."""

    def take(self, shard: int, params: Sequence[Tensor]) -> None:
        """The backward pass of `shard` has ended: take the gradients off the parameters."""
        grads: Grads = {}
        for index, param in enumerate(params):
            if param.grad is not None:
                grad = param.grad.detach()
                grads[index] = grad.to_dense() if grad.layout is not torch.strided else grad
                param.grad = None
        self.add(shard, grads)

    def add(self, shard: int, grads: Grads) -> None:
        """`shard` is done, and these are its gradients, which may be changed from now on."""
        node = (shard, shard + 1)
        while self._stack and self.tree.are_halves(self._stack[-1][0], node):
            left, others = self._stack.pop()
            node, grads = (left[0], node[1]), _added(others, grads)
        self._stack.append((node, grads))

    def complete(self, bucket: Bucket) -> None:
        """`bucket` has the gradients of the last shard: let its lanes hold this worker's roots."""
        _, end = self.tree.runs[self._rank]
        node = (end - 1, end)
        rest = list(self._stack)
        while rest and self.tree.are_halves(rest[-1][0], node):
            left, grads = rest.pop()
            _add_to(bucket.views, bucket.indices, grads)
            node = (left[0], node[1])
        for number, (_, grads) in enumerate(rest):
            views = bucket.views_of_lane(self.tree.lane(self._rank, number))
            for index, view in zip(bucket.indices, views, strict=True):
                if index in grads:
                    view.copy_(grads[index])
                else:
                    view.zero_()

    @property
    def roots(self) -> list[Grads]:
        """What this worker has to send, once all its shards are done: by lane, from the first that it uses."""
        return [grads for _, grads in self._stack]

    def total(self, params: Sequence[Tensor]) -> None:
        """All shards are done, and here: give the parameters their gradients."""
        ((_, grads),) = self._stack
        for index, grad in grads.items():
            params[index].grad = grad
        self.clear()

    def clear(self) -> None:
        """The step is over."""
        self._stack.clear()


def _added(left: Grads, right: Grads) -> Grads:
    both = [index for index in left if index in right]
    if both:
        torch._foreach_add_([left[index] for index in both], [right[index] for index in both])
    alone = [grads[index] for grads, other in ((left, right), (right, left)) for index in grads if index not in other]
    if alone:
        torch._foreach_add_(alone, 0.0)
    return {**right, **left}


def _add_to(views: Sequence[Tensor], indices: Sequence[int], grads: Grads) -> None:
    present = [number for number, index in enumerate(indices) if index in grads]
    if present:
        torch._foreach_add_([views[number] for number in present], [grads[indices[number]] for number in present])
    absent = [view for view, index in zip(views, indices, strict=True) if index not in grads]
    if absent:
        torch._foreach_add_(absent, 0.0)
