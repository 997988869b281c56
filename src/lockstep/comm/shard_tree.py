"""One fixed binary tree over the shards of a global batch, along which everything is added. Pure; needs no process.

The tree belongs to the shards, not to the workers: whoever computes a shard, sums come about in the same order, and so
with the same bits. A node covers shards `begin` to `end`; its left half is the largest power of two that leaves
something for the right one:

    8 shards:  ((0 1)(2 3)) ((4 5)(6 7))        6 shards:  ((0 1)(2 3)) (4 5)        3:  (0 1) 2

A worker owns a run of shards. It adds within the largest nodes that lie in its run, its roots, and sends these:

    8 shards on 3 workers:  (0 1) 2 | 3 (4 5) | (6 7)
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def __init__(self, shards: int, workers: int) -> None:
        self.shards, self.workers = shards, workers
        self.runs = [run(shards, workers, rank) for rank in range(workers)]
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
        leaves = [root for roots in self.roots for root in roots]
        numbers = {root: number for number, root in enumerate(leaves)}
        steps: list[tuple[int, int]] = []

        def number_of(node: Node) -> int:
            if node in numbers:
                return numbers[node]
            left, right = halves(node)
            steps.append((number_of(left), number_of(right)))
            return len(leaves) + len(steps) - 1

        number_of((0, self.shards))
        return Sums(tuple(steps))

    def are_halves(self, left: Node, right: Node) -> bool:
        """Whether these two nodes are what one node of the tree is the sum of."""
        return left[1] == right[0] and _has((0, self.shards), (left[0], right[1]), left[1])


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
