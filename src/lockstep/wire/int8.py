"""Gradients in 8 bits, with a scale for each block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.wire import kernels
from lockstep.wire.blocks import require_block, row_bytes, scales_and_payload, slabs, write_scale
from lockstep.wire.chunks import ChunkWire
from lockstep.wire.error_feedback import drop_overflow

SMALLEST = 2e-38
"""No scale is smaller: one over it would not be finite."""


@dataclass(frozen=True, slots=True)
class Int8(ChunkWire):
    """Gradients travel as whole numbers from -127 to 127 times a scale per block, out and back.

    Volume: (N-1)/N times 2 * (1 + 4/block) bytes a value, 0.51 of `Half` and 0.25 of `Full` with blocks of 256; chunks
    are whole blocks. Memory: the error, 1 + 1/N times the bucket in fp32.
    Exactness: in each encoding a value is off by at most 1/254 of the largest in its block. Error feedback adds what
    was lost to the next step, out and back, so over many steps nothing is lost. Zeros stay zeros. A value that is not
    finite makes its block NaN everywhere.
    """

    block: int = 256

    def __post_init__(self) -> None:
        require_block(self.block, "Int8", 8)

    @property
    def grain(self) -> int:
        """Chunks are whole blocks."""
        return self.block

    def chunk_bytes(self, numel: int) -> int:
        """One byte a value and a scale a block."""
        return row_bytes(numel, self.block, self.block)

    def encode(self, values: Tensor) -> Tensor:
        """Divide each block by its largest value, and round to nearest."""
        return self._encode(values, takes=False)

    def take(self, values: Tensor) -> Tensor:
        """Encode `values` and leave in them what rounding lost."""
        return self._encode(values, takes=True)

    def _encode(self, values: Tensor, *, takes: bool) -> Tensor:
        encoded, scales, payload = self._empty(values)
        blocks = values.unflatten(1, (-1, self.block))
        if kernels.run_on(values):
            kernels.int8_encode(blocks, scales, payload, SMALLEST, takes=takes)
            return encoded
        for part, scale, bytes_out in slabs(blocks, scales, payload.view(torch.int8)):
            found = part.abs().amax(1, keepdim=True).div_(127.0).clamp_(min=SMALLEST)
            write_scale(scale, found)
            quanta = torch.mul(part, found.reciprocal_()).round_()
            bytes_out.copy_(quanta)
            if takes:
                part.sub_(quanta.mul_(scale))
        if takes:
            drop_overflow(values, scales)
        return encoded

    def decode(self, encoded: Tensor, numel: int) -> Tensor:
        """Multiply by the scales."""
        out = torch.empty(len(encoded), numel, device=encoded.device)
        self.put(encoded, out, adds=False)
        return out

    def put(self, encoded: Tensor, out: Tensor, *, adds: bool) -> None:
        """Decode to `out`, or on top of what it holds."""
        blocks = out.unflatten(1, (-1, self.block))
        scales, payload = scales_and_payload(encoded, blocks.shape[1])
        if kernels.run_on(out):
            kernels.int8_decode(blocks, scales, payload, adds=adds)
            return
        for part, scale, bytes_in in slabs(blocks, scales, payload.view(torch.int8)):
            if adds:
                part.add_(bytes_in.to(torch.float32).mul_(scale))
            else:
                part.copy_(bytes_in).mul_(scale)

    def _empty(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, numel = values.shape
        encoded = torch.empty(rows, self.chunk_bytes(numel), dtype=torch.uint8, device=values.device)
        return encoded, *scales_and_payload(encoded, numel // self.block)
