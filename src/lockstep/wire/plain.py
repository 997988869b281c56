"""Gradients as they are, in 16 bits, or as they are at first and by another wire later."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.wire.exchange import SumPassage, SumWire
from lockstep.wire.protocol import BucketShape, Parcel, Passage, Wire, require

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Full(SumWire):
    """Gradients travel as they are, in one all-reduce of the bucket in place.

    Volume: 2(N-1)/N times the bucket, 4 bytes a value in fp32. Memory: none.
    Exactness: exact but for the order of addition, which is the backend's.
    """

    bucket_mb = 25

    def encoded_bytes(self, bucket: BucketShape) -> int:
        """The bucket's."""
        return bucket.num_bytes

    def encode(self, values: Tensor) -> Tensor:
        """The values themselves."""
        return values


@dataclass(frozen=True, slots=True)
class Half(SumWire):
    """Gradients travel rounded to 16 bits, in one all-reduce that adds in that precision.

    Volume: 2(N-1)/N times 2 bytes a value. Memory: a copy of the bucket in 16 bits while it travels.
    Exactness: each value is rounded once by its worker and again at each addition, by at most 2**-8 ("bf16") or
    2**-11 ("fp16") of itself; a sum over N workers is off by at most about N times that share of the sum of absolute
    values. "fp16" overflows to infinity beyond 65504, and to zero below 3e-8: use it with loss scaling.
    There is no error feedback: the error is small, has no bias, and arises in additions that no worker sees.
    """

    dtype: Literal["bf16", "fp16"] = "bf16"

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "Half", f"dtype={self.dtype!r}", 'Use Half("bf16") or Half("fp16").')

    def encoded_bytes(self, bucket: BucketShape) -> int:
        """2 a value."""
        return 2 * bucket.numel

    def encode(self, values: Tensor) -> Tensor:
        """Round to nearest; the values themselves where they are in that precision already."""
        return values.to(DTYPES[self.dtype])


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
        return AfterPassage(self.steps, bucket, SumPassage(Full(), bucket), self.wire.open(bucket, rank, size))


class AfterPassage(Passage):
    """One bucket, of which exchanges are counted."""

    def __init__(self, steps: int, bucket: BucketShape, first: Passage, later: Passage) -> None:
        self._steps, self._bucket = steps, bucket
        self._first, self._later = first, later
        self._count = 0

    @property
    def _now(self) -> Passage:
        return self._first if self._count < self._steps else self._later

    def encode(self, flat: Tensor) -> Parcel:
        """The bucket itself, or what the wire makes of it."""
        return self._now.encode(flat)

    def combine(self, arrived: Tensor) -> Parcel | None:
        """What the wire sends back, once it has begun."""
        return self._now.combine(arrived)

    def own_sum(self, arrived: Tensor) -> Tensor | None:
        """As the present wire has it; it counts, where there is one."""
        own = self._now.own_sum(arrived)
        self._count += own is not None
        return own

    def decode(self, arrived: Tensor, flat: Tensor) -> None:
        """Decode, and count."""
        self._now.decode(arrived, flat)
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
