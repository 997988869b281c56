# mypy: ignore-errors
"""The kernel of step_report.py; imported where there is a GPU, and Triton."""

import triton
import triton.language as tl

DTYPES = {"float32": tl.float32, "bfloat16": tl.bfloat16, "float16": tl.float16, "float64": tl.float64}


@triton.jit
def unit_norms(begins, numbers, offsets, counts, places, row, DTYPE: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """The norm of one unit into its place, added up in double precision."""
    number = tl.program_id(0)
    address = tl.load(begins + tl.load(numbers + number)) + tl.load(offsets + number)
    values = address.to(tl.pointer_type(DTYPE))
    count = tl.load(counts + number)
    lanes = tl.arange(0, BLOCK)
    squares = tl.zeros((BLOCK,), dtype=tl.float64)
    for begin in range(0, count, BLOCK):
        part = tl.load(values + begin + lanes, mask=begin + lanes < count, other=0.0).to(tl.float64)
        squares += part * part
    tl.store(row + tl.load(places + number), tl.sqrt(tl.sum(squares, axis=0)))
