"""Who may look at gradients on their way: see watching/noise.py."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from lockstep.replica.bucket import Bucket


class Gauge(Protocol):
    """Measures gradients, in the thread of the backward pass; must neither change them nor keep them."""

    def see_own(self, step: int, bucket: Bucket) -> None:
        """`bucket` has all that this worker adds, and is about to be sent."""

    def is_due(self, step: int) -> bool:
        """Whether the gradients of this step are measured."""

    def see_rows(self, own: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Gradients that travelled apart from buckets: what this worker added, and what they will be."""

    def see_sums(self, step: int, buckets: Sequence[Bucket]) -> None:
        """All buckets of the pass have arrived, and hold what the gradients will be."""
