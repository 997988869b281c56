"""What each worker keeps of gradients and parameters: all, or its part. Chosen once, when a model is wrapped.

    Whole    all-reduce; every worker has every gradient, as `param.grad`
    Split    reduce-scatter; every worker has the gradients of its part, on the fragments that its optimizer sees

The reducer decides when a bucket travels; a placement decides how, and who gets what of it.
"""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.memory import Memory
from lockstep.comm.shm.work import waited_for
from lockstep.replica import allocator
from lockstep.replica.bucket import Bucket, Factor
from lockstep.replica.elementwise import Grain
from lockstep.replica.flat_params import FlatParams
from lockstep.replica.layout import BucketPlan
from lockstep.replica.meta import Materials
from lockstep.replica.part import Part, cut_out
from lockstep.replica.precision import Precision
from lockstep.replica.reduction import BucketReduction
from lockstep.replica.split import Span, whole_tensor_spans
from lockstep.world import World


class Placement(Protocol):
    """How buckets travel, and what becomes of them."""

    memory: Memory
    """Where buckets lie."""
    reduction: BucketReduction
    """How they are added."""
    num_parts: int
    """Into how many equal parts a bucket must fall."""
    is_fixed: bool
    """Whether parameters keep the places they were first given."""
    device: torch.device
    """Where parameters are put that are nowhere yet."""
    grads_dtype: torch.dtype | None
    """In which gradients travel; None for that of their parameters."""
    tail_cap_bytes: int
    """Most bytes of a bucket that carries the notes besides its gradients."""
    blocks: Sequence[int]
    """For each parameter the block whose bucket it must be in, -1 for none; empty if there are no blocks."""

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """These are the buckets from now on."""

    def begin(self) -> None:
        """A synchronised pass begins."""

    def send(self, bucket: Bucket) -> Any:
        """Start the reduction of a bucket; returns what to wait for."""

    def settle(self, bucket: Bucket) -> None:
        """The reduction of a bucket is over, and its memory about to be used by another."""

    def divide(self, bucket: Bucket, total: Factor) -> None:
        """Divide what this worker has of the sums."""

    def hand_out(self, bucket: Bucket, used: Sequence[bool]) -> None:
        """Make reduced gradients the ones that the optimizer sees; `used` says by parameter whether there is one."""

    def release(self) -> None:
        """Let go of the group."""

    def end(self) -> None:
        """All gradients of the pass have been handed out."""

    def abandon(self) -> None:
        """The pass in flight has failed on this worker; the rest of its buckets is sent all the same."""

    def add(self, param: Tensor, index: int, has_place: bool, grad: Tensor) -> None:
        """Add the reduced gradient of a parameter that no bucket could take in time."""


class Whole:
    """Every worker has every gradient."""

    num_parts = 1
    is_fixed = False
    tail_cap_bytes = sys.maxsize
    blocks: Sequence[int] = ()
    grads_dtype: torch.dtype | None = None

    def __init__(self, reduction: BucketReduction, memory: Memory, device: torch.device) -> None:
        self.reduction = reduction
        self.memory = memory
        self.device = device

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Nothing: buckets are all there is."""

    def begin(self) -> None:
        """Nothing: gradients of earlier passes are in the buckets already."""

    def send(self, bucket: Bucket) -> Any:
        """All-reduce."""
        return self.reduction.all_reduce(bucket)

    def settle(self, bucket: Bucket) -> None:
        """Nothing: a bucket keeps its memory."""

    def divide(self, bucket: Bucket, total: Factor) -> None:
        """The whole bucket."""
        bucket.flat_grads.div_(total)

    def hand_out(self, bucket: Bucket, used: Sequence[bool]) -> None:
        """As views of the bucket."""
        bucket.hand_out(used)

    def release(self) -> None:
        """Let go of the group."""
        self.reduction.release()

    def end(self) -> None:
        """Nothing: every worker sees every gradient."""

    def abandon(self) -> None:
        """Nothing: there is nothing but buckets to send."""

    def add(self, param: Tensor, index: int, has_place: bool, grad: Tensor) -> None:
        """To the parameter's own gradient."""
        if has_place and param.grad is not None:
            param.grad.add_(grad)
        else:
            param.grad = grad


