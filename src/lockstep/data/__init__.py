"""From a user's DataLoader to this worker's part of every global batch.

In the order a batch passes through:

    order       the global batches, the same on every worker
    generators  random numbers that the workers draw in common
    cut         which part of a global batch is this worker's
    source      fetch and collate that part, in the loader processes
    batch       what can be done to a batch without knowing what it is: cut, empty, move
    tree        the containers that batches are made of
    claim       which batch is the current one, as `world.weight` tells it
    loader      the loop that ties them
"""

from lockstep.data.loader import ShardedLoader, shard

__all__ = ["ShardedLoader", "shard"]
