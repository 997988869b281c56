"""What each worker keeps of gradients and parameters: all, or its part. Chosen once, when a model is wrapped.

    Placement         all-reduce; every worker has every gradient, as `param.grad`
    SplitPlacement    reduce-scatter; every worker has the gradients of its part, on the fragments that its optimizer
                      sees. That is ZeRO, in three stages: 1 splits the optimizer's state, 2 the gradients as well
                      (beyond its part a worker keeps none), 3 the parameters as well

Over shared memory parameters exist once for all workers of a host from stage 1 on, so stage 3 is stage 2 there: what it
would gather and release is never there twice.

The reducer decides when a bucket travels; a placement owns the reduction, and decides who gets what of it.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.group import shares_memory, shares_params
from lockstep.comm.memory import Memory, TurnsMemory, memory_of
from lockstep.errors import UsageError
from lockstep.replica import allocator
from lockstep.replica.bucket import Bucket
from lockstep.replica.collectives import finish
from lockstep.replica.gathered_params import GatheredParams
from lockstep.replica.layout import BucketPlan, FlatSpan, LayoutRules, whole_tensor_spans
from lockstep.replica.local_params import whole_param
from lockstep.replica.model_mesh import ModelMesh, all_reduce
from lockstep.replica.modules import MetaParams, assign, find_blocks
from lockstep.replica.optimizer import Grain, grain_of
from lockstep.replica.params import BucketPart, FlatParams, Format, KeptParams, Owned, SharedParams, cut_out
from lockstep.replica.reduction import BucketReduction, FastReduction
from lockstep.replica.wrapping import WrapOptions
from lockstep.torch_private import in_backward, wrapper_subclass
from lockstep.weight import Factor
from lockstep.world import World

TAIL_CAP_BYTES = 4 << 20
"""Through shared memory a last bucket up to here is all-reduced with the notes in it, not scattered before them:
a message costs more than its bytes."""


AMPLE = 8
"""A GPU whose free memory is so many times the parameters holds all of them during a step, if it is not told."""


class Placement:
    """How buckets travel, and what becomes of them. As it is, every worker has every gradient."""

    gathered: GatheredParams | None = None
    """The parameters, where they are whole only while they are used."""

    def __init__(
        self, reduction: BucketReduction, memory: Memory, device: torch.device, grads_dtype: torch.dtype | None = None
    ) -> None:
        self.reduction = reduction
        self.memory = memory
        self.rules = LayoutRules(device, grads_dtype=grads_dtype)

    def send(self, bucket: Bucket) -> Any:
        """Start the reduction of a bucket; returns what to wait for."""
        return self.reduction.all_reduce(bucket)

    def divide(self, buckets: Sequence[Bucket], total: Factor) -> None:
        """Divide what this worker has of the sums."""
        for bucket in buckets:
            bucket.flat_grads.div_(total)

    def hand_out(self, buckets: Sequence[Bucket], used: Sequence[bool]) -> None:
        """Make reduced gradients the ones that the optimizer sees; `used` says by parameter whether there is one."""
        for bucket in buckets:
            bucket.hand_out(used)

    def add(self, param: Tensor, index: int, has_place: bool, grad: Tensor) -> None:
        """Add the reduced gradient of a parameter that no bucket could take in time."""
        if has_place and param.grad is not None:
            param.grad.add_(grad)
        else:
            param.grad = grad

    def release(self) -> None:
        """Let go of the group."""
        self.reduction.release()


class SplitPlacement(Placement):
    """Every worker has the gradients of its part of each bucket, and updates its part of the parameters."""

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup,
        reduction: BucketReduction,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        device: torch.device,
        options: WrapOptions,
        mesh: ModelMesh | None = None,
        grads_dtype: torch.dtype | None = None,
    ) -> None:
        """`world` and `group` are those over which all is split: of HSDP, one replica's."""
        assert options.optimizer is not None
        stage, precision = options.zero, options.precision
        self._world, self._group, self._mesh = world, group, mesh
        numbers: list[int] = []
        self._flat_params: FlatParams
        is_shared = shares_memory(group, world.device)
        if shares_params(group, world.device):
            self._flat_params = SharedParams(world, group)
        elif stage < 3:
            self._flat_params = KeptParams(world, group)
        else:
            found = find_blocks(module, options.blocks)
            numbers = assign(module, params, found)
            reshards = options.reshard_after_forward
            self.gathered = GatheredParams(
                world,
                group,
                module,
                found,
                dict(zip(params, numbers, strict=True)),
                reshards=not _all_have_room(world, params) if reshards is None else reshards,
                wire=options.gather_wire,
            )
            self._flat_params = self.gathered
        memory = memory_of(group, device)
        super().__init__(reduction, TurnsMemory(memory) if stage >= 2 else memory, device)
        self.rules = LayoutRules(
            device,
            parts=reduction.num_parts,
            part_grain=lcm(reduction.part_grain, getattr(options.gather_wire, "grain", 1)),
            is_fixed=True,
            grads_dtype=precision.grads if precision is not None else grads_dtype,
            tail_cap_bytes=TAIL_CAP_BYTES if is_shared and isinstance(reduction, FastReduction) else 0,
            blocks=numbers,
        )
        self._keeps_buckets = stage < 2
        """Whether a bucket's memory is its own; else only the owned gradients stay."""
        self._grain, self._precision = grain_of(options.optimizer, device), precision
        if mesh is not None and self._grain is Grain.TENSOR:
            raise UsageError(
                f"{type(options.optimizer).__name__} looks at whole tensors, and with zero={stage} it would be given "
                "this worker's shards of DTensors as if they were whole. Use zero=0, where torch gives it the DTensors "
                "themselves, or an optimizer that works element by element."
            )
        self._meta = MetaParams(module, device, world.seed)
        self.parts: list[BucketPart] = []
        """One for each bucket with gradients, in their order."""
        self._stood_in_for: list[Tensor] = []
        """Parameters whose gradient is a SplitGrad since the last pass."""
        self._agrees_on_overflow = False
        """Whether a gradient that is not finite on one worker is to be seen by all: a gradient scaler asks each
        worker's optimizer whether to skip the step, and they must not answer differently."""

    @property
    def keeps_whole_params(self) -> bool:
        """Whether every worker has a copy of all parameters between the steps."""
        return isinstance(self._flat_params, KeptParams)

    # Buckets

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Move the parameters into flat memory, and say where the reduction leaves the owned gradients.

        Called once, since parameters keep their places.
        """
        with_grads = [bucket for bucket in buckets if bucket.indices]
        # All of what stays before anything that goes: in between, it would keep the allocator from giving that back.
        own_grads = []
        for bucket in with_grads:
            span = self._spans(bucket.plan)[self._group.rank()]
            own = bucket.flat[span.begin : span.end]
            own_grads.append(own if self._keeps_buckets else torch.zeros_like(own))
        for bucket, own in zip(with_grads, own_grads, strict=True):
            part = self._cut(bucket)
            allocator.trim()
            part.own_grads = own
            self.parts.append(part)
        self._meta.make_rest()
        if self.rules.device.type == "cpu" and not isinstance(self._flat_params, SharedParams):
            allocator.give_back_large_blocks()

    def _spans(self, plan: BucketPlan) -> list[FlatSpan]:
        """Which span of a bucket each worker owns."""
        cut = self.reduction.cut if self._grain is Grain.ELEMENT else whole_tensor_spans
        return cut(plan, self._group.size())

    def _cut(self, bucket: Bucket) -> BucketPart:
        """Move a bucket's parameters into flat memory; returns the part of them that this worker owns."""
        self._meta.make(bucket.params)
        plan, spans, rank = bucket.plan, self._spans(bucket.plan), self._group.rank()
        formats: Mapping[int, Format] | None = None
        if self._grain is Grain.TENSOR:
            real = [torch.view_as_real(view) if view.is_complex() else view for view in bucket.views]
            formats = {index: (view.shape, view.stride()) for index, view in zip(bucket.indices, real, strict=True)}
        if self._precision is None:
            own_params = self._flat_params.place(plan, bucket.params, spans, plan.params_dtype)
            return BucketPart(plan, spans, rank, own_params, formats)
        masters = cut_out(plan, bucket.params, spans[rank], self._precision.master)
        computed = self._flat_params.place(plan, bucket.params, spans, self._precision.params)
        return BucketPart(plan, spans, rank, masters, formats, computed)

    def before_pass(self) -> None:
        """Gradients are about to be accumulated, by a pass that is synchronised or not: parameters have none."""
        for param in self._stood_in_for:
            if isinstance(param.grad, SplitGrad):
                param.grad = None
        self._stood_in_for.clear()

    def begin(self) -> None:
        """A synchronised pass begins: keep what earlier ones left."""
        if self.gathered is not None:
            self.gathered.begin()
        for part in self.parts:
            part.hold()

    def send(self, bucket: Bucket) -> Any:
        """Reduce-scatter, or all-reduce where that cannot be or is better; all-reduce where notes travel along."""
        part = self._part(bucket)
        if part is None or not self._scatters(part):
            return self.reduction.all_reduce(bucket)
        assert part.own_grads is not None
        return self.reduction.reduce_scatter(bucket, part.spans, part.own_grads)

    def keep(self, bucket: Bucket) -> None:
        """The reduction of a bucket is over, and its memory about to be used by another: keep the owned part."""
        part = self._part(bucket)
        if part is not None and not self._keeps_buckets and not self._scatters(part):
            assert part.own_grads is not None
            part.own_grads.copy_(bucket.flat[part.span.begin : part.span.end])

    def divide(self, buckets: Sequence[Bucket], total: Factor) -> None:
        """The owned parts."""
        for bucket in buckets:
            part = self._part(bucket)
            if part is not None and part.own_grads is not None:
                part.own_grads.div_(total)

    def hand_out(self, buckets: Sequence[Bucket], used: Sequence[bool]) -> None:
        """To the fragments; the parameters themselves have what says so."""
        for bucket in buckets:
            part = self._part(bucket)
            if part is None:
                continue
            part.hand_out(used)
            for index, param in zip(bucket.indices, bucket.params, strict=True):
                param.grad = None
                if used[index]:
                    self._stand_in(param)

    def add(self, param: Tensor, index: int, has_place: bool, grad: Tensor) -> None:
        """To the fragments."""
        for part in self.parts:
            part.add(index, grad)
        self._stand_in(param)

    def _stand_in(self, param: Tensor) -> None:
        whole: Tensor = whole_param(param)
        self._stood_in_for.append(whole)
        whole.grad = SplitGrad.of(whole)

    def expect_overflows(self) -> None:
        """A gradient scaler will decide by the gradients whether to step: all workers are to see the same overflows."""
        self._agrees_on_overflow = True

    def agree_on_overflow(self) -> None:
        """All gradients have been handed out: spread the news of an overflow, where it may count."""
        if not self._agrees_on_overflow:
            return
        owned = [param for param in self.owned_params() if param.grad is not None]
        sums = [torch.sum(param.grad, dtype=torch.float32) for param in owned if param.grad is not None]
        total = torch.stack(sums).sum() if sums else torch.zeros((), device=self.rules.device)
        is_finite = torch.isfinite(total).float()
        doing = "looking for overflows"
        finish(
            partial(dist.all_reduce, is_finite, dist.ReduceOp.MIN, group=self._group, async_op=True),
            self._world,
            is_finite.device,
            doing,
        )
        if self._mesh is not None:
            all_reduce(is_finite, dist.ReduceOp.MIN, self._mesh.world, doing)
        if owned and owned[0].grad is not None:
            # Nothing is added where all is finite, and no worker has to look: 0 * 1 or 0 * inf.
            owned[0].grad.view(-1)[0].add_(0.0 * (1.0 / is_finite))

    def _scatters(self, part: BucketPart) -> bool:
        return not part.plan.tail_numel and self.reduction.scatters(part.spans)

    def _part(self, bucket: Bucket) -> BucketPart | None:
        return self.parts[bucket.place] if bucket.place < len(self.parts) else None

    # The owned parts

    def owned(self, params: Sequence[nn.Parameter]) -> list[Owned]:
        """What this worker owns of `params`, which are all of the model's."""
        return [each for part in self.parts for each in part.owned(params)]

    def owned_params(self) -> list[nn.Parameter]:
        """The fragments of this worker, as its optimizer has them."""
        return [param for part in self.parts for param in part.params]

    def before_update(self) -> None:
        """The owned parts are about to change; every worker calls this."""
        self._flat_params.before_step()

    def after_update(self) -> None:
        """The owned parts have changed: let every worker compute with them; every worker calls this."""
        for part in self.parts:
            part.publish()
        self._flat_params.after_step()

    @contextlib.contextmanager
    def whole_params(self, call: str) -> Iterator[None]:
        """A block in which all parameters are there, to be read and changed; every worker enters it by `call`."""
        try:
            yield from self._flat_params.whole(call)
        finally:
            with torch.no_grad():
                for part in self.parts:
                    part.take_back()

    def own_grads(self) -> list[tuple[int, Tensor]]:
        """This worker's parts of the gradients, each with the number of its parameter."""
        pairs = [pair for part in self.parts for pair in zip(part.fragments, part.params, strict=True)]
        return [(fragment.index, own.grad) for fragment, own in pairs if own.grad is not None]

    def release(self) -> None:
        """Let go of the group."""
        self.reduction.release()
        self._flat_params.release()
        del self._group


