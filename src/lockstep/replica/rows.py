"""Embeddings whose gradients are dense and nearly empty: only the rows that a batch has touched travel.

The gradient of a table is as large as the table, and zero but for the rows that were looked up. Where that is certain,
the rows are gathered at the end of the pass, after one message that says how many, and every worker adds them to its
gradient in order of rank: the same bits as if the whole table had been reduced.

Certain it is if the gradient that arrives is the very memory that the backward of `nn.Embedding` has written, and
nobody has written to it since:

    called      the module is called: from the indices, and the node of autograd's that will compute the gradient
    computed    that node has run: the rows, where its result lies, its version, and a weak reference, so that no
                other tensor can have taken its place in memory
    incoming    a gradient is about to be added to `param.grad`: is it that result, at that version?
    arrived     it has been: then it is `param.grad` itself, or was added to one whose rows are known

A table that is used in any other way (its weight in another formula, called twice in a pass, changed by a hook) has a
gradient that is something else, at another address or version. Then the step reduces it whole, in an extra round, and
from the next one on it is in a bucket like any other; so it is if too many rows are touched. Which tables travel as
rows is learnt in the first step, in which all are in buckets; all workers agree on worker 0's.

On CPUs only: a GPU's host would have to wait for the number of rows.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.replica.bucket import Factor
from lockstep.replica.layout import ALIGNMENT_BYTES
from lockstep.world import World

_Weak: Any = getattr(torch._C, "_WeakTensorRef", None)

LEAST_BYTES = 1 << 20
"""Smaller tables are not worth it."""
MOST_SHARE = 4
"""A table travels as rows if all workers together touch at most one in so many of its rows."""


class Rows:
    """The tables of one replica, and which of them travel as rows."""

    def __init__(self, module: nn.Module, params: Sequence[Tensor], size: int) -> None:
        self._tables = {index: Table(param, size) for index, param in _tables(module, params)}
        by_param = {id(table.param): table for table in self._tables.values()}
        for each in module.modules():
            table = by_param.get(id(each._parameters.get("weight")))
            if table is not None:
                _until_gone(self, each.register_forward_hook(Observer(table)))
        self.active: set[int] = set()
        """Numbers of the parameters that travel as rows; the same on all workers."""

    def learnt(self) -> list[int]:
        """Tables of which this worker has touched few enough rows in the pass that has ended."""
        return [index for index, table in self._tables.items() if table.is_sparse]

    def unknown(self, touched: set[int]) -> set[int]:
        """Those among `touched` that should travel as rows and cannot."""
        return {index for index in self.active & touched if self._tables[index].rows() is None}

    def retire(self, indices: Iterable[int]) -> set[int]:
        """Let these travel as rows no more, on any worker; returns those for which this worker has a gradient."""
        retired = self.active & set(indices)
        self.active -= retired
        return {index for index in retired if self._tables[index].param.grad is not None}

    def forget(self) -> None:
        """The step is over."""
        for table in self._tables.values():
            table.forget()

    @torch.no_grad()
    def exchange(
        self,
        indices: Sequence[int],
        factor: Factor,
        divisor: Factor | None,
        world: World,
        group: dist.ProcessGroup,
        see: Callable[[Sequence[Tensor], Sequence[Tensor]], None] | None,
        *,
        is_active: bool,
    ) -> None:
        """Add everybody's rows up in the gradients of `indices`; called by all workers for the same ones.

        A worker that is not active has none, and keeps its gradients. `see` is told what this worker sent, and sums.
        """
        tables = [self._tables[index] for index in indices]
        mine = [table.rows() if is_active else None for table in tables]
        own = [table.nowhere if rows is None else rows for table, rows in zip(tables, mine, strict=True)]
        counts = torch.zeros(world.size, len(tables), dtype=torch.int64)
        if not (isinstance(factor, float) and factor == 0.0):  # A part without samples counts nothing.
            counts[world.rank] = torch.tensor([len(rows) for rows in own])
        sent = [rows[:count] for rows, count in zip(own, counts[world.rank].tolist(), strict=True)]
        values = [table.values(rows, factor) for table, rows in zip(tables, sent, strict=True)]
        world.wait(dist.all_reduce(counts, group=group, async_op=True), "counting rows of embeddings")
        parts = _gather(sent, values, counts, world, group)
        if not is_active:
            return
        for number, (table, rows) in enumerate(zip(tables, own, strict=True)):
            table.add_up(rows, [worker[number] for worker in parts], divisor)
        if see is not None:
            touched = [torch.unique(torch.cat([rows for rows, _ in each])) for each in zip(*parts, strict=True)]
            see(values, [table.values(rows, 1.0) for table, rows in zip(tables, touched, strict=True)])


class Table:
    """One embedding's weight, and which rows of its gradient are known to be all."""

    def __init__(self, param: Tensor, size: int) -> None:
        self.param = param
        self._most = param.shape[0] // (MOST_SHARE * size)
        self.nowhere = torch.zeros(0, dtype=torch.int64)
        self._computed: list[_Result] = []
        self._incoming: _Result | None = None
        self._known: _Spot | None = None
        """The gradient whose rows are known."""
        self._rows = self.nowhere
        """These."""
        me = weakref.ref(self)
        _until_gone(self, param.register_hook(lambda grad: table._arrive(grad) if (table := me()) else None))
        arrived = param.register_post_accumulate_grad_hook(
            lambda param: table._arrived(param) if (table := me()) else None
        )
        _until_gone(self, arrived)

    def called(self, indices: Tensor, output: Any) -> None:
        """The module has been called."""
        node = output.grad_fn if isinstance(output, Tensor) else None
        if node is not None and node.name() == "EmbeddingBackward0":
            looked_up = indices.detach()
            node.register_hook(lambda grads, _: self._compute(grads[0], looked_up))

    def _compute(self, grad: Tensor | None, looked_up: Tensor) -> None:
        """The backward of a call has written `grad`; the script may use the memory of the indices for others next."""
        self._computed = [result for result in self._computed if not result.spot.is_gone]
        if grad is not None:
            is_few = looked_up.numel() <= self.param.shape[0] // MOST_SHARE
            self._computed.append(_Result(_Spot(grad), torch.unique(looked_up).long() if is_few else None))

    def _arrive(self, grad: Tensor) -> None:
        results, self._computed = [result for result in self._computed if not result.spot.is_gone], []
        is_result = len(results) == 1 and results[0].spot.is_of(grad) and not grad.requires_grad
        self._incoming = results[0] if is_result else None

    def _arrived(self, param: Tensor) -> None:
        result, self._incoming = self._incoming, None
        grad = param.grad
        assert grad is not None
        if result is None or result.rows is None:
            self.forget()
        elif result.spot.is_at(grad):  # It has lived until now, though torch has detached it.
            self._known, self._rows = _Spot(grad), result.rows
        elif self._known is not None and self._known.is_of(grad, later=1) and self._is_alone():
            self._known, self._rows = _Spot(grad), torch.unique(torch.cat([self._rows, result.rows]))
        else:
            self.forget()

    def _is_alone(self) -> bool:
        """Whether nobody else's hook can have changed what was added."""
        return len(self.param._backward_hooks or ()) == 1

    @property
    def is_sparse(self) -> bool:
        """Whether the last gradient's rows are known, and few."""
        return self._known is not None and len(self._rows) <= self._most

    def rows(self) -> Tensor | None:
        """Rows outside of which the gradient is zero, in order; None if that is not known, or they are too many."""
        grad = self.param.grad
        if grad is None:
            return self.nowhere
        is_known = self._known is not None and self._known.is_of(grad)
        return self._rows if is_known and len(self._rows) <= 2 * self._most else None

    def values(self, rows: Tensor, factor: Factor) -> Tensor:
        """These rows of the gradient, times `factor`."""
        grad = self.param.grad
        if grad is None or not len(rows):
            return self.param.new_zeros(0, *self.param.shape[1:])
        return grad.index_select(0, rows).mul_(factor)

    def add_up(self, own: Tensor, parts: Sequence[tuple[Tensor, Tensor]], divisor: Factor | None) -> None:
        """Let the gradient be the sum of everybody's rows, in order of rank; `own` are those it has."""
        grad = self.param.grad
        if grad is None:
            grad = self.param.grad = torch.zeros_like(self.param)
        grad.index_fill_(0, own, 0.0)
        for rows, values in parts:
            grad.index_add_(0, rows, values)
        if divisor is not None:
            rows = torch.unique(torch.cat([rows for rows, _ in parts]))
            grad.index_copy_(0, rows, grad.index_select(0, rows).div_(divisor))

    def forget(self) -> None:
        """Nothing is known of the gradient any more."""
        self._known, self._rows = None, self.nowhere


