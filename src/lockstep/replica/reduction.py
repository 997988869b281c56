"""How the buckets of all workers are added. Chosen once, when a model is wrapped.

    Fast      whatever the backend does best
    Tree      along the tree over the shards: the same bits on any number of workers
    Coded     encoded by a wire while they travel: in coded.py

A placement says what becomes of the sums.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from lockstep.comm.backend import all_reduce, moves_parts, reduce_scatter
from lockstep.comm.ordered import Ordered
from lockstep.replica.bucket import Bucket, Factor
from lockstep.replica.layout import BucketPlan
from lockstep.replica.split import Span, are_equal, equal_spans, unit_spans


class BucketReduction(Protocol):
    """Adds buckets."""

    num_lanes: int
    """As many sums does a worker send of each bucket."""
    num_parts: int
    """Into how many equal parts a bucket must fall."""
    sends_tail_apart: bool
    """Whether the notes must be in a bucket of their own."""

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """These are the buckets from now on."""

    def begin(self) -> None:
        """A synchronised backward pass begins."""

    def end(self) -> None:
        """Its gradients are all in place, on every worker."""

    def cut(self, plan: BucketPlan, size: int) -> list[Span]:
        """Which span of a bucket each worker owns, where an optimizer may have any."""

    def scatters(self, spans: Sequence[Span]) -> bool:
        """Whether `reduce_scatter` can be had for such spans."""

    def all_reduce(self, bucket: Bucket) -> Any:
        """Start adding; everybody gets the whole sum in the bucket. Returns what to wait for."""

    def reduce_scatter(self, bucket: Bucket, spans: Sequence[Span], out: Tensor) -> Any:
        """Start adding; everybody gets the sum of its span in `out`. Returns what to wait for."""

    def rescale(self, divisor: Factor) -> None:
        """Gradients will come divided by `divisor` from now on, as against before: see weighing.py."""

    def release(self) -> None:
        """Let go of the group."""


class Fast:
    """The backend's own reductions."""

    num_lanes = 1
    sends_tail_apart = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._moves_parts = moves_parts(group)
        self.num_parts = group.size()

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Nothing: all are alike."""

    def begin(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def cut(self, plan: BucketPlan, size: int) -> list[Span]:
        """Equal ones."""
        return equal_spans(plan, size)

    def scatters(self, spans: Sequence[Span]) -> bool:
        """Where the backend can, and only equal ones."""
        return self._moves_parts and are_equal(spans)

    def all_reduce(self, bucket: Bucket) -> Any:
        """See BucketReduction."""
        return all_reduce(bucket.flat, self._group)

    def reduce_scatter(self, bucket: Bucket, spans: Sequence[Span], out: Tensor) -> Any:
        """See BucketReduction."""
        return reduce_scatter(out, bucket.flat, self._group)

    def rescale(self, divisor: Factor) -> None:
        """Nothing: nothing is remembered."""

    def release(self) -> None:
        """Let go of the group."""
        del self._group


class Tree:
    """Along the tree over the shards."""

    num_parts = 1
    sends_tail_apart = False

    def __init__(self, ordered: Ordered) -> None:
        self._ordered = ordered
        self.num_lanes = ordered.tree.lanes

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Nothing: all are alike."""

    def begin(self) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def cut(self, plan: BucketPlan, size: int) -> list[Span]:
        """Of whole units, so that norms do not depend on the cut."""
        return unit_spans(plan, size)

    def scatters(self, spans: Sequence[Span]) -> bool:
        """Always."""
        return True

    def all_reduce(self, bucket: Bucket) -> Any:
        """See BucketReduction."""
        return self._ordered.all_reduce(bucket.lanes)

    def reduce_scatter(self, bucket: Bucket, spans: Sequence[Span], out: Tensor) -> Any:
        """See BucketReduction."""
        return self._ordered.reduce_scatter(bucket.lanes, [(span.begin, span.end) for span in spans], out)

    def rescale(self, divisor: Factor) -> None:
        """Nothing: nothing is remembered."""

    def release(self) -> None:
        """Let go of the group."""
        self._ordered.release()
