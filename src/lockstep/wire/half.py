"""Gradients in 16 bits."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.wire.protocol import BucketShape, require
from lockstep.wire.sums import SumWire

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Half(SumWire):
    """Gradients travel rounded to 16 bits, in one all-reduce that adds in that precision.

    Volume: 2(N-1)/N times 2 bytes a value. Memory: a copy of the bucket in 16 bits while it travels.
    Exactness: each value is rounded once by its worker and again at each addition, by at most 2**-8 ("bf16") or
    2**-11 ("fp16") of itself; a sum over N workers is off by at most about N times that share of the sum of absolute
    values. "fp16" overflows to infinity beyond 65504, and to zero below 3e-8: use it with loss scaling.
    There is no error feedback: the error is small, has no bias, and arises in additions that no worker sees.
    """

    dtype: Literal["bf16", "fp16"] = "bf16"

    def __post_init__(self) -> None:
        require(self.dtype in DTYPES, "Half", f"dtype={self.dtype!r}", 'Use Half("bf16") or Half("fp16").')

    def encoded_bytes(self, bucket: BucketShape) -> int:
        """2 a value."""
        return 2 * bucket.numel

    def encode(self, values: Tensor) -> Tensor:
        """Round to nearest; the values themselves where they are in that precision already."""
        return values.to(DTYPES[self.dtype])

    def decode(self, summed: Tensor, out: Tensor) -> None:
        """Widen."""
        if summed.data_ptr() != out.data_ptr():
            out.copy_(summed)