class Observer:
    """Hears of a module's calls. A copy of the module, or one that was saved, has an observer that does nothing."""

    def __init__(self, table: Table | None = None) -> None:
        self._table = weakref.ref(table) if table is not None else None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The module has been called."""
        if torch.compiler.is_compiling() or self._table is None:
            return
        table = self._table()
        if table is not None and len(args) == 1 and isinstance(args[0], Tensor):
            table.called(args[0], output)

    def __reduce__(self) -> tuple[Any, ...]:
        return Observer, ()


class _Spot:
    """A tensor's memory at a moment: as long as that tensor lives, nothing else can lie there."""

    def __init__(self, tensor: Tensor) -> None:
        self._address, self._version = tensor.data_ptr(), tensor._version
        self._tensor = _Weak(tensor)

    @property
    def is_gone(self) -> bool:
        """Whether the tensor no longer lives."""
        return bool(self._tensor.expired())

    def is_of(self, tensor: Tensor, later: int = 0) -> bool:
        """Whether this is the memory of `tensor`, written to so many times since."""
        return not self.is_gone and self.is_at(tensor, later)

    def is_at(self, tensor: Tensor, later: int = 0) -> bool:
        """The same, for one that is known to have lived until now."""
        return tensor.data_ptr() == self._address and tensor._version == self._version + later


