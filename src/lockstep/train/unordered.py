"""Shards whose gradients are added as they come, and not along a tree: where a wire encodes the sums.

It has the place of `replica.shards.Shards` in a step. Gradients of a worker's shards add up in `param.grad`, buffers
are those of the last shard that ran, and DataParallel keeps them equal.
"""

from lockstep.comm.shard_tree import ShardTree
from lockstep.world import World


class Unordered:
    """What this worker has of the step in flight: nothing but what is in the parameters."""

    def __init__(self, tree: ShardTree, world: World) -> None:
        self.tree = tree
        self.scale = float(world.size)
        """What losses are multiplied by: DataParallel takes the mean over the workers, and a sum is meant."""

    def begin(self) -> None:
        """Nothing."""

    def undo(self) -> None:
        """Nothing."""

    def end(self, shard: int, share: float) -> None:
        """Nothing."""

    def put_away(self, shard: int) -> None:
        """Nothing."""

    def skip(self, shard: int, *, is_last: bool) -> None:
        """Nothing."""

    def finish_alone(self, last: int, *, is_empty: bool) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing."""

    def see_buffers(self) -> None:
        """Nothing."""
