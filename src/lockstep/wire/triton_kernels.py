# mypy: ignore-errors
"""What `blockwise` computes, on CUDA, each in one pass over memory; imported only where there is Triton.

Each program works on COUNT blocks of one row (a chunk). Scales and payloads of a row lie at strides that are given.
"""

import torch
import triton
import triton.language as tl

PROGRAM_NUMEL = 4096
"""Values per program: 16 KiB of fp32, spread over 4 warps."""


def launch(kernel, values, scales, payload, *rest, **flags):
    """Run a kernel over values (rows, blocks, block), scales (rows, blocks) and payloads (rows, blocks, bytes)."""
    rows, num_blocks, block = values.shape
    # The kernels reckon with values and payloads of a row one behind the other; rows of bytes may be apart.
    assert values.is_contiguous() and payload.stride(1) == payload.shape[2] and payload.stride(2) == 1
    per_program = max(1, PROGRAM_NUMEL // block)
    grid = (-(-num_blocks // per_program), rows)
    strides = (scales.stride(0), payload.stride(0))
    options = {"BLOCK": block, "COUNT": per_program, **flags}
    with torch.cuda.device(values.device):
        # Without fusing: a product that is not rounded before it is added differs from what torch computes.
        kernel[grid](values, scales, payload, *strides, num_blocks, *rest, **options, enable_fp_fusion=False)


@triton.jit
def int8_encode(
    values,
    scales,
    payload,
    scales_stride,
    payload_stride,
    num_blocks,
    smallest,
    BLOCK: tl.constexpr,  # noqa: N803
    COUNT: tl.constexpr,  # noqa: N803
):
    """Scale and round; leave in the values what that lost."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    is_in = block < num_blocks
    inside = block[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = values + row * num_blocks * BLOCK + inside
    x = tl.load(at, mask=is_in[:, None], other=0.0)
    size = tl.abs(x)
    largest = tl.max(size, axis=1)
    # The maximum leaves NaN out, so these are looked for by themselves.
    is_spoiled = tl.max(tl.where(size < float("inf"), 0, 1), axis=1) > 0
    one = tl.zeros_like(largest) + 1.0
    scale = tl.maximum(tl.div_rn(largest, one * 127.0), one * smallest)
    factor = tl.div_rn(one, scale)
    # Adding and taking away 1.5 * 2**23 rounds to the nearest whole number, and halves to even.
    quanta = (tl.where(is_spoiled[:, None], 0.0, x) * factor[:, None] + 12582912.0) - 12582912.0
    tl.store(scales + row * scales_stride + block, tl.where(is_spoiled, float("nan"), scale), mask=is_in)
    tl.store(payload + row * payload_stride + inside, quanta.to(tl.int8), mask=is_in[:, None])
    error = tl.where(is_spoiled[:, None], 0.0, x - quanta * scale[:, None])
    tl.store(at, error, mask=is_in[:, None])


@triton.jit
def int8_decode(
    out,
    scales,
    payload,
    scales_stride,
    payload_stride,
    num_blocks,
    BLOCK: tl.constexpr,  # noqa: N803
    COUNT: tl.constexpr,  # noqa: N803
    ADDS: tl.constexpr,  # noqa: N803
):
    """Multiply by the scales; with ADDS, on top of what is there."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    is_in = block < num_blocks
    inside = block[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = out + row * num_blocks * BLOCK + inside
    scale = tl.load(scales + row * scales_stride + block, mask=is_in, other=0.0)
    quanta = tl.load(payload + row * payload_stride + inside, mask=is_in[:, None], other=0)
    decoded = quanta.to(tl.float32) * scale[:, None]
    if ADDS:
        decoded = tl.load(at, mask=is_in[:, None], other=0.0) + decoded
    tl.store(at, decoded, mask=is_in[:, None])


@triton.jit
def sign_encode(
    values,
    scales,
    payload,
    scales_stride,
    payload_stride,
    num_blocks,
    counts,
    BLOCK: tl.constexpr,  # noqa: N803
    COUNT: tl.constexpr,  # noqa: N803
):
    """Pack the signs; leave in the values what they do not tell."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    is_in = block < num_blocks
    inside = block[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = values + row * num_blocks * BLOCK + inside
    x = tl.load(at, mask=is_in[:, None], other=0.0)
    count = tl.load(counts + row * num_blocks + block, mask=is_in, other=1.0)
    scale = tl.div_rn(tl.sum(tl.abs(x), axis=1), count)
    is_spoiled = tl.where(scale < float("inf"), 0, 1) > 0
    is_negative = x.to(tl.int32, bitcast=True) < 0
    bits = tl.reshape(is_negative.to(tl.int32), (COUNT, BLOCK // 8, 8)) << tl.arange(0, 8)[None, None, :]
    packed = tl.sum(bits, axis=2)
    bytes_at = block[:, None].to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    tl.store(payload + row * payload_stride + bytes_at, packed.to(tl.uint8), mask=is_in[:, None])
    tl.store(scales + row * scales_stride + block, tl.where(is_spoiled, float("nan"), scale), mask=is_in)
    told = tl.where(is_negative, -scale[:, None], scale[:, None])
    tl.store(at, tl.where(is_spoiled[:, None], 0.0, x - told), mask=is_in[:, None])


@triton.jit
def sign_decode(
    out,
    scales,
    payload,
    scales_stride,
    payload_stride,
    num_blocks,
    BLOCK: tl.constexpr,  # noqa: N803
    COUNT: tl.constexpr,  # noqa: N803
    ADDS: tl.constexpr,  # noqa: N803
):
    """Unpack the signs, times the scales; with ADDS, on top of what is there."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    is_in = block < num_blocks
    inside = block[:, None].to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = out + row * num_blocks * BLOCK + inside
    scale = tl.load(scales + row * scales_stride + block, mask=is_in, other=0.0)
    packed = tl.load(payload + row * payload_stride + inside // 8, mask=is_in[:, None], other=0)
    is_negative = ((packed.to(tl.int32) >> (inside % 8).to(tl.int32)) & 1) > 0
    decoded = tl.where(is_negative, -scale[:, None], scale[:, None])
    if ADDS:
        decoded = tl.load(at, mask=is_in[:, None], other=0.0) + decoded
    tl.store(at, decoded, mask=is_in[:, None])
