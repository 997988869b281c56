"""How the buckets of all workers are added. Chosen once, when a model is wrapped; a placement owns it.

    FastReduction    whatever the backend does best
    HybridReduction  the same among those who split, then among those who own the same part
    TreeReduction    along the tree over the shards: the same bits on any number of workers
    CodedReduction   encoded by a wire while they travel: see wire/reduction.py
    HookReduction    by a user's own function, in the form of torch DDP's communication hooks

`Partials` are the gradients of the shards that this worker has done already, added along the same tree while the others
are still to come. A placement says what becomes of the sums.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.group import all_reduce, moves_parts, reduce_scatter
from lockstep.comm.tree import Node, Ordered, ShardTree
from lockstep.errors import UsageError
from lockstep.replica.bucket import Bucket
from lockstep.replica.layout import BucketPlan, FlatSpan, are_equal, equal_spans, memory_order, unit_spans
from lockstep.torch_private import foreach_, is_future
from lockstep.wire.protocol import BucketShape, Piece
from lockstep.wire.reduction import WireReduction


class BucketReduction:
    """Adds buckets. As it is, every worker gets sums whole, and nothing is scattered."""

    num_lanes = 1
    """As many sums does a worker send of each bucket."""
    num_parts = 1
    """Into how many equal parts a bucket must fall where gradients are split."""
    part_grain = 1
    """Each of them is a multiple of so many elements."""
    sends_tail_apart = True
    """Whether the notes must be in a bucket of their own."""
    is_waited_for = True
    """Whether what `all_reduce` returns is the backend's own work, which a thread that waits for it may carry out."""

    def all_reduce(self, bucket: Bucket) -> Any:
        """Start adding; every worker gets the whole sum in the bucket. Returns what to wait for."""
        raise NotImplementedError

    def release(self) -> None:
        """Let go of the group."""
        raise NotImplementedError

    def cut(self, plan: BucketPlan, size: int) -> list[FlatSpan]:
        """Which span of a bucket each worker owns, where an optimizer may have any: of whole units, as norms count."""
        return unit_spans(plan, size)

    def scatters(self, spans: Sequence[FlatSpan]) -> bool:
        """Whether `reduce_scatter` can be had for such spans."""
        return False

    def reduce_scatter(self, bucket: Bucket, spans: Sequence[FlatSpan], out: Tensor) -> Any:
        """Start adding; every worker gets the sum of its span in `out`. Returns what to wait for."""
        raise NotImplementedError


class FastReduction(BucketReduction):
    """The backend's own reductions."""

    sends_tail_apart = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._moves_parts = moves_parts(group)
        self.num_parts = group.size()

    def cut(self, plan: BucketPlan, size: int) -> list[FlatSpan]:
        """Equal ones."""
        return equal_spans(plan, size)

    def scatters(self, spans: Sequence[FlatSpan]) -> bool:
        """Where the backend can, and only equal ones."""
        return self._moves_parts and are_equal(spans)

    def all_reduce(self, bucket: Bucket) -> Any:
        """See BucketReduction."""
        return all_reduce(bucket.flat, self._group)

    def reduce_scatter(self, bucket: Bucket, spans: Sequence[FlatSpan], out: Tensor) -> Any:
        """See BucketReduction."""
        return reduce_scatter(out, bucket.flat, self._group)

    def release(self) -> None:
        """Let go of the group."""
        del self._group


class HybridReduction(FastReduction):
    """Where state is split over some of the workers, and the others have copies of it: scattered, then added."""

    is_waited_for = False  # The second half begins when the first has ended.

    def __init__(self, group: dist.ProcessGroup, split: dist.ProcessGroup, replicas: dist.ProcessGroup) -> None:
        super().__init__(group)
        self._split, self._replicas = split, replicas
        self.num_parts = split.size()
        self._scattered: deque[_ThenAdded] = deque()

    def reduce_scatter(self, bucket: Bucket, spans: Sequence[FlatSpan], out: Tensor) -> Any:
        """See BucketReduction."""
        first = reduce_scatter(out, bucket.flat, self._split)
        return _ThenAdded(first, partial(all_reduce, out, self._replicas), self._scattered, out.device)

    def release(self) -> None:
        """Let go of the groups."""
        super().release()
        del self._split, self._replicas


