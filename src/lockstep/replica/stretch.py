"""Parameters side by side in flat memory, in the order in which their gradients lie side by side in theirs."""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.replica.bucket import Bucket, is_dense, view_like
from lockstep.replica.part import Part

_num_uses: Any = getattr(torch._C, "_storage_Use_Count", None)


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

    def movable(self) -> frozenset[Tensor]:
        """Members that lie in flat memory, or can be moved there without anybody noticing who knows the old one."""
        return frozenset(self.members) if self._flat_params is not None else _unseen(self.members)

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
        self._closing: weakref.ref[Bucket] | None = None
        self._made: list[Stretch] = []

    def forget(self) -> None:
        """Let go of the memory of the buckets."""
        self._made = []
        self._closing = None

    def __call__(self) -> Sequence[Stretch]:
        """The same objects as last time, unless buckets are others."""
        if self._closing is None or self._closing() is not self._buckets[-1]:
            self._closing = weakref.ref(self._buckets[-1])
            self._made = [of_bucket(bucket) for bucket in self._buckets if bucket.plan.slots]
        return self._made


def _unseen(members: Sequence[Tensor]) -> frozenset[Tensor]:
    """Those whose memory nobody else uses: no other tensor, and no other process."""
    by_storage: dict[int, list[Tensor]] = {}
    for member in members:
        by_storage.setdefault(member.untyped_storage()._cdata, []).append(member)
    found = (own for storage, own in by_storage.items() if _is_only_of(storage, own))
    return frozenset(member for own in found for member in own)


def _is_only_of(storage: int, members: Sequence[Tensor]) -> bool:
    if _num_uses is None or members[0].is_shared() or not all(map(is_dense, members)):
        return False
    alone = torch.empty(1)  # Python's own object of a memory may count as well.
    uses = _num_uses(storage) - _num_uses(alone.untyped_storage()._cdata) + 1
    spans = sorted((member.data_ptr(), member.nbytes) for member in members)
    is_apart = all(begin + length <= after for (begin, length), (after, _) in itertools.pairwise(spans))
    return bool(uses == len(members)) and is_apart


def of_bucket(bucket: Bucket) -> Stretch:
    """Whole parameters."""
    offsets = [slot.offset for slot in bucket.plan.slots]
    return Stretch(bucket.params, offsets, bucket.views, bucket.flat_grads)


def of_part(part: Part) -> Stretch:
    """Fragments, which lie side by side anyway."""
    offsets = [fragment.span.begin - part.span.begin for fragment in part.fragments]
    assert part.own_grads is not None
    return Stretch(part.params, offsets, part.grads, part.own_grads, part.own_params)
