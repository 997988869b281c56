"""The largest gradients, and where they are."""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from lockstep.wire.error_feedback import drop_overflow
from lockstep.wire.exchange import InPlaceChunkWire
from lockstep.wire.protocol import require

VALUE_BYTES = 4
INDEX_BYTES = 4
SAMPLE_NUMEL = 1 << 14
"""Values that are looked at to guess from where on they count among the largest."""
MARGIN = 1.25
"""How many more than wanted the guess should leave; too few, and all values are sorted."""
SMALLEST = 2.0**-149
"""Of the numbers above zero in fp32: where most are zero, only the others are worth sorting."""


@dataclass(frozen=True, slots=True)
class TopK(InPlaceChunkWire):
    """The `ratio` of values that are largest in each chunk travel, in fp32 with their places, out and back.

    Volume: (N-1)/N times 2 * 8 * ratio bytes a value, 0.02 of `Full` with a ratio of 0.01; at least one value of each
    chunk. Memory: the error, 1 + 1/N times the bucket in fp32.
    Exactness: what travels is exact, the rest waits in the error until it is among the largest; the owner likewise
    passes on the largest of the sum and keeps the rest. What waits comes late, so steps must be smaller than with
    `Full`, above all with much momentum. A value that is not finite counts as the largest.
    """

    ratio: float = 0.01

    bucket_mb = 150

    def __post_init__(self) -> None:
        is_fit = isinstance(self.ratio, (int, float)) and 0.0 < self.ratio <= 0.5
        advice = "It is a share above 0 and up to 0.5, such as 0.01; beyond 0.5 Full() sends less."
        require(is_fit, "TopK", f"ratio={self.ratio!r}", advice)

    def num_kept(self, numel: int) -> int:
        """How many values of a chunk travel."""
        return ceil(self.ratio * numel)

    def chunk_bytes(self, numel: int) -> int:
        """A value and its place, for each that is kept."""
        return self.num_kept(numel) * (VALUE_BYTES + INDEX_BYTES)

    def take(self, values: Tensor) -> Tensor:
        """Pick the largest of each chunk, and leave the others."""
        places = self._pick(values)
        encoded = self._pack(values, places)
        values.scatter_(1, places, 0.0)
        drop_overflow(values, self._unpack(encoded)[0])
        return encoded

    def _pick(self, values: Tensor) -> Tensor:
        kept = self.num_kept(values.shape[1])
        if values.device.type == "cpu":
            return torch.stack([largest(row, kept) for row in values])
        return values.abs().topk(kept, dim=1, sorted=False).indices

    def _pack(self, values: Tensor, places: Tensor) -> Tensor:
        picked = values.gather(1, places)
        return torch.cat([picked.view(torch.uint8), places.to(torch.int32).view(torch.uint8)], dim=1)

    def _unpack(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """The values that were kept and their places."""
        half = encoded.shape[1] // 2
        return encoded[:, :half].view(torch.float32), encoded[:, half:].view(torch.int32)

    def put(self, encoded: Tensor, out: Tensor, *, adds: bool) -> None:
        """Decode to `out`, or on top of what it holds."""
        values, places = self._unpack(encoded)
        if not adds:
            out.zero_()
        out.scatter_add_(1, places.to(torch.int64), values)  # No place twice in a row: no order to depend on.


def largest(row: Tensor, count: int) -> Tensor:
    """The places of the `count` values of `row` that are largest in absolute value, NaN above all, in any order.

    In host memory a selection from all values takes 60 times as long as copying them. So a sample gives a bound that
    a few more than `count` values should reach; the selection is from these.
    """
    bound = _bound(row, count)
    # Not below, so that NaN is among them.
    found = (row.abs() < max(bound, SMALLEST)).logical_not_().nonzero().view(-1)
    missing = count - found.numel()
    if missing > 0 and bound > 0.0:
        found = torch.arange(row.numel())
    elif missing > 0:  # All that is not zero has been found.
        found = torch.cat([found, (row == 0.0).nonzero().view(-1)[:missing]])
    return found[row[found].abs().topk(count, sorted=False).indices]


def _bound(row: Tensor, count: int) -> float:
    """About what MARGIN times `count` values of `row` reach, at most."""
    step = max(1, row.numel() // SAMPLE_NUMEL) | 1  # Odd, so as not to see the same columns of every matrix.
    sample = row[::step].abs()
    rank = min(sample.numel(), ceil(MARGIN * count * sample.numel() / row.numel()) + 8)
    return float(sample.topk(rank, sorted=False).values.min())
