"""What a wire is: how a bucket of gradients is encoded while it travels, and how the parts combine.

    Wire      a frozen description, chosen once: `Int8(block=256)`
    Passage   its state for one bucket on one worker (error, warm start), made by `wire.open(bucket, rank, size)`
    Parcel    a tensor on its way, and by which route it travels

A passage turns a bucket into parcels and parcels into a bucket. It never talks to other workers: `Exchange` carries
the parcels, so everything here can be tested without a process. One exchange is

    encode    bucket          -> the parcel out
    combine   what arrived    -> the parcel back, or None where what arrived is already the end
    decode    what arrived    -> bucket

**A wire of your own.** Derive from `ChunkWire` and say how many bytes a chunk takes, how it is encoded and decoded:

    @dataclass(frozen=True, slots=True)
    class Float8(ChunkWire):
        def chunk_bytes(self, numel):          # of the encoded form of `numel` values
            return numel
        def encode(self, values):              # fp32 (chunks, numel) -> bytes (chunks, chunk_bytes(numel))
            return values.to(torch.float8_e5m2).view(torch.uint8)
        def decode(self, encoded, numel):      # and back
            return encoded.view(torch.float8_e5m2).float()

The exchange of chunks, error feedback in both directions, saving and the count of bytes come with it. Where the
encoded form can itself be added up by an all-reduce, derive from `SumWire`. For anything else write `open` and a
passage of your own, as `LowRank` does. Whatever you write must give a non-finite output for a non-finite input, so
that an overflow is seen, and must decode the same bytes to the same bits on every worker.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from lockstep.errors import UsageError


class Route(Enum):
    """How a parcel travels, and what arrives of it."""

    SUM = "sum"
    """All-reduce: the sum of everybody's tensors arrives, of the same shape."""
    SWAP = "swap"
    """All-to-all: row r goes to worker r; one row from each worker arrives, in the order of the ranks."""
    GATHER = "gather"
    """All-gather: everybody's tensors arrive as rows, in the order of the ranks."""
    SCATTER = "scatter"
    """Reduce-scatter: this worker's equal part of the sum of everybody's tensors arrives."""

    def num_bytes(self, parcel_bytes: int, size: int) -> int:
        """What one of `size` workers sends for a parcel of that many bytes; an all-reduce counts as a ring."""
        others = size - 1
        if self is Route.SUM:
            return -(-2 * others * parcel_bytes // size)
        return others * parcel_bytes if self is Route.GATHER else others * parcel_bytes // size


@dataclass(frozen=True, slots=True)
class Parcel:
    """A tensor on its way."""

    tensor: Tensor
    """Contiguous. The carrier may overwrite it."""
    route: Route


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter's place in a bucket."""

    name: str
    """Under which its state is saved; a name is used once over all buckets of a model."""
    offset: int
    """Of its first value."""
    shape: tuple[int, ...]
    """In the order in which its values lie in memory."""

    @property
    def numel(self) -> int:
        """How many values it has."""
        return prod(self.shape)

    @property
    def end(self) -> int:
        """Behind its last value."""
        return self.offset + self.numel


@dataclass(frozen=True, slots=True)
class BucketShape:
    """What a wire needs to know of a bucket: the same on every worker, and for as long as the bucket lives."""

    numel: int
    """Values that are encoded. What a flat tensor has beyond them (a tail of notes) is neither read nor written."""
    pieces: tuple[Piece, ...] = ()
    """Its parameters, in order. What lies between them is padding: zero, and zero again after each exchange.
    None: one piece."""
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default=torch.device("cpu"))

    def __post_init__(self) -> None:
        if self.numel < 0:
            raise UsageError(f"a bucket of {self.numel} values cannot be: numel must be 0 or more.")
        if not self.pieces:
            object.__setattr__(self, "pieces", (Piece("bucket", 0, (self.numel,)),))
        end = 0
        for piece in self.pieces:
            if piece.offset < end or piece.end > self.numel:
                raise UsageError(
                    f"'{piece.name}' lies at {piece.offset} to {piece.end} of a bucket of {self.numel} values, and the "
                    f"piece before it ends at {end}. Pieces must be in order, apart, and inside."
                )
            end = piece.end

    @property
    def num_bytes(self) -> int:
        """Bytes of the values as they are."""
        return self.numel * self.dtype.itemsize

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Begin and end of what belongs to no piece."""
        end = 0
        for piece in self.pieces:
            if piece.offset > end:
                yield end, piece.offset
            end = piece.end
        if end < self.numel:
            yield end, self.numel


class Passage(ABC):
    """One bucket on its way over a wire on one worker, step after step. As it stands here, nothing is remembered."""

    @abstractmethod
    def encode(self, flat: Tensor) -> Parcel:
        """Encode this worker's bucket, which must stay as it is until `decode` if the parcel is a view of it."""

    def combine(self, arrived: Tensor) -> Parcel | None:
        """Make the parcel back of what arrived; None if what arrived is to be decoded."""
        return None

    def own_sum(self, arrived: Tensor) -> Tensor | None:
        """The sum at this worker's equal part of the bucket, from what arrived of it; None if sums only come whole.

        In place of `combine` and `decode`, where every worker needs its part alone.
        """
        return None

    @abstractmethod
    def decode(self, arrived: Tensor, flat: Tensor) -> None:
        """Write the sum over all workers into the bucket; the same bits on every worker."""

    def state_dict(self) -> dict[str, Tensor]:
        """What must be kept to go on after a restart, by the names of pieces: this worker's own copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Go on from what `state_dict` gave; it may hold more pieces than this bucket has."""

    def rescale(self, factor: float) -> None:  # noqa: B027
        """Multiply what is remembered of past gradients: the loss scale has changed."""


class Wire(Protocol):
    """How buckets are encoded while they travel."""

    @property
    def bucket_mb(self) -> float:
        """MB of gradients to encode at a time on GPUs, where a message costs more than a small one's bytes.

        Tuned by `lockstep bench gpu` with GPT-2 124M on 2 NCCL ranks; on the CPU buckets stay small.
        """

    def open(self, bucket: BucketShape, rank: int, size: int) -> Passage:
        """The state of one bucket on worker `rank` of `size`."""

    def bytes_promised(self, bucket: BucketShape | int, size: int) -> int:
        """What each of `size` workers sends for one exchange of a bucket, or of so many values of fp32."""


def as_bucket(bucket: BucketShape | int) -> BucketShape:
    """A bucket, or one of so many values of fp32."""
    return BucketShape(bucket) if isinstance(bucket, int) else bucket


def require(condition: bool, wire: str, found: str, advice: str) -> None:
    """Raise UsageError for an argument of a wire that cannot be right."""
    if not condition:
        raise UsageError(f"wire {wire} got {found}. {advice}")