class _ThenAdded:
    """A reduce-scatter, and the sum of what it leaves over other workers, as one operation.

    scattered: those whose second half has not begun. They begin in the order of the buckets, which is the same on all
    workers, whichever is waited for first.
    """

    def __init__(
        self, first: Any, add: Callable[[], Any], scattered: "deque[_ThenAdded]", device: torch.device
    ) -> None:
        self._first, self._add, self._scattered = first, add, scattered
        self._second: Any = None
        self._has_failed = False
        if device.type == "cuda":  # All is queued at once, beside what computes.
            with torch.cuda.stream(torch.cuda.Stream(device)):
                first.wait()
                self._second = add()
        else:
            scattered.append(self)

    def is_completed(self) -> bool:
        """Whether both have ended, well or badly."""
        return self._has_failed or (self._second is not None and bool(self._second.is_completed()))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the sums are there; on a GPU the current stream waits."""
        limits = () if timeout is None else (timeout,)
        while self._second is None:
            oldest = self._scattered[0]
            try:
                oldest._first.wait(*limits)
            except RuntimeError:
                self._has_failed = bool(oldest._first.is_completed())
                raise
            oldest._second = oldest._add()
            self._scattered.popleft()
        return bool(self._second.wait(*limits))


class TreeReduction(BucketReduction):
    """Along the tree over the shards."""

    sends_tail_apart = False

    def __init__(self, ordered: Ordered) -> None:
        self._ordered = ordered
        self.num_lanes = ordered.tree.lanes

    def scatters(self, spans: Sequence[FlatSpan]) -> bool:
        """Always."""
        return True

    def all_reduce(self, bucket: Bucket) -> Any:
        """See BucketReduction."""
        return self._ordered.all_reduce(bucket.lanes)

    def reduce_scatter(self, bucket: Bucket, spans: Sequence[FlatSpan], out: Tensor) -> Any:
        """See BucketReduction."""
        return self._ordered.reduce_scatter(bucket.lanes, [(span.begin, span.end) for span in spans], out)

    def release(self) -> None:
        """Let go of the group."""
        self._ordered.release()


class CodedReduction(BucketReduction):
    """By wires; where gradients are split, what comes back is this worker's part alone."""

    def __init__(
        self, wire: WireReduction, names: Sequence[str], group: dist.ProcessGroup, *, keeps_units: bool
    ) -> None:
        """`keeps_units`: gradients are cut between whole units of tensors, into parts that are not equal."""
        self.wire = wire
        """What the wires remember and count."""
        self._names, self._rank, self._keeps_units = names, group.rank(), keeps_units
        if not keeps_units:
            self.num_parts, self.part_grain = group.size(), wire.part_grain

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """These are the buckets from now on."""
        self.wire.adopt({bucket.place: shape_of(bucket, self._names) for bucket in buckets if bucket.indices})

    def all_reduce(self, bucket: Bucket) -> Any:
        """See BucketReduction."""
        return self.wire.all_reduce(bucket.place, bucket.flat_grads if bucket.indices else bucket.flat)

    def cut(self, plan: BucketPlan, size: int) -> list[FlatSpan]:
        """Equal ones, where nobody counts by units."""
        return super().cut(plan, size) if self._keeps_units else equal_spans(plan, size)

    def scatters(self, spans: Sequence[FlatSpan]) -> bool:
        """Only equal ones."""
        return not self._keeps_units and are_equal(spans)

    def reduce_scatter(self, bucket: Bucket, spans: Sequence[FlatSpan], out: Tensor) -> Any:
        """See BucketReduction."""
        own = spans[self._rank]
        return self.wire.reduce_scatter(bucket.place, bucket.flat_grads, slice(own.begin, own.end), out)

    def release(self) -> None:
        """Let go of the group."""
        self.wire.release()


