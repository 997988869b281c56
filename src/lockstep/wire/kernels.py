"""Encoding and decoding of blocks on CUDA, each in one pass over memory, in Triton.

The torch code in `int8` and `sign` says what they compute; this is used in its place where a tensor is on a CUDA
device and Triton is there. Triton is imported when first needed, with the kernels in `triton_kernels`.
"""

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

PROGRAM_NUMEL = 4096
"""Values per program: 16 KiB of fp32, spread over 4 warps."""


def run_on(tensor: Tensor) -> bool:
    """Whether the kernels are to be used for `tensor`."""
    return tensor.is_cuda and tensor.numel() > 0 and _has_triton()


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def int8_encode(values: Tensor, scales: Tensor, payload: Tensor, smallest: float, *, takes: bool) -> None:
    """`Int8.encode` of values (rows, blocks, block), or `Int8.take`."""
    _launch(_kernels().int8_encode, values, scales, payload.view(torch.int8), smallest, TAKES=takes)


def int8_decode(out: Tensor, scales: Tensor, payload: Tensor, *, adds: bool) -> None:
    """`Int8.put` to values (rows, blocks, block)."""
    _launch(_kernels().int8_decode, out, scales, payload.view(torch.int8), ADDS=adds)


def sign_encode(values: Tensor, scales: Tensor, payload: Tensor, counts: Tensor, *, takes: bool) -> None:
    """`Sign.encode` of values (rows, blocks, block), or `Sign.take`."""
    _launch(_kernels().sign_encode, values, scales, payload, counts.contiguous(), TAKES=takes)


def sign_decode(out: Tensor, scales: Tensor, payload: Tensor, *, adds: bool) -> None:
    """`Sign.put` to values (rows, blocks, block)."""
    _launch(_kernels().sign_decode, out, scales, payload, ADDS=adds)


def _launch(kernel: Any, values: Tensor, scales: Tensor, payload: Tensor, *rest: float | Tensor, **flags: bool) -> None:
    rows, num_blocks, block = values.shape
    # The kernels reckon with values and payloads of a row one behind the other; rows of bytes may be apart.
    assert values.is_contiguous() and payload.stride(1) == payload.shape[2] and payload.stride(2) == 1
    per_program = max(1, PROGRAM_NUMEL // block)
    grid = (-(-num_blocks // per_program), rows)
    strides = (scales.stride(0), payload.stride(0))
    options: dict[str, Any] = {"BLOCK": block, "COUNT": per_program, **flags}
    with torch.cuda.device(values.device):
        # Without fusing: a product that is not rounded before it is added differs from what torch computes.
        kernel[grid](values, scales, payload, *strides, num_blocks, *rest, **options, enable_fp_fusion=False)


def _kernels() -> Any:
    from lockstep.wire import triton_kernels

    return triton_kernels
