"""Wires whose encoded form cannot be added: chunks go to their owners, who decode, add and encode once more.

With N workers, the bucket is cut into N equal chunks, the last padded with zeros; worker r owns chunk r.

    encode    each worker encodes its N chunks and sends chunk r to worker r (all-to-all)
    combine   each owner decodes the N that arrived, adds them in fp32 in the order of the ranks, encodes the sum
    decode    every worker decodes the N encoded sums (all-gather): from the same bytes, so to the same bits

Every value is encoded twice on its way. Both times the loss is kept as error: by the worker that encoded its gradient,
and by the owner that encoded the sum.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.wire.error_feedback import ErrorFeedback, clear, load_errors, padding_of, save_errors
from lockstep.wire.protocol import BucketShape, Parcel, Route, as_bucket


class ChunkWire(ABC):
    """Base of wires that exchange encoded chunks; `encode` and `decode` must depend on their arguments alone."""

    __slots__ = ()
    is_lossy: bool = True
    bucket_mb: float = 25

    @property
    def grain(self) -> int:
        """A chunk is a multiple of so many values."""
        return 8

    @property
    def feedback(self) -> float:
        """How much of the error is added to the next gradient."""
        return 1.0

    @abstractmethod
    def chunk_bytes(self, numel: int) -> int:
        """Bytes of an encoded chunk of `numel` values."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encode fp32 chunks (the rows) to rows of bytes."""

    @abstractmethod
    def decode(self, encoded: Tensor, numel: int) -> Tensor:
        """Decode rows of bytes to fp32 chunks of `numel` values."""

    def take(self, values: Tensor) -> Tensor:
        """Encode `values` and leave in them what was lost, or zero where that is not finite."""
        encoded = self.encode(values)
        values.sub_(self.decode(encoded, values.shape[1])).nan_to_num_(0.0, 0.0, 0.0)
        return encoded

    def put(self, encoded: Tensor, out: Tensor, *, adds: bool) -> None:
        """Decode to `out`, or on top of what it holds."""
        decoded = self.decode(encoded, out.shape[1])
        if adds:
            out.add_(decoded)
        else:
            out.copy_(decoded)

    def chunk_numel(self, numel: int, size: int) -> int:
        """Values of one of `size` chunks of a bucket of `numel`."""
        return -(-numel // (size * self.grain)) * self.grain

    def bytes_promised(self, bucket: BucketShape | int, size: int) -> int:
        """N-1 encoded chunks out and N-1 back."""
        chunk = self.chunk_numel(as_bucket(bucket).numel, size)
        return 2 * (size - 1) * self.chunk_bytes(chunk) if chunk else 0

    def open(self, bucket: BucketShape, rank: int, size: int) -> "ChunkPassage":
        """The state of one bucket on worker `rank` of `size`. Takes 1 + 1/N times the bucket in fp32 as memory."""
        return ChunkPassage(self, bucket, rank, size)


class ChunkPassage:
    """One bucket in chunks, with the error of this worker's gradients and of the sums that it owns."""

    def __init__(self, wire: ChunkWire, bucket: BucketShape, rank: int, size: int) -> None:
        self._wire = wire
        self._bucket = bucket
        self._rank, self._size = rank, size
        self._chunk = chunk = wire.chunk_numel(bucket.numel, size)
        self._error = ErrorFeedback(bucket, 0, size * chunk, wire.feedback)
        self._owner_error = ErrorFeedback(bucket, rank * chunk, chunk, wire.feedback)
        self._padding = padding_of(bucket)

    def encode(self, flat: Tensor) -> Parcel:
        """Encode this worker's chunks."""
        values = self._error.add(flat)
        encoded = self._take(values.view(self._size, self._chunk), 0)
        self._error.settle()
        return Parcel(encoded, Route.SWAP)

    def _take(self, values: Tensor, first: int) -> Tensor:
        """Encode chunks, counted from `first`, and leave what was lost."""
        return self.take(values, first) if self._chunk else values.view(torch.uint8)

    def take(self, values: Tensor, first: int) -> Tensor:
        """The same for chunks that are not empty; for wires that need to know which chunks these are."""
        return self._wire.take(values)

    def combine(self, arrived: Tensor) -> Parcel:
        """Add everybody's version of the owned chunk, and encode the sum."""
        self._owner_error.fade()
        total = self._owner_error.values.view(1, self._chunk)
        for row in arrived.split(1) if self._chunk else ():
            self._wire.put(row, total, adds=True)
        self._owner_error.settle()  # Others may have decoded something to the padding.
        encoded = self._take(total, self._rank)
        self._owner_error.settle()
        return Parcel(encoded, Route.GATHER)

    def decode(self, arrived: Tensor, flat: Tensor) -> None:
        """Decode all sums: whole chunks in place, the last by way of a copy where it reaches beyond the bucket."""
        numel, chunk = self._bucket.numel, self._chunk
        in_place = numel // chunk if chunk and flat.dtype == torch.float32 else 0
        if in_place:
            self._wire.put(arrived[:in_place], flat[: in_place * chunk].view(in_place, chunk), adds=False)
        used = -(-numel // chunk) if chunk else 0
        if used > in_place:
            rest = self._wire.decode(arrived[in_place:used], chunk)
            flat[in_place * chunk : numel].copy_(rest.view(-1)[: numel - in_place * chunk])
        clear(flat, self._padding)

    def state_dict(self) -> dict[str, Tensor]:
        """Both errors, by the names of pieces."""
        return save_errors(self._error, self._owner_error)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from saved errors."""
        load_errors(state, self._bucket, self._error, self._owner_error)

    def rescale(self, factor: float) -> None:
        """Multiply both errors."""
        self._error.rescale(factor)
        self._owner_error.rescale(factor)
