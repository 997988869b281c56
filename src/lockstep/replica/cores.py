"""Is there a core left over to reduce gradients on while the backward pass goes on?"""

import os
from dataclasses import dataclass

import torch

from lockstep.world import World


@dataclass(frozen=True, slots=True)
class Cores:
    """What one worker computes on."""

    usable: frozenset[int]
    """Numbers of the cores that it may use."""
    num_threads: int
    """With how many threads it computes."""

    @classmethod
    def mine(cls) -> "Cores":
        """This worker's."""
        if hasattr(os, "sched_getaffinity"):
            return cls(frozenset(os.sched_getaffinity(0)), torch.get_num_threads())
        return cls(frozenset(range(os.cpu_count() or 1)), torch.get_num_threads())


def are_all_computing(world: World) -> bool:
    """Whether the backward passes of a host's workers, one thread each, take all cores that they may use.

    Then what runs beside them only takes turns with them, and leaves their caches cold. Workers of several threads
    leave cores idle between two products. Every worker of one host calls this.
    """
    workers = world.gather(Cores.mine())
    usable = frozenset[int]().union(*(each.usable for each in workers))
    return all(each.num_threads == 1 for each in workers) and len(usable) <= len(workers)
