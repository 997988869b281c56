"""Embeddings whose gradients are dense and nearly empty: only the rows that a batch has touched travel.

The gradient of a table is as large as the table, and zero but for the rows that were looked up. These are known from
the forward pass. At the end of the pass every worker looks whether its gradient is zero elsewhere, bit by bit; the rows
are then gathered, after one message that says how many, and every worker adds them to its gradient in order of rank:
over shared memory the same bits as if the whole table had been reduced.

A gradient that is not zero elsewhere (the weight is also used in another formula, a hook has changed it, an earlier
step was not cleared), or of which too many rows are touched, is reduced whole in that step, in an extra round, and is
in a bucket like any other from the next one on. Which tables travel as rows is learnt in the first step, in which all
are in buckets; all workers agree on worker 0's.

On CPUs only: a GPU's host would have to wait for the number of rows.

All of it is in this file: `RowsReducer` takes the place of `Reducer` where a model has such tables.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.replica.params import BucketPart
from lockstep.replica.reducer import Reducer
from lockstep.replica.sparse import Rows, gather_rows
from lockstep.torch_private import is_wrapped_by_functorch
from lockstep.weight import Factor
from lockstep.world import World

LEAST_BYTES = 1 << 20
"""Smaller tables are not worth it."""
MOST_SHARE = 4
"""A table travels as rows if all workers together touch at most one in so many of its rows."""
NOWHERE = torch.zeros(0, dtype=torch.int64)


class RowsReducer(Reducer):
    """A reducer that sends the rows of some tables apart from buckets, once a step has shown which."""

    def __init__(self, tables: "dict[int, EmbeddingTable]", *args: Any, **kwargs: Any) -> None:
        self._tables = tables
        """Those that may travel as rows, by the number of the parameter."""
        self.active: set[int] = set()
        """Numbers of the parameters that travel as rows; the same on all workers."""
        self._is_concluded = False
        """Whether the step in flight has come to its end, and not to nothing."""
        super().__init__(*args, **kwargs)
        for part in self._split.parts if self._split is not None else ():
            if (table := tables.get(part.plan.slots[0].index)) is not None:
                table.part = part  # It has a bucket of its own.

    def use_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """A hook is to see all gradients: no table travels as rows from now on."""
        super().use_hook(state, hook)
        self._queue.buckets.make_room_for(self.active)
        self._retire(self.active)
        self._tables.clear()

    def finish(self) -> None:
        """As of any pass; a table with other gradients than rows is late in this step, and in a bucket later."""
        if self._now.has_arrived:
            self._now.late |= {index for index in self.active if not self._tables[index].is_known()}
        super().finish()

    def _travels_apart(self, index: int) -> bool:
        return index in self.active or super()._travels_apart(index)

    def _late_anywhere(self, used: Sequence[bool], *, is_active: bool) -> list[int]:
        # What no worker has used in this step stays as it is; what cannot travel as rows here does not elsewhere.
        everywhere = super()._late_anywhere(used, is_active=is_active)
        indices = [index for index in everywhere if index not in self.active or used[index]]
        retired = self._retire(indices)
        if is_active:
            self._now.late |= {index for index in retired if self.shared.params[index].grad is not None}
        return indices

    def _retire(self, indices: Iterable[int]) -> set[int]:
        """Let these travel as rows no more, on any worker; returns those that did."""
        retired = self.active & set(indices)
        self.active -= retired
        for index in retired:
            self._tables.pop(index).clear()
        return retired

    @torch.no_grad()
    def _exchange_apart(self, used: Sequence[bool], *, is_active: bool) -> None:
        """Add everybody's rows up in the gradients; a worker that is not active has none, and keeps its gradients."""
        indices = [index for index in sorted(self.active) if used[index]]
        if indices:
            self._exchange_rows([self._tables[index] for index in indices], is_active=is_active)
        for index in self.active.difference(indices):
            self._tables[index].clear()
        super()._exchange_apart(used, is_active=is_active)

    def _exchange_rows(self, tables: "Sequence[EmbeddingTable]", *, is_active: bool) -> None:
        weight, observer = self.grad_weight, self.observer
        own = [table.rows if is_active and table.param.grad is not None else NOWHERE for table in tables]
        counts_nothing = isinstance(weight.factor, float) and weight.factor == 0.0  # A part without samples.
        sent = [NOWHERE if counts_nothing else rows for rows in own]
        values = [table.values(rows, weight.factor) for table, rows in zip(tables, sent, strict=True)]
        parts = gather_rows(
            list(zip(sent, values, strict=True)), self._world, self.group, "exchanging rows of embeddings"
        )
        if not is_active:
            return
        for number, (table, rows) in enumerate(zip(tables, own, strict=True)):
            table.add_up(rows, [worker[number] for worker in parts], weight.divisor)
        if observer is not None and observer.is_due(self.step):
            sums = [_added(each) for each in zip(*parts, strict=True)]
            observer.see_rows(values, sums if weight.divisor is None else [each.div_(weight.divisor) for each in sums])

    def _learn_order(self, observed: Sequence[int]) -> None:
        super()._learn_order(observed)
        mine = [index for index, table in self._tables.items() if table.has_few_rows]
        apart = self._world.gather_json(mine)[0]
        self.active.update(apart)
        self._tables = {index: self._tables[index] for index in apart}
        self._queue.buckets.leave_out(apart)

    def _conclude(self, *, is_active: bool) -> None:
        super()._conclude(is_active=is_active)
        self._is_concluded = True

    def _reset(self) -> None:
        if not self._is_concluded:  # The step is void: these gradients go the way of those that are in buckets.
            for index in self.active:
                self.shared.params[index].grad = None
        self._is_concluded = False
        super()._reset()
        for table in self._tables.values():
            table.rows = NOWHERE