def shape_of(bucket: Bucket, names: Sequence[str]) -> BucketShape:
    """What a wire needs to know of a bucket."""
    pieces = []
    for slot, param in zip(bucket.plan.slots, bucket.params, strict=True):
        # Sizes in the order of memory, so that matrices are seen as such; complex numbers have two reals each.
        shape = tuple(param.shape[dim] for dim in memory_order(slot.strides)) + ((2,) if param.is_complex() else ())
        pieces.append(Piece(names[slot.index], slot.offset, shape))
    return BucketShape(bucket.plan.tail_offset, tuple(pieces), bucket.plan.dtype, bucket.plan.device)


class HookReduction(BucketReduction):
    """By a function of the user's:

        def hook(state, bucket):                   # bucket.buffer() is the flat gradient tensor
            ...
            return future                          # a torch Future of the averaged tensor, or that tensor

    It gets gradients multiplied by this worker's weight over the mean weight, so that a plain average over the workers,
    as torch's own hooks compute it, gives the exact result. It is called for buckets in the same order on all workers.
    Weights and marks travel apart from the hook.
    """

    is_waited_for = False  # By a future, which may be of anything.

    def __init__(self, state: object, hook: Callable[[Any, Any], Any], group: dist.ProcessGroup) -> None:
        self._state, self._hook, self._group = state, hook, group

    def all_reduce(self, bucket: Bucket) -> Any:
        """Start the hook on a bucket with gradients."""
        if not bucket.indices:
            return all_reduce(bucket.flat, self._group)
        bucket.flat_grads.mul_(self._group.size())
        return _HookWork(self._hook(self._state, HookBucket(bucket)), bucket)

    def release(self) -> None:
        """Let go of the group."""
        del self._group


class HookBucket:
    """What a communication hook sees: the methods of torch's GradBucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def index(self) -> int:
        """Number in the launch order."""
        return self._bucket.place

    def buffer(self) -> Tensor:
        """The flat gradients."""
        return self._bucket.flat_grads

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the flat gradients' values."""
        self._bucket.flat_grads.copy_(tensor)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of their slots."""
        return list(self._bucket.params)

    def gradients(self) -> list[Tensor]:
        """Their gradients, as views of the buffer."""
        return list(self._bucket.views)

    def is_last(self) -> bool:
        """Whether no other bucket with gradients follows."""
        return self._bucket.plan.is_last


class _HookWork:
    """What a hook has returned, in the form of a torch.distributed operation: so waiting for it has a deadline."""

    def __init__(self, result: Any, bucket: Bucket) -> None:
        self._result, self._bucket = result, bucket

    def is_completed(self) -> bool:
        """Whether the result is there, or an error is."""
        return not is_future(self._result) or bool(self._result.done())

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Bring what the hook made of the bucket back into it; on a GPU the current stream waits, and copies."""
        give_up = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while give_up is not None and not self.is_completed():
            if time.monotonic() > give_up:
                raise RuntimeError("Operation timed out!")
            time.sleep(0.0001)
        result = self._result.wait() if is_future(self._result) else self._result
        if isinstance(result, list | tuple) and len(result) == 1:
            result = result[0]
        grads = self._bucket.flat_grads
        if not isinstance(result, Tensor) or result.numel() != grads.numel():
            raise UsageError(
                "a communication hook must return a tensor like bucket.buffer(), or a Future of one; "
                f"got {type(result).__name__}."
            )
        if result.data_ptr() != grads.data_ptr():
            grads.copy_(result.view_as(grads))
        return True


Grads = dict[int, Tensor]
"""Of the parameters that have one, by number."""