class _Result:
    """What the backward of an embedding has computed, and its rows unless they are many."""

    def __init__(self, spot: _Spot, rows: Tensor | None) -> None:
        self.spot, self.rows = spot, rows


def _until_gone(owner: object, hook: RemovableHandle) -> None:
    """Remove the hook when its owner is gone."""
    weakref.finalize(owner, hook.remove).atexit = False


def _tables(module: nn.Module, params: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """Weights of embeddings, by number, that are large and no other module's."""
    owners: dict[int, list[nn.Module]] = {}
    for each in module.modules():
        for param in each._parameters.values():
            owners.setdefault(id(param), []).append(each)
    return [
        (index, param)
        for index, param in enumerate(params if _Weak is not None else ())
        if [type(owner) for owner in owners.get(id(param), [])] == [nn.Embedding]
        and param.requires_grad
        and param.device.type == "cpu"
        and param.dtype in (torch.float32, torch.float64)
        and param.is_contiguous()
        and param.numel() * param.itemsize >= LEAST_BYTES
    ]


def _gather(
    rows: Sequence[Tensor], values: Sequence[Tensor], counts: Tensor, world: World, group: dist.ProcessGroup
) -> list[list[tuple[Tensor, Tensor]]]:
    """By worker and table: the rows, and their values; all in one message, padded to the longest."""
    shapes = [value.shape[1:] for value in values]
    widths = [shape.numel() * value.itemsize for shape, value in zip(shapes, values, strict=True)]
    cuts = [_cut(per_table, widths) for per_table in counts.tolist()]
    messages = [torch.empty(max(cut[-1][-1] for cut in cuts), dtype=torch.uint8) for _ in cuts]
    own = torch.zeros_like(messages[0])
    for (begin, middle, end, _), row, value in zip(cuts[world.rank], rows, values, strict=True):
        own[begin:middle].view(torch.int64).copy_(row)
        own[middle:end].view(value.dtype).copy_(value.view(-1))
    if len(own):
        world.wait(dist.all_gather(messages, own, group=group, async_op=True), "exchanging rows of embeddings")
    return [
        [
            (message[begin:middle].view(torch.int64), message[middle:end].view(value.dtype).view(-1, *shape))
            for (begin, middle, end, _), value, shape in zip(cut, values, shapes, strict=True)
        ]
        for message, cut in zip(messages, cuts, strict=True)
    ]


def _cut(counts: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Where each table's rows begin in a message, where its values begin and end, and where the next table's begin."""
    cuts, begin = [], 0
    for count, width in zip(counts, widths, strict=True):
        middle, end = begin + count * 8, begin + count * (8 + width)
        following = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        cuts.append((begin, middle, end, following))
        begin = following
    return cuts
