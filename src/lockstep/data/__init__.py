"""From a user's DataLoader to this worker's part of every global batch.

In the order a batch passes through:

    order       the global batches, the same on every worker, and which part of each is this worker's
    source      fetch and collate that part, in the loader processes
    batch       what can be done to a batch without knowing what it is: cut, move
    tree        the containers that batches are made of
    loader      the loop that ties them
"""

from lockstep.data.loader import ShardedLoader, shard

__all__ = ["ShardedLoader", "shard"]