class Split:
    """Every worker has the gradients of its part of each bucket."""

    is_fixed = True

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup,
        reduction: BucketReduction,
        memory: Memory,
        flat_params: FlatParams,
        grain: Grain,
        *,
        keeps_buckets: bool,
        tail_cap_bytes: int = 0,
        blocks: Sequence[int] = (),
        precision: Precision | None = None,
        materials: Materials,
        device: torch.device,
    ) -> None:
        self._world = world
        self.device = device
        self._materials = materials
        self.tail_cap_bytes = tail_cap_bytes
        self.blocks = blocks
        self._precision = precision
        self.grads_dtype = precision.grads if precision is not None else None
        self._group = group
        self._rank = group.rank()
        self._flat_params = flat_params
        self._grain = grain
        self.memory = memory
        self.reduction = reduction
        self.num_parts = reduction.num_parts
        self._keeps_buckets = keeps_buckets
        """Whether a bucket's memory is its own; else only the owned gradients stay."""
        self.parts: list[Part] = []
        """One for each bucket with gradients, in their order."""
        self.agrees_on_overflow = False
        """Whether a gradient that is not finite on one worker is to be seen by all: a gradient scaler asks each
        worker's optimizer whether to skip the step, and they must not answer differently."""

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Move the parameters into flat memory, and say where the reduction leaves the owned gradients."""
        with_grads = [bucket for bucket in buckets if bucket.plan.slots]
        # All of what stays before anything that goes: in between, it would keep the allocator from giving that back.
        own_grads = [self._place_for_grads(bucket) for bucket in with_grads]
        for bucket, own in zip(with_grads, own_grads, strict=True):
            part = self._take(bucket)
            allocator.trim()
            part.own_grads = own
            self.parts.append(part)

    def _place_for_grads(self, bucket: Bucket) -> Tensor:
        span = self._spans(bucket.plan)[self._rank]
        own = bucket.flat[span.begin : span.end]
        return own if self._keeps_buckets else torch.zeros_like(own)

    def _take(self, bucket: Bucket) -> Part:
        """Move a bucket's parameters into flat memory; returns the owned part of them."""
        self._materials.make(bucket.params)
        plan, spans, shapes = bucket.plan, self._spans(bucket.plan), self._shapes(bucket)
        if self._precision is None:
            own_params = self._flat_params.place(plan, bucket.params, spans, plan.dtype)
            return Part(plan, spans, self._rank, own_params, shapes)
        masters = cut_out(plan, bucket.params, spans[self._rank], self._precision.master)
        computed = self._flat_params.place(plan, bucket.params, spans, self._precision.params)
        return Part(plan, spans, self._rank, masters, shapes, computed)

    def publish(self) -> None:
        """The optimizer has updated the owned parts: round what is computed with from the masters."""
        for part in self.parts:
            part.publish()

    def _shapes(self, bucket: Bucket) -> dict[int, list[int]] | None:
        if self._grain is Grain.ELEMENT:
            return None
        real = [torch.view_as_real(param) if param.is_complex() else param for param in bucket.params]
        return {slot.index: list(each.shape) for slot, each in zip(bucket.plan.slots, real, strict=True)}

    def _spans(self, plan: BucketPlan) -> list[Span]:
        cut = self.reduction.cut if self._grain is Grain.ELEMENT else whole_tensor_spans
        return cut(plan, self._group.size())

    def begin(self) -> None:
        """Keep what earlier passes left."""
        for part in self.parts:
            part.hold()

    def send(self, bucket: Bucket) -> Any:
        """Reduce-scatter, or all-reduce where that cannot be or is better; all-reduce where notes travel along."""
        part = self._part(bucket)
        self._flat_params.done(bucket.place if part is not None else None)
        if part is None or not self._scatters(part):
            return self.reduction.all_reduce(bucket)
        assert part.own_grads is not None
        return self.reduction.reduce_scatter(bucket, part.spans, part.own_grads)

    def settle(self, bucket: Bucket) -> None:
        """Keep the owned part."""
        part = self._part(bucket)
        if part is not None and not self._keeps_buckets and not self._scatters(part):
            assert part.own_grads is not None
            part.own_grads.copy_(bucket.flat[part.span.begin : part.span.end])

    def divide(self, bucket: Bucket, total: Factor) -> None:
        """The owned part."""
        part = self._part(bucket)
        if part is not None and part.own_grads is not None:
            part.own_grads.div_(total)

    def hand_out(self, bucket: Bucket, used: Sequence[bool]) -> None:
        """To the fragments; the parameters themselves have no gradient."""
        part = self._part(bucket)
        if part is not None:
            part.hand_out(used)
            for param in bucket.params:
                param.grad = None

    def release(self) -> None:
        """Let go of the group."""
        self.reduction.release()
        del self._group

    def end(self) -> None:
        """Spread the news of an overflow."""
        self._flat_params.end()
        if not self.agrees_on_overflow:
            return
        owned = [param for part in self.parts for param in part.params if param.grad is not None]
        sums = [torch.sum(param.grad, dtype=torch.float32) for param in owned if param.grad is not None]
        total = torch.stack(sums).sum() if sums else torch.zeros((), device=self.device)
        is_finite = torch.isfinite(total).float()
        with waited_for():
            work = dist.all_reduce(is_finite, dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._world.await_on_device(work, "looking for overflows")
        if owned and owned[0].grad is not None:
            # Nothing is added where all is finite, and no worker has to look: 0 * 1 or 0 * inf.
            owned[0].grad.view(-1)[0].add_(0.0 * (1.0 / is_finite))

    def abandon(self) -> None:
        """Go on gathering what the others gather."""
        self._flat_params.abandon()

    def add(self, param: Tensor, index: int, has_place: bool, grad: Tensor) -> None:
        """To the fragments."""
        for part in self.parts:
            part.add(index, grad)
        param.grad = None

    def _scatters(self, part: Part) -> bool:
        return not part.plan.tail_numel and self.reduction.scatters(part.spans)

    def _part(self, bucket: Bucket) -> Part | None:
        return self.parts[bucket.place] if bucket.place < len(self.parts) else None
