"""Embeddings whose gradients are dense and nearly empty: only the rows that a batch has touched travel.

The gradient of a table is as large as the table, and zero but for the rows that were looked up. Where that is certain,
the rows are gathered at the end of the pass, after one message that says how many, and every worker adds them to its
gradient in order of rank: over shared memory the same bits as if the whole table had been reduced.

Certain it is if the gradient that arrives is the very memory that the backward of `nn.Embedding` has written, and
nobody has written to it since:

    called      the module is called: from the indices, and the node of autograd's that will compute the gradient of
                this very parameter
    computed    that node has run: the rows, where its result lies, its version, and a weak reference, so that no
                other tensor can have taken its place in memory
    incoming    a gradient is about to be added to `param.grad`: is it that result, at that version? Its storage is
                held until it has been, so that nothing else can be mistaken for it
    arrived     it is `param.grad` itself; or it was added to one whose rows are known, and then the sum is searched
                for others before it is believed, since the script may do anything between two passes

A table that is used in any other way (its weight in another formula, a forward of its own, called twice in a pass) has
a gradient that is something else, at another address or version. With hooks on the parameter nothing is believed,
since they can write by ways that bump no version; and a sample of the other rows is looked at in every step. Then the
step reduces the table whole, in an extra round, and from the next one on it is in a bucket like any other; so it is if
too many rows are touched. Which tables travel as rows is learnt in the first step, in which all are in buckets; all
workers agree on worker 0's.

On CPUs only: a GPU's host would have to wait for the number of rows.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lockstep.comm.shm.work import waited_for
from lockstep.replica.arrivals import is_only_ours, ours
from lockstep.replica.bucket import Factor
from lockstep.replica.layout import ALIGNMENT_BYTES
from lockstep.replica.part import Part
from lockstep.replica.row_sums import PartSum, RowsAndValues, RowSum, WholeSum
from lockstep.world import World

_Weak: Any = getattr(torch._C, "_WeakTensorRef", None)

LEAST_BYTES = 1 << 20
"""Smaller tables are not worth it."""
MOST_SHARE = 4
"""A table travels as rows if all workers together touch at most one in so many of its rows."""
NUM_PROBES = 64
"""In so many places, evenly spaced, a gradient is looked at for rows that should not be there."""
_FORWARD = nn.Embedding.forward


class Rows:
    """The tables of one replica, and which of them travel as rows."""

    def __init__(self, module: nn.Module, params: Sequence[Tensor], world: World) -> None:
        found = dict(_tables(module, params))
        common = set.intersection(*map(set, world.gather(list(found))))
        self._tables = {index: Table(*found[index], world.size) for index in sorted(common)}
        self.active: set[int] = set()
        """Numbers of the parameters that travel as rows; the same on all workers."""

    @property
    def tables(self) -> set[int]:
        """Numbers of the parameters that may travel as rows."""
        return set(self._tables)

    def split(self, parts: Iterable[Part]) -> None:
        """Add rows up in these parts, of which a table has one of its own."""
        for part in parts:
            if (table := self._tables.get(part.plan.slots[0].index)) is not None:
                table.sum = PartSum(part, table.param[0].numel())

    def learnt(self) -> list[int]:
        """Tables of which this worker has touched few enough rows in the pass that has ended."""
        return [index for index, table in self._tables.items() if table.has_few_rows]

    def adopt(self, indices: Iterable[int]) -> None:
        """Let these travel as rows from now on, and no others ever."""
        self.active.update(indices)
        self._tables = {index: table for index, table in self._tables.items() if index in self.active}

    def unknown(self) -> set[int]:
        """Those that should travel as rows, and have a gradient here that cannot."""
        return {index for index in self.active if not self._tables[index].is_known()}

    def retire(self, indices: Iterable[int]) -> set[int]:
        """Let these travel as rows no more, on any worker; returns those for which this worker has a gradient."""
        retired = self.active & set(indices)
        self.active -= retired
        tables = {index: self._tables.pop(index) for index in retired}
        for table in tables.values():
            table.sum.clear()
        return {index for index, table in tables.items() if table.param.grad is not None}

    def clear(self, indices: Iterable[int]) -> None:
        """Nobody has a gradient for these in this step."""
        for index in indices:
            self._tables[index].sum.clear()

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

        None of them is `unknown`. A worker that is not active has no rows, and keeps its gradients. `see` is told what
        this worker sent, and sums.
        """
        tables = [self._tables[index] for index in indices]
        own = [table.known_rows() if is_active else table.nowhere for table in tables]
        counts = torch.zeros(world.size, len(tables), dtype=torch.int64)
        if not (isinstance(factor, float) and factor == 0.0):  # A part without samples counts nothing.
            counts[world.rank] = torch.tensor([len(rows) for rows in own])
        sent = [rows[:count] for rows, count in zip(own, counts[world.rank].tolist(), strict=True)]
        values = [table.values(rows, factor) for table, rows in zip(tables, sent, strict=True)]
        with waited_for():
            work = dist.all_reduce(counts, group=group, async_op=True)
        world.wait(work, "counting rows of embeddings")
        parts = _gather(sent, values, counts, world, group)
        if not is_active:
            return
        for number, (table, rows) in enumerate(zip(tables, own, strict=True)):
            table.sum.take(rows, [worker[number] for worker in parts], divisor)
        if see is not None:
            sums = [_added(each) for each in zip(*parts, strict=True)]
            see(values, sums if divisor is None else [total.div_(divisor) for total in sums])


