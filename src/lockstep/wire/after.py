"""Gradients as they are at first, and by another wire later."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.wire.protocol import BucketShape, Parcel, Passage, Route, Wire, require


@dataclass(frozen=True, slots=True)
class After:
    """For so many steps gradients travel as they are, as by `Full`; from then on by `wire`.

        DataParallel(net, wire=After(500, Sign()))

    Gradients change fast in the first steps of a training that begins from nothing, and what a lossy wire leaves for
    later comes too late then: a warm-up of a tenth to a third of the steps is usual (DeepSpeed's 1-bit Adam, torch's
    PowerSGD hook). How many steps have been made is saved in checkpoints.

    Volume, memory and exactness: those of `Full`, later those of `wire`.
    """

    steps: int
    wire: Wire

    is_lossy = True

    def __post_init__(self) -> None:
        fits = isinstance(self.steps, int) and self.steps >= 0
        require(fits, "After", f"steps={self.steps!r}", "It is a number of steps, as in After(500, Sign()).")
        require(hasattr(self.wire, "open"), "After", f"wire={self.wire!r}", "Give the wire that follows, as Sign().")

    @property
    def bucket_mb(self) -> float:
        """That of the wire."""
        return self.wire.bucket_mb

    def bytes_promised(self, bucket: BucketShape | int, size: int) -> int:
        """What the wire promises, for when it has begun."""
        return self.wire.bytes_promised(bucket, size)

    def open(self, bucket: BucketShape, rank: int, size: int) -> "AfterPassage":
        """The state of one bucket on worker `rank` of `size`."""
        return AfterPassage(self, bucket, self.wire.open(bucket, rank, size))


class AfterPassage:
    """One bucket, of which exchanges are counted."""

    def __init__(self, wire: After, bucket: BucketShape, later: Passage) -> None:
        self._steps, self._bucket, self._later = wire.steps, bucket, later
        self._count = 0

    @property
    def _is_plain(self) -> bool:
        return self._count < self._steps

    def encode(self, flat: Tensor) -> Parcel:
        """The bucket itself, or what the wire makes of it."""
        return Parcel(flat[: self._bucket.numel], Route.SUM) if self._is_plain else self._later.encode(flat)

    def combine(self, arrived: Tensor) -> Parcel | None:
        """Nothing, or what the wire sends back."""
        return None if self._is_plain else self._later.combine(arrived)

    def decode(self, arrived: Tensor, flat: Tensor) -> None:
        """Nothing where the sum is in place; else as the wire does."""
        if not self._is_plain:
            self._later.decode(arrived, flat)
        elif arrived.data_ptr() != flat.data_ptr():
            flat[: self._bucket.numel].copy_(arrived)
        self._count += 1

    def state_dict(self) -> dict[str, Tensor]:
        """What the wire keeps, and the count, by the names of pieces."""
        counts = {f"after.{piece.name}": torch.tensor(self._count) for piece in self._bucket.pieces}
        return self._later.state_dict() | counts

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from there; where pieces come from different buckets, from the one that has come furthest."""
        found = [int(state[name]) for piece in self._bucket.pieces if (name := f"after.{piece.name}") in state]
        self._count = max(found, default=self._count)
        self._later.load_state_dict(state)

    def rescale(self, factor: float) -> None:
        """Multiply what the wire remembers."""
        self._later.rescale(factor)
