"""The norm of the gradients, computed unit by unit: the same bits however they are split over the workers.

A unit is a run of at most UNIT_NUMEL elements of one parameter. Each worker computes the norms of some units (those of
its part, or its share of all) and leaves them in the units' places of one row of numbers, with zeros elsewhere. Adding
the rows of all workers is exact, and the sum of squares over the whole row is computed alike by everybody.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.comm.shard_tree import run
from lockstep.replica.bucket import is_dense
from lockstep.replica.split import UNIT_NUMEL
from lockstep.replica.unit_norms import Piece, UnitNorms


class Units:
    """The units of all parameters of a model, numbered in their order."""

    def __init__(self, params: Sequence[nn.Parameter], rank: int, size: int) -> None:
        self._first: dict[int, int] = {}
        self._params = params
        total = 0
        for param in params:
            self._first[id(param)] = total
            total += -(-_real(param).numel() // UNIT_NUMEL)
        self.total = total
        self._mine = run(total, size, rank)
        self._norms = UnitNorms()

    def of_whole(self) -> list[Piece]:
        """This worker's share of the units, where every worker has all gradients."""
        begin, end = self._mine
        pieces: list[Piece] = []
        for param in self._params:
            if param.grad is None:
                continue
            first = self._first[id(param)]
            flat = _flat(param.grad, param)
            count = -(-flat.numel() // UNIT_NUMEL)
            low, high = max(begin, first), min(end, first + count)
            if low < high:
                pieces.append((low, flat[(low - first) * UNIT_NUMEL : (high - first) * UNIT_NUMEL]))
        return pieces

    def of_parts(self, parts: Sequence[tuple[nn.Parameter, nn.Parameter, int]]) -> list[Piece]:
        """The units of what this worker owns: parameter, fragment, number of the fragment's first element."""
        return [
            (self._first[id(param)] + offset // UNIT_NUMEL, _real(own.grad).reshape(-1))
            for param, own, offset in parts
            if own.grad is not None
        ]

    def norms(self, pieces: Sequence[Piece], row: Tensor) -> None:
        """Write the norm of each unit into its place of `row`."""
        self._norms.write(pieces, row)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient's elements in the order in which the parameter has them in memory."""
    if not is_dense(param):
        return _real(grad).reshape(-1)
    if grad.stride() != param.stride():
        grad = torch.empty_like(param).copy_(grad)
    grad = _real(grad)
    return grad.view(-1) if grad.is_contiguous() else grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
