"""Wires whose encoded form can be added: one all-reduce of it, and nothing is kept from step to step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from lockstep.wire.protocol import BucketShape, Parcel, Route, as_bucket


class SumWire(ABC):
    """Base of wires whose encoded buckets are all-reduced."""

    __slots__ = ()
    is_lossy: bool = True
    bucket_mb: float = 100

    @abstractmethod
    def encoded_bytes(self, bucket: BucketShape) -> int:
        """Bytes of an encoded bucket."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """A contiguous tensor whose sum over the workers can be decoded; `values` itself will do."""

    @abstractmethod
    def decode(self, summed: Tensor, out: Tensor) -> None:
        """Write the sum to `out`, which has the memory that was encoded."""

    def bytes_promised(self, bucket: BucketShape | int, size: int) -> int:
        """2(N-1)/N of the encoded bucket, as a ring sends."""
        return Route.SUM.num_bytes(self.encoded_bytes(as_bucket(bucket)), size)

    def open(self, bucket: BucketShape, rank: int, size: int) -> "SumPassage":
        """The state of one bucket: none."""
        return SumPassage(self, bucket)


class SumPassage:
    """One bucket in one all-reduce."""

    def __init__(self, wire: SumWire, bucket: BucketShape) -> None:
        self._wire = wire
        self._numel = bucket.numel

    def encode(self, flat: Tensor) -> Parcel:
        """Encode this worker's bucket."""
        return Parcel(self._wire.encode(flat[: self._numel]), Route.SUM)

    def combine(self, arrived: Tensor) -> None:
        """Nothing: what arrived is the sum."""

    def decode(self, arrived: Tensor, flat: Tensor) -> None:
        """Decode the sum."""
        self._wire.decode(arrived, flat[: self._numel])

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing is kept."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Nothing was kept."""

    def rescale(self, factor: float) -> None:
        """Nothing is remembered."""