_aten = torch.ops.aten
_DROPPED = (_aten.zero_.default, _aten._foreach_zero_.default, _aten.detach.default)
"""What `zero_grad` does with a gradient."""
_ADDED = (_aten.add.Tensor, _aten.add_.Tensor)
"""What autograd does with the gradient that is there."""


class SplitGrad(Tensor):
    """What stands as `param.grad` for a gradient that is split over the workers: it has no values, and says so.

    Whatever is computed with it raises UsageError; in a backward pass it counts as none. None in its place would be
    silent: `torch.nn.utils.clip_grad_norm_` would find a norm of 0 and clip nothing, and an optimizer that was not
    handed over would update nothing. It is there between two passes only.
    """

    @staticmethod
    def of(param: Tensor) -> "SplitGrad":
        """One for `param`; it takes no memory."""
        made = wrapper_subclass(SplitGrad, param)
        assert isinstance(made, SplitGrad)
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # As torch documents it.
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise, unless nothing is computed from it."""
        if func in _DROPPED:
            return args[0]
        if func in _ADDED and in_backward():
            return args[1] if isinstance(args[0], cls) else args[0]
        raise UsageError(
            "this is param.grad of a model whose gradients are split over the workers (zero=1 to 3): it has no values "
            f"here, so {func} cannot be computed. Clip with model.clip_grad_norm_(...); step the optimizer that was "
            "given to DataParallel(net, optimizer=optimizer), which sees this worker's part: all parameters belong in "
            "that one, in groups. Or use zero=0."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SplitGrad({list(self.shape)})"


def _all_have_room(world: World, params: Sequence[nn.Parameter]) -> bool:
    """Whether every worker's GPU has ample free memory for all parameters at once; every worker calls this."""
    has_room = False
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        has_room = free > AMPLE * sum(param.numel() * param.element_size() for param in params)
    return all(world.gather_json(has_room))