class EmbeddingTable:
    """One embedding's weight, and the rows that were looked up in it."""

    def __init__(self, module: nn.Module, param: Tensor, size: int) -> None:
        self.param = param
        self.part: BucketPart | None = None
        """This worker's part of the table, where it is split: rows are added up there, else in `param.grad`."""
        self._most = param.shape[0] // (MOST_SHARE * size)
        self.rows = NOWHERE
        """Those looked up since the last step, in order."""
        hook = module.register_forward_hook(CallObserver(self), prepend=True)
        weakref.finalize(self, hook.remove).atexit = False

    def called(self, indices: Any) -> None:
        """The module has been called; what is looked up by other than plain indices is found to be elsewhere."""
        if type(indices) is Tensor and torch.is_grad_enabled() and not is_wrapped_by_functorch(indices):
            self.rows = torch.unique(torch.cat([self.rows, indices.detach().flatten().long()]))

    @property
    def has_few_rows(self) -> bool:
        """Whether rows were looked up, and few."""
        return 0 < len(self.rows) <= self._most

    @torch.no_grad()
    def is_known(self) -> bool:
        """Whether the gradient, if there is one, is zero outside of rows that are few. Looks at all of it."""
        grad = self.param.grad
        if grad is None:
            return True
        if len(self.rows) > 2 * self._most or grad.layout is not torch.strided or not grad.is_contiguous():
            return False
        bits = grad.detach()
        own = bits.index_select(0, self.rows)
        bits.index_fill_(0, self.rows, 0.0)
        lowest, highest = bits.view(torch.int32).aminmax()  # As bits, in which a NaN is not zero either.
        bits.index_copy_(0, self.rows, own)
        return not lowest and not highest

    def values(self, rows: Tensor, factor: Factor) -> Tensor:
        """These rows of the gradient, times `factor`."""
        grad = self.param.grad
        if grad is None or not len(rows):
            return self.param.new_zeros(0, *self.param.shape[1:])
        return grad.index_select(0, rows).mul_(factor)

    def add_up(self, own: Tensor, parts: Sequence[Rows], divisor: Factor | None) -> None:
        """Let the gradient be the sum of all workers' rows, in order of rank; `own` are those of this worker's."""
        if self.part is None:
            self._add_up_whole(own, parts, divisor)
            return
        self.clear()
        grads = self.part.own_grads
        assert grads is not None
        for rows, values in parts:
            add_to_span(grads, self.part.span.begin, rows, values.view(len(rows), self.param[0].numel()))
        if divisor is not None:
            grads.div_(divisor)

    def _add_up_whole(self, own: Tensor, parts: Sequence[Rows], divisor: Factor | None) -> None:
        grad = self.param.grad
        if grad is None:
            grad = self.param.grad = torch.zeros_like(self.param)
        grad.index_fill_(0, own, 0.0)
        for rows, values in parts:
            grad.index_add_(0, rows, values)
        if divisor is not None:
            rows = torch.unique(torch.cat([rows for rows, _ in parts]))
            grad.index_copy_(0, rows, grad.index_select(0, rows).div_(divisor))

    def clear(self) -> None:
        """No worker has rows in this step: a part is zero, and a whole gradient stays what it is."""
        if self.part is not None:
            assert self.part.own_grads is not None
            self.part.own_grads.zero_()


class CallObserver:
    """Hears of a module's calls. A copy of the module, or one that was saved, has an observer that does nothing."""

    def __init__(self, table: EmbeddingTable | None = None) -> None:
        self._table = weakref.ref(table) if table is not None else None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The module has been called."""
        if torch.compiler.is_compiling() or self._table is None:
            return
        if (table := self._table()) is not None and len(args) == 1:
            table.called(args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return CallObserver, ()


def find_tables(module: nn.Module, params: Sequence[Tensor], world: World) -> dict[int, EmbeddingTable]:
    """Embeddings that may travel as rows, by the number of their weight: large, and no other module's.

    Every worker calls this; all find the same.
    """
    owners: dict[int, list[nn.Module]] = {}
    for each in module.modules():
        for param in each._parameters.values():
            owners.setdefault(id(param), []).append(each)
    found = [
        index
        for index, param in enumerate(params)
        if [type(owner) for owner in owners.get(id(param), [])] == [nn.Embedding]
        and not owners[id(param)][0].sparse
        and type(param) is nn.Parameter
        and param.requires_grad
        and param.device.type == "cpu"
        and param.dtype in (torch.float32, torch.float64)
        and param.is_contiguous()
        and param.numel() * param.itemsize >= LEAST_BYTES
    ]
    common = sorted(set.intersection(*map(set, world.gather_json(found))))
    return {index: EmbeddingTable(owners[id(params[index])][0], params[index], world.size) for index in common}


def _added(parts: Sequence[Rows]) -> Tensor:
    """The sum of everybody's rows, without those that nobody has touched."""
    touched, places = torch.unique(torch.cat([rows for rows, _ in parts]), return_inverse=True)
    values = torch.cat([values for _, values in parts])
    return values.new_zeros(len(touched), *values.shape[1:]).index_add_(0, places, values)


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
