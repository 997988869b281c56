"""Reductions: N contributions to one result, in the order of the ranks, so that every worker gets the same bits."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError

Step = Callable[..., Tensor]
"""Combines two tensors into a third, `out`, which may be one of them."""

RedOpType: Any = dist.ReduceOp.RedOpType


STEPS: dict[object, Step] = {
    RedOpType.SUM: torch.add,
    RedOpType.AVG: torch.add,
    RedOpType.PREMUL_SUM: torch.add,
    RedOpType.PRODUCT: torch.mul,
    RedOpType.MIN: torch.minimum,
    RedOpType.MAX: torch.maximum,
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
}
BITWISE = (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Unsigned types in which torch has no arithmetic: sums, products and bits are the same in the signed ones."""
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How the contributions to one result of one dtype are combined."""

    kind: object
    """torch's name of it, a RedOpType."""
    name: str
    size: int
    """How many contributions there are."""
    _step: Step
    _wide: torch.dtype | None
    """The dtype to accumulate in, where that is not the tensor's own."""
    _averages: bool
    _is_one_step: bool
    """Whether two contributions are combined with nothing before or after."""

    def __call__(self, sources: Sequence[Tensor], out: Tensor, *, out_is: int = -1) -> None:
        """Combine `sources` in their order into `out`, which may be the source number `out_is` and no other."""
        if self._is_one_step:
            self._step(sources[0], sources[1], out=out)
        elif self._wide is not None:
            self._widened(sources, out, self._wide)
        elif out_is > 1 and self.size > 2:
            # `out` would be overwritten before its own turn has come.
            result = torch.empty_like(out)
            self._chain(sources, result)
            out.copy_(result)
        else:
            self._chain(sources, out)

    def _chain(self, sources: Sequence[Tensor], out: Tensor) -> None:
        if len(sources) == 1:
            if out.data_ptr() != sources[0].data_ptr():
                out.copy_(sources[0])
        else:
            self._step(sources[0], sources[1], out=out)
            for source in sources[2:]:
                self._step(out, source, out=out)
        if self._averages:
            self._divide(out)

    def _widened(self, sources: Sequence[Tensor], out: Tensor, wide: torch.dtype) -> None:
        total = sources[0].to(wide, copy=True)
        for source in sources[1:]:
            self._step(total, source if source.dtype in NARROW else source.to(wide), out=total)
        if self._averages:
            self._divide(total)
        out.copy_(total)

    def _divide(self, total: Tensor) -> None:
        if total.is_floating_point() or total.is_complex():
            total.div_(self.size)
        else:
            total.div_(self.size, rounding_mode="trunc")


@functools.lru_cache(maxsize=512)
def reduction(kind: object, dtype: torch.dtype, size: int) -> Reduction:
    """The reduction of `size` tensors of `dtype` that torch calls `kind`; raises UsageError if there is none."""
    name = str(getattr(kind, "name", kind))
    step = STEPS.get(kind)
    if step is None or (kind in BITWISE and (dtype.is_floating_point or dtype.is_complex)):
        raise UsageError(f"backend shm cannot reduce {dtype} by {name}. Cast the tensor, or choose another reduction.")
    if dtype in SIGNED and kind in (RedOpType.MIN, RedOpType.MAX, RedOpType.AVG):
        raise UsageError(f"backend shm cannot reduce {dtype} by {name}, since torch cannot. Cast the tensor.")
    if dtype.is_complex and kind in (RedOpType.MIN, RedOpType.MAX):
        raise UsageError(f"backend shm cannot reduce {dtype} by {name}: complex numbers have no order.")
    wide, averages = _accumulator(kind, dtype, size), kind == RedOpType.AVG
    return Reduction(kind, name, size, step, wide, averages, size == 2 and wide is None and not averages)


def _accumulator(kind: object, dtype: torch.dtype, size: int) -> torch.dtype | None:
    if dtype in NARROW:
        # With two contributions torch rounds once anyway; with more, every sum would round again.
        return torch.float32 if size > 2 or kind == RedOpType.AVG else None
    if dtype.is_floating_point and dtype.itemsize == 1:
        return torch.float32
    if dtype == torch.bool and kind == RedOpType.AVG:
        return torch.int32
    return None


def arithmetic(flat: Tensor) -> Tensor:
    """`flat` in a dtype in which torch can add and multiply: itself, or its bits seen as signed numbers."""
    signed = SIGNED.get(flat.dtype)
    return flat if signed is None else flat.view(signed)
