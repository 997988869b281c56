"""The norms of many units in one launch, on CUDA by Triton; elsewhere by torch.

A model of a hundred million parameters has two thousand units. One program computes the norm of one unit, whatever the
others are, so that the same bits come out however units are split over the workers. It finds its unit in a table of
addresses, which is copied to the device when gradients lie elsewhere than at the last time.
"""

import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy
import torch
from torch import Tensor

from lockstep.replica.split import UNIT_NUMEL

Piece = tuple[int, Tensor]
"""Number of the first unit, and the gradient's elements from that unit on, flat."""

BLOCK = 4096
"""Values that a program reads at a time."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_Key = tuple[tuple[int, int, int], ...]


class UnitNorms:
    """Writes norms into the places of their units in a row."""

    def __init__(self) -> None:
        self._places: dict[tuple[tuple[int, int], ...], Tensor] = {}
        self._tables: dict[tuple[torch.dtype, _Key], Tensor] = {}
        self._recorded: list[Tensor] = []
        """Tables that CUDA graphs read."""

    def write(self, pieces: Sequence[Piece], row: Tensor) -> None:
        """Write the norm of each unit of `pieces` into its place of `row`."""
        if row.is_cuda and _has_triton() and all(flat.dtype in _DTYPES for _, flat in pieces):
            for dtype, alike in _by_dtype(pieces).items():
                self._launch(dtype, alike, row)
            return
        units = [unit for _, flat in pieces for unit in flat.split(UNIT_NUMEL)]
        if units:
            row[self._places_of(pieces, row.device)] = torch.stack(torch._foreach_norm(units)).to(row.dtype)

    def _places_of(self, pieces: Sequence[Piece], device: torch.device) -> Tensor:
        spans = tuple((first, flat.numel()) for first, flat in pieces)
        if spans not in self._places:
            self._places = {spans: torch.from_numpy(_table(pieces)[2].copy()).to(device)}
        return self._kept(self._places[spans])

    def _kept(self, table: Tensor) -> Tensor:
        """`table`, for as long as a CUDA graph may read it."""
        if table.is_cuda and torch.cuda.is_current_stream_capturing():
            self._recorded.append(table)
        return table

    def _launch(self, dtype: torch.dtype, pieces: Sequence[Piece], row: Tensor) -> None:
        key = tuple((first, flat.data_ptr(), flat.numel()) for first, flat in pieces)
        table = self._tables.get((dtype, key))
        if table is None:
            host = torch.from_numpy(_table(pieces)).pin_memory()
            table = host.to(row.device, non_blocking=True)
            self._tables = {kept: other for kept, other in self._tables.items() if kept[0] != dtype}
            self._tables[dtype, key] = table
        addresses, counts, places = self._kept(table)
        with torch.cuda.device(row.device):
            _kernel()[(len(addresses),)](addresses, counts, places, row, DTYPE=_spelled(dtype), BLOCK=BLOCK)


def _by_dtype(pieces: Sequence[Piece]) -> dict[torch.dtype, list[Piece]]:
    found: dict[torch.dtype, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece[1].dtype, []).append(piece)
    return found


def _table(pieces: Sequence[Piece]) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
    """Address, number of elements, and place in the row, of each unit."""
    sizes = numpy.array([flat.numel() for _, flat in pieces])
    counts = -(-sizes // UNIT_NUMEL)
    within = numpy.arange(counts.sum()) - numpy.repeat(counts.cumsum() - counts, counts)
    begins = numpy.array([flat.data_ptr() for _, flat in pieces])
    item_bytes = numpy.array([flat.element_size() for _, flat in pieces])
    firsts = numpy.array([first for first, _ in pieces])
    return numpy.stack(
        [
            numpy.repeat(begins, counts) + within * UNIT_NUMEL * numpy.repeat(item_bytes, counts),
            numpy.minimum(UNIT_NUMEL, numpy.repeat(sizes, counts) - within * UNIT_NUMEL),
            numpy.repeat(firsts, counts) + within,
        ]
    ).astype(numpy.int64)


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _kernel() -> Any:
    from lockstep.replica.unit_norms_kernel import unit_norms

    return unit_norms


def _spelled(dtype: torch.dtype) -> Any:
    from lockstep.replica.unit_norms_kernel import DTYPES

    return DTYPES[str(dtype).removeprefix("torch.")]
