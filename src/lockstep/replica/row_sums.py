"""Where the rows of an embedding's gradient are added up: in the gradient itself, or in the part that a worker owns.

A part is a span of the flat table, and may begin and end within a row.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lockstep.replica.bucket import Factor
from lockstep.replica.part import Part

RowsAndValues = tuple[Tensor, Tensor]
"""Numbers of rows, in order, and what is in them."""


class RowSum(Protocol):
    """The sum of one table."""

    def take(self, own: Tensor, parts: Sequence[RowsAndValues], divisor: Factor | None) -> None:
        """Let it be the sum of everybody's rows, in order of rank; `own` are those of this worker's own gradient."""

    def clear(self) -> None:
        """Nobody's rows are in it."""


class WholeSum:
    """All of it, as the gradient of the parameter."""

    def __init__(self, param: Tensor) -> None:
        self._param = param

    def take(self, own: Tensor, parts: Sequence[RowsAndValues], divisor: Factor | None) -> None:
        """See RowSum."""
        grad = self._param.grad
        if grad is None:
            grad = self._param.grad = torch.zeros_like(self._param)
        grad.index_fill_(0, own, 0.0)
        for rows, values in parts:
            grad.index_add_(0, rows, values)
        if divisor is not None:
            rows = torch.unique(torch.cat([rows for rows, _ in parts]))
            grad.index_copy_(0, rows, grad.index_select(0, rows).div_(divisor))

    def clear(self) -> None:
        """Nothing: the gradient stays what it is, and there is none if nobody has one."""


class PartSum:
    """This worker's part of it, where the reduction would leave it."""

    def __init__(self, part: Part, width: int) -> None:
        self._part = part
        self._width = width
        """Elements in a row."""

    def take(self, own: Tensor, parts: Sequence[RowsAndValues], divisor: Factor | None) -> None:
        """See RowSum."""
        self.clear()
        grads = self._part.own_grads
        assert grads is not None
        for rows, values in parts:
            add_to_span(grads, self._part.span.begin, rows, values.view(len(rows), self._width))
        if divisor is not None:
            grads.div_(divisor)

    def clear(self) -> None:
        """See RowSum."""
        assert self._part.own_grads is not None
        self._part.own_grads.zero_()


def add_to_span(span: Tensor, begin: int, rows: Tensor, values: Tensor) -> None:
    """Add to `span`, which is a table from its element number `begin` on, those of `rows` that lie in it.

    The span is empty, or holds at least one whole row.
    """
    if not len(span):
        return
    width = values.shape[1]
    first, end = -(-begin // width), (begin + len(span)) // width
    head = first * width - begin
    low, high = torch.searchsorted(rows, torch.tensor([first, end])).tolist()
    whole = span[head : head + (end - first) * width].view(-1, width)
    whole.index_add_(0, rows[low:high] - first, values[low:high])
    if head and low and rows[low - 1] == first - 1:
        span[:head].add_(values[low - 1, width - head :])
    tail = len(span) - head - len(whole) * width
    if tail and high < len(rows) and rows[high] == end:
        span[len(span) - tail :].add_(values[high, :tail])
