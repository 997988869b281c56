"""Parameters side by side in flat memory, in the order in which their gradients lie side by side in theirs."""

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.replica.bucket import Bucket, view_like
from lockstep.replica.part import Part


class Stretch:
    """What an optimizer updates of one bucket: whole parameters, or the fragments of a part."""

    def __init__(
        self,
        members: Sequence[Tensor],
        offsets: Sequence[int],
        grads: Sequence[Tensor],
        flat_grads: Tensor,
        flat_params: Tensor | None = None,
    ) -> None:
        self.members = members
        self.offsets = offsets
        self.grads = grads
        """What `grad` of each member is after a pass: the very tensor."""
        self.flat_grads = flat_grads
        self._flat_params = flat_params
        """None where the parameters are still where their owner has put them."""

    def flat_params(self, begin: int, end: int) -> Tensor:
        """Memory of the members from `begin` to `end`, of which they are views: they are moved there if need be."""
        start, stop = self.offsets[begin], self.offsets[end - 1] + self.members[end - 1].numel()
        if self._flat_params is not None:
            return self._flat_params[start:stop]
        flat = torch.empty_like(self.flat_grads[start:stop])
        for member, offset in zip(self.members[begin:end], self.offsets[begin:end], strict=True):
            view = view_like(flat, offset - start, member)
            view.copy_(member.detach())
            member.data = view
        return flat


class Stretches:
    """Those of all buckets; made anew when these are."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = buckets
        self._closing: Bucket | None = None
        self._made: list[Stretch] = []

    def __call__(self) -> Sequence[Stretch]:
        """The same objects as last time, unless buckets are others."""
        if self._buckets[-1] is not self._closing:
            self._closing = self._buckets[-1]
            self._made = [of_bucket(bucket) for bucket in self._buckets if bucket.plan.slots]
        return self._made


def of_bucket(bucket: Bucket) -> Stretch:
    """Whole parameters."""
    offsets = [slot.offset for slot in bucket.plan.slots]
    return Stretch(bucket.params, offsets, bucket.views, bucket.flat_grads)


def of_part(part: Part) -> Stretch:
    """Fragments, which lie side by side anyway."""
    offsets = [fragment.span.begin - part.span.begin for fragment in part.fragments]
    assert part.own_grads is not None
    return Stretch(part.params, offsets, part.grads, part.own_grads, part.own_params)
