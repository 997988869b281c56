"""Gradients in 8 bits or in 1, with a scale for each block of them.

An encoded chunk of B blocks is B scales in fp32, then B payloads of equal length. The torch code here says what is
computed; where a tensor is on a CUDA device and Triton is there, `triton_kernels` does it in one pass over memory.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.torch_private import has_triton
from lockstep.wire.error_feedback import drop_overflow
from lockstep.wire.exchange import ChunkPassage, InPlaceChunkWire
from lockstep.wire.protocol import BucketShape, require

SCALE_BYTES = 4
SLAB_NUMEL = 1 << 16
"""Values encoded at a time in host memory, so that they stay in the cache and take little room. Measured with Int8 on
25 MiB and one thread: 13 ms with this and with twice as many, 16 with half, 17 with all at once."""
SMALLEST = 2e-38
"""No scale of `Int8` is smaller: one over it would not be finite."""

# Eight bytes of 0 or 1, read as one 64-bit number, times GATHER have their bits in the highest byte: the first byte's
# bit in its lowest place, and so on. The other way, a byte times SPREAD is eight copies of it, of which EACH keeps
# one bit per byte; adding 127 to each byte brings it, if set, to the byte's highest place.
GATHER = 0x0102040810204080
SPREAD = 0x0101010101010101
EACH = 0x8040201008040201 - (1 << 64)
TO_THE_TOP = 0x7F7F7F7F7F7F7F7F


class BlockWire(InPlaceChunkWire):
    """Base of wires with a scale for each block: chunks are whole blocks."""

    __slots__ = ()
    block: int

    def require_block(self, smallest: int) -> None:
        """Raise UsageError unless `block` can be the length of a block: its payload must be a multiple of 4 bytes."""
        is_fit = isinstance(self.block, int) and smallest <= self.block <= 4096 and self.block & (self.block - 1) == 0
        advice = f"A block is a power of two from {smallest} to 4096 values, such as 256."
        require(is_fit, type(self).__name__, f"block={self.block!r}", advice)

    @property
    def grain(self) -> int:
        """A block."""
        return self.block

    @property
    @abstractmethod
    def payload_bytes(self) -> int:
        """What the values of a block take."""

    def chunk_bytes(self, numel: int) -> int:
        """Payloads, and a scale for each."""
        return numel // self.block * (SCALE_BYTES + self.payload_bytes)

    def _empty(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Room for the encoded `values`, its scales and payloads; and the blocks of the values."""
        rows, numel = values.shape
        encoded = torch.empty(rows, self.chunk_bytes(numel), dtype=torch.uint8, device=values.device)
        blocks = values.unflatten(1, (-1, self.block))
        return encoded, *scales_and_payload(encoded, numel // self.block), blocks


@dataclass(frozen=True, slots=True)
class Int8(BlockWire):
    """Gradients travel as whole numbers from -127 to 127 times a scale per block, out and back.

    Volume: (N-1)/N times 2 * (1 + 4/block) bytes a value, 0.51 of `Half` and 0.25 of `Full` with blocks of 256; chunks
    are whole blocks. Memory: the error, 1 + 1/N times the bucket in fp32.
    Exactness: in each encoding a value is off by at most 1/254 of the largest in its block. Error feedback adds what
    was lost to the next step, out and back, so over many steps nothing is lost. Zeros stay zeros. A value that is not
    finite makes its block NaN everywhere.
    """

    block: int = 256

    def __post_init__(self) -> None:
        self.require_block(8)

    @property
    def payload_bytes(self) -> int:
        """One a value."""
        return self.block

    def take(self, values: Tensor) -> Tensor:
        """Divide each block by its largest value and round to nearest; leave in `values` what rounding lost."""
        encoded, scales, payload, blocks = self._empty(values)
        if kernels := kernels_for(values):
            kernels.launch(kernels.int8_encode, blocks, scales, payload.view(torch.int8), SMALLEST)
            return encoded
        for part, scale, bytes_out in slabs(blocks, scales, payload.view(torch.int8)):
            found = part.abs().amax(1, keepdim=True).div_(127.0).clamp_(min=SMALLEST)
            write_scale(scale, found)
            quanta = torch.mul(part, found.reciprocal_()).round_()
            bytes_out.copy_(quanta)
            part.sub_(quanta.mul_(scale))
        drop_overflow(values, scales)
        return encoded

    def put(self, encoded: Tensor, out: Tensor, *, adds: bool) -> None:
        """Decode to `out`, or on top of what it holds."""
        blocks = out.unflatten(1, (-1, self.block))
        scales, payload = scales_and_payload(encoded, blocks.shape[1])
        if kernels := kernels_for(out):
            kernels.launch(kernels.int8_decode, blocks, scales, payload.view(torch.int8), ADDS=adds)
            return
        for part, scale, bytes_in in slabs(blocks, scales, payload.view(torch.int8)):
            if adds:
                part.add_(bytes_in.to(torch.float32).mul_(scale))
            else:
                part.copy_(bytes_in).mul_(scale)


@dataclass(frozen=True, slots=True)
class Sign(BlockWire):
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
        self.require_block(32)
        fits = isinstance(self.feedback, int | float) and 0.0 <= self.feedback <= 1.0
        require(fits, "Sign", f"feedback={self.feedback!r}", "It is a share from 0 to 1, such as 0.3.")

    @property
    def payload_bytes(self) -> int:
        """One bit a value."""
        return self.block // 8

    def open(self, bucket: BucketShape, rank: int, size: int) -> ChunkPassage:
        """The state of one bucket on worker `rank` of `size`. Takes 1 + 1/N times the bucket in fp32 as memory."""
        return SignPassage(self, bucket, rank, size)

    def take(self, values: Tensor, counts: Tensor | None = None) -> Tensor:
        """Pack the signs, and leave in `values` what they do not tell; `counts` as in `SignPassage`."""
        encoded, scales, payload, blocks = self._empty(values)
        if counts is None:
            counts = torch.full_like(scales, float(self.block))
        if kernels := kernels_for(values):
            kernels.launch(kernels.sign_encode, blocks, scales, payload, counts.contiguous())
            return encoded
        for part, scale, bytes_out, count in slabs(blocks, scales, payload, counts):
            write_scale(scale, part.abs().sum(1, keepdim=True).div_(count))
            signs = part.view(torch.int32) >> 31  # -1 or 0
            bytes_out.copy_(pack(signs.to(torch.int8)))
            part.sub_(signs.to(torch.float32).mul_(2.0 * scale).add_(scale))
        drop_overflow(values, scales)
        return encoded

    def put(self, encoded: Tensor, out: Tensor, *, adds: bool) -> None:
        """Decode to `out`, or on top of what it holds."""
        blocks = out.unflatten(1, (-1, self.block))
        scales, payload = scales_and_payload(encoded, blocks.shape[1])
        if kernels := kernels_for(out):
            kernels.launch(kernels.sign_decode, blocks, scales, payload, ADDS=adds)
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


def scales_and_payload(encoded: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    """Views of rows of bytes: scales (rows, blocks) in fp32 and payloads (rows, blocks, bytes)."""
    head = SCALE_BYTES * num_blocks
    scales = encoded[:, :head].view(torch.float32)
    return scales, encoded[:, head:].unflatten(1, (num_blocks, -1))


def slabs(values: Tensor, scales: Tensor, payload: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same blocks of each, some at a time: values (blocks, block), scales and others (blocks, 1), payload."""
    num_blocks = max(1, SLAB_NUMEL // values.shape[2]) if values.device.type == "cpu" else values.shape[1]
    columns = [each.unsqueeze(2) for each in (scales, *others)]
    for row in range(values.shape[0]):
        scales_at, *others_at = (column[row].split(num_blocks) for column in columns)
        yield from zip(
            values[row].split(num_blocks), scales_at, payload[row].split(num_blocks), *others_at, strict=True
        )


def write_scale(scale: Tensor, found: Tensor) -> None:
    """Set `scale`, to NaN where what was found is not finite: so that nothing finite comes out of such a block."""
    torch.add(found, found, alpha=0.0, out=scale)


def pack(flags: Tensor) -> Tensor:
    """The lowest bits of int8 (rows, 8k) as bytes (rows, k); the first of eight is the byte's lowest."""
    words = flags.contiguous().view(torch.int64) & SPREAD
    return words.mul_(GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """The bits of bytes (rows, k) as int8 (rows, 8k) of 0 and 1."""
    words = packed.to(torch.int64).mul_(SPREAD).bitwise_and_(EACH).add_(TO_THE_TOP)
    return words.bitwise_right_shift_(7).bitwise_and_(SPREAD).view(torch.int8)


def kernels_for(tensor: Tensor) -> Any:
    """The Triton kernels, imported when first needed, where they are to be used for `tensor`; else None."""
    if not tensor.is_cuda or not tensor.numel() or not has_triton():
        return None
    from lockstep.wire import triton_kernels

    return triton_kernels