class Table:
    """One embedding's weight, and which rows of its gradient are known to be all."""

    def __init__(self, module: nn.Module, param: Tensor, size: int) -> None:
        self.param = param
        self.sum: RowSum = WholeSum(param)
        """Where everybody's rows are added up."""
        self._most = param.shape[0] // (MOST_SHARE * size)
        self._spacing = -(-param.shape[0] // NUM_PROBES)
        self.nowhere = torch.zeros(0, dtype=torch.int64)
        self._computed: list[_Result] = []
        self._incoming: _Incoming | None = None
        self._known: _Spot | None = None
        """The gradient whose rows are known, as it was when it arrived."""
        self._rows: Tensor | None = None
        """These."""
        self._is_sum = False
        """Whether it is what several passes have added up."""
        me = weakref.ref(self)

        @ours
        def expect(grad: Tensor) -> None:
            if (table := me()) is not None:
                table._expect(grad)

        @ours
        def arrived(param: Tensor) -> None:
            if (table := me()) is not None:
                table._arrived(param)

        _until_gone(self, module.register_forward_hook(Observer(self), prepend=True))
        _until_gone(self, param.register_hook(expect))
        _until_gone(self, param.register_post_accumulate_grad_hook(arrived))

    def called(self, module: nn.Module, indices: Any, output: Any) -> None:
        """The module has been called; what is not just a lookup in this parameter is not heard of."""
        if type(indices) is not Tensor or type(output) is not Tensor or output.grad_fn is None:
            return
        node = output.grad_fn
        if node.name() != "EmbeddingBackward0" or "forward" in vars(module) or nn.Embedding.forward is not _FORWARD:
            return
        if getattr(node.next_functions[0][0], "variable", None) is self.param:
            looked_up = indices.detach()
            node.register_hook(lambda grads, _: self._compute(grads[0], looked_up))

    def _compute(self, grad: Any, looked_up: Tensor) -> None:
        """The backward of a call has written `grad`; the script may use the memory of the indices for others next."""
        self._computed = [result for result in self._computed if not result.spot.is_gone]
        if type(grad) is Tensor and _has_address(grad):
            is_few = looked_up.numel() <= self.param.shape[0] // MOST_SHARE
            self._computed.append(_Result(_Spot(grad), torch.unique(looked_up).long() if is_few else None))

    def _expect(self, grad: Tensor) -> None:
        results, self._computed = [result for result in self._computed if not result.spot.is_gone], []
        self._incoming = None
        if len(results) == 1 and _has_address(grad) and results[0].spot.is_of(grad) and results[0].rows is not None:
            self._incoming = _Incoming(results[0].rows, grad.untyped_storage(), grad._version)

    def _arrived(self, param: Tensor) -> None:
        incoming, self._incoming = self._incoming, None
        grad = param.grad  # None where a hook of the script's own has used it up.
        if incoming is None or grad is None or not is_only_ours(self.param) or not _has_address(grad):
            self.forget()
        elif incoming.is_in(grad):
            self._known, self._rows, self._is_sum = _Spot(grad), incoming.rows, False
        elif self._rows is not None:
            self._rows, self._is_sum = torch.unique(torch.cat([self._rows, incoming.rows])), True
        else:
            self.forget()

    @property
    def has_few_rows(self) -> bool:
        """Whether the last gradient's rows are known, and few."""
        return self._rows is not None and len(self._rows) <= self._most

    def is_known(self) -> bool:
        """Whether the gradient, if there is one, is known to be zero outside of rows that are few. Looks at it."""
        grad = self.param.grad
        if grad is None:
            return True
        if self._rows is None or len(self._rows) > 2 * self._most:
            return False
        spacing = self._spacing
        if self._is_sum:  # Between passes the script may have written to it: every row is looked at.
            self._known, self._is_sum, spacing = _Spot(grad), False, 1
        return self._known is not None and self._known.is_of(grad) and self._is_zero_beside(grad, spacing)

    def known_rows(self) -> Tensor:
        """Those rows, in order."""
        if self.param.grad is None:
            return self.nowhere
        assert self._rows is not None, "only what is known travels as rows"
        return self._rows

    def _is_zero_beside(self, grad: Tensor, spacing: int) -> bool:
        """Whether every `spacing`th row is zero but for those that were touched."""
        assert self._rows is not None
        touched = self._rows if spacing == 1 else self._rows[self._rows % spacing == 0]
        return bool(grad[::spacing].count_nonzero() == grad.index_select(0, touched).count_nonzero())

    def values(self, rows: Tensor, factor: Factor) -> Tensor:
        """These rows of the gradient, times `factor`."""
        grad = self.param.grad
        if grad is None or not len(rows):
            return self.param.new_zeros(0, *self.param.shape[1:])
        return grad.index_select(0, rows).mul_(factor)

    def forget(self) -> None:
        """Nothing is known of the gradient any more."""
        self._known, self._rows, self._is_sum = None, None, False


class Observer:
    """Hears of a module's calls. A copy of the module, or one that was saved, has an observer that does nothing."""

    def __init__(self, table: Table | None = None) -> None:
        self._table = weakref.ref(table) if table is not None else None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The module has been called."""
        if torch.compiler.is_compiling() or self._table is None:
            return
        table = self._table()
        if table is not None and len(args) == 1:
            table.called(module, args[0], output)

    def __reduce__(self) -> tuple[Any, ...]:
        return Observer, ()


class _Spot:
    """A tensor's memory at a moment: as long as that tensor lives, nothing else can lie there."""

    def __init__(self, tensor: Tensor) -> None:
        self._address, self._version = tensor.data_ptr(), tensor._version
        self._shape, self._strides = tensor.shape, tensor.stride()
        self._tensor = _Weak(tensor)

    @property
    def is_gone(self) -> bool:
        """Whether the tensor no longer lives."""
        return bool(self._tensor.expired())

    def is_of(self, tensor: Tensor) -> bool:
        """Whether this is the memory of `tensor`, not written to since."""
        is_there = tensor.data_ptr() == self._address and tensor._version == self._version and not self.is_gone
        return is_there and tensor.shape == self._shape and tensor.stride() == self._strides


class _Result:
    """What the backward of an embedding has computed, and its rows unless they are many."""

    def __init__(self, spot: _Spot, rows: Tensor | None) -> None:
        self.spot, self.rows = spot, rows


class _Incoming:
    """A result that is about to be added to `param.grad`, by torch, which may take it as it is. Holds its memory."""

    def __init__(self, rows: Tensor, storage: torch.UntypedStorage, version: int) -> None:
        self.rows, self._storage, self._version = rows, storage, version

    def is_in(self, grad: Tensor) -> bool:
        """Whether `grad` is that result, not written to since."""
        return grad.untyped_storage()._cdata == self._storage._cdata and grad._version == self._version


def _has_address(grad: Tensor) -> bool:
    """Whether it is an ordinary tensor, of which it can be said where it lies and how often it was written to."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(grad)
    return grad.layout is torch.strided and not is_wrapped and not grad.is_inference() and not grad.requires_grad


def _until_gone(owner: object, hook: RemovableHandle) -> None:
    """Remove the hook when its owner is gone."""
    weakref.finalize(owner, hook.remove).atexit = False


def _tables(module: nn.Module, params: Sequence[Tensor]) -> list[tuple[int, tuple[nn.Module, Tensor]]]:
    """Embeddings and their weights, by number, that are large and no other module's."""
    owners: dict[int, list[nn.Module]] = {}
    for each in module.modules():
        for param in each._parameters.values():
            owners.setdefault(id(param), []).append(each)
    return [
        (index, (owners[id(param)][0], param))
        for index, param in enumerate(params if _Weak is not None else ())
        if [type(owner) for owner in owners.get(id(param), [])] == [nn.Embedding]
        and not owners[id(param)][0].sparse
        and type(param) is nn.Parameter
        and param.requires_grad
        and param.device.type == "cpu"
        and param.dtype in (torch.float32, torch.float64)
        and param.is_contiguous()
        and param.numel() * param.itemsize >= LEAST_BYTES
    ]


def _gather(
    rows: Sequence[Tensor], values: Sequence[Tensor], counts: Tensor, world: World, group: dist.ProcessGroup
) -> list[list[RowsAndValues]]:
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
        with waited_for():
            work = dist.all_gather(messages, own, group=group, async_op=True)
        world.wait(work, "exchanging rows of embeddings")
    return [
        [
            (message[begin:middle].view(torch.int64), message[middle:end].view(value.dtype).view(-1, *shape))
            for (begin, middle, end, _), value, shape in zip(cut, values, shapes, strict=True)
        ]
        for message, cut in zip(messages, cuts, strict=True)
    ]


def _added(parts: Sequence[RowsAndValues]) -> Tensor:
    """The sum of everybody's rows, without those that nobody has touched."""
    touched, places = torch.unique(torch.cat([rows for rows, _ in parts]), return_inverse=True)
    values = torch.cat([values for _, values in parts])
    return values.new_zeros(len(touched), *values.shape[1:]).index_add_(0, places, values)


def _cut(counts: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Where each table's rows begin in a message, where its values begin and end, and where the next table's begin."""
    cuts, begin = [], 0
    for count, width in zip(counts, widths, strict=True):
        middle, end = begin + count * 8, begin + count * (8 + width)
        following = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        cuts.append((begin, middle, end, following))
        begin = following
    return cuts
