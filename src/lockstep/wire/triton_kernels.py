# mypy: ignore-errors
"""The kernels themselves; only `kernels` imports this, where there is Triton.

Each program works on COUNT blocks of one row (a chunk). Scales and payloads of a row lie at strides that are given.
"""

import triton
import triton.language as tl


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
    TAKES: tl.constexpr,  # noqa: N803
):
    """Scale and round; with TAKES, leave in the values what that lost."""
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
    if TAKES:
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
    TAKES: tl.constexpr,  # noqa: N803
):
    """Pack the signs; with TAKES, leave in the values what they do not tell."""
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
    if TAKES:
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
