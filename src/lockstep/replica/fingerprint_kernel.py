# mypy: ignore-errors
"""The kernel of fingerprint.py; imported where there is a GPU, and Triton."""

import triton
import triton.language as tl


@triton.jit
def column_sums(
    addresses,
    lengths,
    numbers,
    sums,
    COLUMNS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
):
    """Add the words of one stretch of a tensor, which begins with a row, to the sums of the tensor's columns."""
    stretch = tl.program_id(0)
    address = tl.load(addresses + stretch)
    num_bytes = tl.load(lengths + stretch)
    words = address.to(tl.pointer_type(tl.int64))
    num_words = num_bytes // 8
    column = tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)
    total = tl.zeros((ROWS, WIDTH), dtype=tl.int64)
    for begin in range(0, num_words, ROWS * COLUMNS):
        at = begin + row[:, None] * COLUMNS + column[None, :]
        total += tl.load(words + at, mask=(column[None, :] < COLUMNS) & (at < num_words), other=0)
    sum_of_rows = tl.sum(total, axis=0)
    # The last word, where it is not whole, is filled up with zeros.
    byte = tl.arange(0, 8)
    raw = (address + num_words * 8).to(tl.pointer_type(tl.uint8))
    last = tl.load(raw + byte, mask=byte < num_bytes % 8, other=0).to(tl.int64) << (8 * byte)
    sum_of_rows += tl.where(column == num_words % COLUMNS, tl.sum(last, axis=0), 0)
    place = sums + tl.load(numbers + stretch) * COLUMNS + column
    tl.atomic_add(place, sum_of_rows, mask=column < COLUMNS)
