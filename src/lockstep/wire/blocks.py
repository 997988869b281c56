"""Rows of blocks, each with a scale of its own: the memory layout that `Int8` and `Sign` share.

An encoded chunk of B blocks is B scales in fp32, then B payloads of equal length.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.wire.protocol import require

SCALE_BYTES = 4
SLAB_NUMEL = 1 << 16
"""Values encoded at a time in host memory, so that they stay in the cache and take little room. Measured with Int8 on
25 MiB and one thread: 13 ms with this and with twice as many, 16 with half, 17 with all at once."""


def require_block(block: int, wire: str, smallest: int) -> None:
    """Raise UsageError unless `block` can be the length of a block: its payload must be a multiple of 4 bytes."""
    is_fit = isinstance(block, int) and smallest <= block <= 4096 and block & (block - 1) == 0
    advice = f"A block is a power of two from {smallest} to 4096 values, such as 256."
    require(is_fit, wire, f"block={block!r}", advice)


def row_bytes(numel: int, block: int, payload_bytes: int) -> int:
    """Bytes of an encoded chunk."""
    return numel // block * (SCALE_BYTES + payload_bytes)


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
