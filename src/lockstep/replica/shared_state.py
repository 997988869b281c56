"""What of a model all workers share: found once, when it is wrapped."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.replica.buffers import Buffers
from lockstep.replica.rows import Rows
from lockstep.replica.shard_buffers import ShardBuffers


@dataclass(frozen=True, slots=True)
class SharedState:
    """What is reduced or kept equal after every step; the same on all workers."""

    names: Sequence[str]
    """Of the parameters, by number."""
    params: Sequence[Tensor]
    """The parameters themselves."""
    trained: Sequence[int]
    """Numbers of the parameters that need a gradient on some worker."""
    sparse_params: frozenset[int]
    """Numbers of those whose gradients will be sparse."""
    rows: Rows | None
    """Embeddings of which only the rows that were touched may travel; None if all gradients go into buckets."""
    buffers: Buffers | ShardBuffers
    """What is kept equal besides."""
