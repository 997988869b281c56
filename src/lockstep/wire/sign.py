"""Gradients in 1 bit, with a scale for each block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.wire import kernels
from lockstep.wire.blocks import require_block, row_bytes, scales_and_payload, slabs, write_scale
from lockstep.wire.chunks import ChunkPassage, ChunkWire
from lockstep.wire.error_feedback import drop_overflow
from lockstep.wire.protocol import BucketShape, require

# Eight bytes of 0 or 1, read as one 64-bit number, times GATHER have their bits in the highest byte: the first byte's
# bit in its lowest place, and so on. The other way, a byte times SPREAD is eight copies of it, of which EACH keeps
# one bit per byte; adding 127 to each byte brings it, if set, to the byte's highest place.
GATHER = 0x0102040810204080
SPREAD = 0x0101010101010101
EACH = 0x8040201008040201 - (1 << 64)
TO_THE_TOP = 0x7F7F7F7F7F7F7F7F


@dataclass(frozen=True, slots=True)
class Sign(ChunkWire):
    """Gradients travel as their signs times the mean absolute value of their block, out and back.

    Volume: (N-1)/N times 2 * (1/8 + 4/block) bytes a value, 0.035 of `Full` with blocks of 256; chunks are whole
    blocks. Memory: the error, 1 + 1/N times the bucket in fp32.
    Exactness: a single step has the direction of the gradient at best. `feedback` is the share of the error that is
    added to the next gradient, out and back: with 1 the steps add up to the right sum, which SGD needs; Adam, which
    looks at signs itself, learns better with little of it (docs/benchmarks.md: a final loss 3 % above that of `Full`
    with 0.3, 15 % with 1, both after 100 plain steps). Blocks that are zero stay zero; a single zero does not. A value
    that is not finite, or a block whose absolute values have no finite sum, makes the block NaN everywhere.
    """

    block: int = 256
    feedback: float = 0.3

    bucket_mb = 150

    def __post_init__(self) -> None:
        require_block(self.block, "Sign", 32)
        fits = isinstance(self.feedback, int | float) and 0.0 <= self.feedback <= 1.0
        require(fits, "Sign", f"feedback={self.feedback!r}", "It is a share from 0 to 1, such as 0.3.")

    @property
    def grain(self) -> int:
        """Chunks are whole blocks."""
        return self.block

    def chunk_bytes(self, numel: int) -> int:
        """One bit a value and a scale a block."""
        return row_bytes(numel, self.block, self.block // 8)

    def encode(self, values: Tensor) -> Tensor:
        """Pack the signs."""
        return self._encode(values, takes=False)

    def take(self, values: Tensor, counts: Tensor | None = None) -> Tensor:
        """Pack the signs, and leave in `values` what they do not tell; `counts` as in `SignPassage`."""
        return self._encode(values, counts, takes=True)

    def open(self, bucket: BucketShape, rank: int, size: int) -> ChunkPassage:
        """The state of one bucket on worker `rank` of `size`. Takes 1 + 1/N times the bucket in fp32 as memory."""
        return SignPassage(self, bucket, rank, size)

    def _encode(self, values: Tensor, counts: Tensor | None = None, *, takes: bool) -> Tensor:
        rows, numel = values.shape
        if counts is None:
            counts = torch.full((rows, numel // self.block), float(self.block), device=values.device)
        encoded = torch.empty(rows, self.chunk_bytes(numel), dtype=torch.uint8, device=values.device)
        scales, payload = scales_and_payload(encoded, numel // self.block)
        blocks = values.unflatten(1, (-1, self.block))
        if kernels.run_on(values):
            kernels.sign_encode(blocks, scales, payload, counts, takes=takes)
            return encoded
        for part, scale, bytes_out, count in slabs(blocks, scales, payload, counts):
            write_scale(scale, part.abs().sum(1, keepdim=True).div_(count))
            signs = part.view(torch.int32) >> 31  # -1 or 0
            bytes_out.copy_(pack(signs.to(torch.int8)))
            if takes:
                part.sub_(signs.to(torch.float32).mul_(2.0 * scale).add_(scale))
        if takes:
            drop_overflow(values, scales)
        return encoded

    def decode(self, encoded: Tensor, numel: int) -> Tensor:
        """Unpack the signs, times the scales."""
        out = torch.empty(len(encoded), numel, device=encoded.device)
        self.put(encoded, out, adds=False)
        return out

    def put(self, encoded: Tensor, out: Tensor, *, adds: bool) -> None:
        """Decode to `out`, or on top of what it holds."""
        blocks = out.unflatten(1, (-1, self.block))
        scales, payload = scales_and_payload(encoded, blocks.shape[1])
        if kernels.run_on(out):
            kernels.sign_decode(blocks, scales, payload, adds=adds)
            return
        for part, scale, bytes_in in slabs(blocks, scales, payload):
            decoded = unpack(bytes_in).to(torch.float32) if adds else part.copy_(unpack(bytes_in))
            decoded.mul_(-2.0 * scale).add_(scale)
            if adds:
                part.add_(decoded)


class SignPassage(ChunkPassage):
    """One bucket in signs. Padding counts in no block's mean: where most of a block is padding, it would be too low."""

    def __init__(self, wire: Sign, bucket: BucketShape, rank: int, size: int) -> None:
        super().__init__(wire, bucket, rank, size)
        self._sign = wire
        is_value = torch.zeros(size, wire.chunk_numel(bucket.numel, size), device=bucket.device)
        for piece in bucket.pieces:
            is_value.view(-1)[piece.offset : piece.end] = 1.0
        self._counts = is_value.view(size, -1, wire.block).sum(2).clamp_(min=1.0) if is_value.numel() else is_value
        """How many values of each block belong to parameters, at least 1; in fp32."""

    def take(self, values: Tensor, first: int) -> Tensor:
        """Encode chunks, counted from `first`, and leave what was lost."""
        return self._sign.take(values, self._counts[first : first + len(values)])


def pack(flags: Tensor) -> Tensor:
    """The lowest bits of int8 (rows, 8k) as bytes (rows, k); the first of eight is the byte's lowest."""
    words = flags.contiguous().view(torch.int64) & SPREAD
    return words.mul_(GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """The bits of bytes (rows, k) as int8 (rows, 8k) of 0 and 1."""
    words = packed.to(torch.int64).mul_(SPREAD).bitwise_and_(EACH).add_(TO_THE_TOP)
    return words.bitwise_right_shift_(7).bitwise_and_(SPREAD).view(torch.int8)