class Partials:
    """What one worker has added up of the step in flight: sums of the nodes of the tree that it has done.

    A worker runs its shards in order, and only the last one's backward pass sends. The gradients of each of the others
    are taken from the parameters when its pass has ended:

        take, add  a shard is done: its gradients, alone or added to those of the other half of its node
        complete   a bucket has the gradients of the last shard: add the rest of its node; other roots go into lanes
        total      on a lone worker, whose last shard is done: everything, as gradients of the parameters

    At any time there are at most log2(shards) + 1 sets of gradients. A parameter that a shard did not use counts as
    zero, everywhere: adding nothing would keep the sign of a negative zero, and so another bit than adding zero.
    """

    def __init__(self, tree: ShardTree, rank: int, dtype: torch.dtype | None = None) -> None:
        """`dtype`: what real gradients and every sum of them are rounded to; None for their own."""
        self.tree = tree
        self._rank, self._dtype = rank, dtype
        self._stack: list[tuple[Node, Grads]] = []
        """Sums of nodes, in the order of the shards."""

    def take(self, shard: int, params: Sequence[Tensor]) -> None:
        """The backward pass of `shard` has ended: take the gradients off the parameters."""
        grads: Grads = {}
        for index, param in enumerate(params):
            if (grad := param.grad) is not None:
                grad = grad.detach() if grad.requires_grad else grad
                grad = grad.to_dense() if grad.layout is not torch.strided else grad
                grads[index] = grad.to(self._dtype) if self._dtype and grad.is_floating_point() else grad
                param.grad = None
        self.add(shard, grads)

    def add(self, shard: int, grads: Grads) -> None:
        """`shard` is done, and these are its gradients, which may be changed from now on."""
        node = (shard, shard + 1)
        while self._stack and self.tree.are_halves(self._stack[-1][0], node):
            left, others = self._stack.pop()
            node, grads = (left[0], node[1]), _added(others, grads)
        self._stack.append((node, grads))

    def complete(self, bucket: Bucket) -> None:
        """`bucket` has the gradients of the last shard: let its lanes hold this worker's roots."""
        _, end = self.tree.runs[self._rank]
        node = (end - 1, end)
        rest = list(self._stack)
        while rest and self.tree.are_halves(rest[-1][0], node):
            left, grads = rest.pop()
            _add_to(bucket.views, bucket.indices, grads)
            node = (left[0], node[1])
        for number, (_, grads) in enumerate(rest):
            views = bucket.views_of_lane(self.tree.lane(self._rank, number))
            for index, view in zip(bucket.indices, views, strict=True):
                if index in grads:
                    view.copy_(grads[index])
                else:
                    view.zero_()

    @property
    def roots(self) -> list[Grads]:
        """What this worker has to send, once all its shards are done: by lane, from the first that it uses."""
        return [grads for _, grads in self._stack]

    def total(self, shard: int, params: Sequence[Tensor]) -> None:
        """`shard`, the last of all, is done on a lone worker: give the parameters the sums over all shards."""
        is_plain = self._dtype is None and not any(param.grad is not None and param.grad.is_sparse for param in params)
        if not self._stack and is_plain:
            return  # They have them.
        self.take(shard, params)
        ((_, grads),) = self._stack
        for index, grad in grads.items():
            params[index].grad = grad.to(params[index].dtype)
        self.clear()

    def clear(self) -> None:
        """The step is over."""
        self._stack.clear()


def _added(left: Grads, right: Grads) -> Grads:
    both = [index for index in left if index in right]
    if both:
        foreach_("add", [left[index] for index in both], [right[index] for index in both])
    alone = [grads[index] for grads, other in ((left, right), (right, left)) for index in grads if index not in other]
    if alone:
        foreach_("add", alone, 0.0)
    return {**right, **left}


def _add_to(views: Sequence[Tensor], indices: Sequence[int], grads: Grads) -> None:
    present = [number for number, index in enumerate(indices) if index in grads]
    if present:
        foreach_("add", [views[number] for number in present], [grads[indices[number]] for number in present])
    absent = [view for view, index in zip(views, indices, strict=True) if index not in grads]
    if absent:
        foreach_("add", absent, 0.0)
