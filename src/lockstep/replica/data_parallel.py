"""The wrapper that ties it together: takes the place of torch's DistributedDataParallel."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import seeds
from lockstep.data import batch as batches
from lockstep.errors import UsageError
from lockstep.events import Kind
from lockstep.replica import lone_pass, wrapping
from lockstep.replica.assembly import Asked, assemble
from lockstep.replica.coded import Coded
from lockstep.replica.companion import Companion
from lockstep.replica.ddp_precision import DDPPrecision, reduce_in
from lockstep.replica.hook import CommHook
from lockstep.replica.moments import QuietPass, num_samples
from lockstep.replica.pass_edges import call_at_begin
from lockstep.replica.precision import Precision, cast
from lockstep.replica.reducer import Reducer
from lockstep.replica.shards import Shards
from lockstep.replica.uneven import Uneven, require_lone_forward
from lockstep.replica.untraced import Untraced
from lockstep.wire import Auto, Wire


class DataParallel(nn.Module):
    """Trains `module` on every worker as one worker would train it on the whole batch.

    After a backward pass, `param.grad` is on every worker `sum(weight * grad) / sum(weight)` over the workers: the
    weights are those given to `lockstep.backward`, else the sizes of the parts that a sharded loader cut, else equal.
    Gradients travel while the backward pass still runs. On one worker the module runs as it is.

    Takes every argument of torch's DistributedDataParallel, in its order. Those that have a meaning here:

    module: the model, on this worker's device. It must be the same on all workers, or ModelMismatch is raised; its
        weights and buffers are set to worker 0's.
    device_ids: a list of one device; inputs are moved there.
    broadcast_buffers, forward_sync_buffers: False leaves buffers alone between the steps.
    init_sync: False leaves the first weights and buffers as they are.
    process_group, device_mesh: reduce over these workers instead of all.
    bucket_cap_mb: the size of a bucket; if not given 25, and on GPUs growing to 100. `bucket_cap_mb_list`: its last
        entry counts.
    mixed_precision: torch's own experiment, as there; `torch.autocast` is the better tool.

    Unnecessary here, accepted and without effect: `find_unused_parameters`, `static_graph`,
    `gradient_as_bucket_view`, `check_reduction`, `skip_all_reduce_unused_params`, `batched_grad_copy` (unused
    parameters, changing graphs and bucket views always work), `delay_all_reduce_named_params` and
    `param_to_hook_all_reduce` (buckets leave in the observed order anyway), `dim`, `output_device`.

    Lockstep's own:

    optimizer: what updates the model. On CPUs many small parameters are then updated by few calls, with the same bits;
        for that they are moved into common memory.
    zero: split what is redundant over the workers (see docs/zero.md): 1 the optimizer's state and work, 2 the gradients
        as well, 3 the parameters as well. `optimizer` is re-pointed, in place, at this worker's part; the loop,
        schedulers and groups stay as they are. `param.grad` is None then: use `model.clip_grad_norm_`.
    precision: `lockstep.Precision(params=..., grads=..., master=...)`: compute in one dtype, reduce in another, update
        master weights in a third; with zero=1 to 3.
    wire: one of `lockstep.wire` (Half, Int8, Sign, TopK, LowRank): how gradients are encoded while they travel, for
        slow networks; "auto" measures in the first steps and picks (see `lockstep.wire.Auto`, `model.wire_report()`).
        Each says in its docstring what it costs and what it does to exactness.
    shards: `Trainer` uses this, to have everything added along one tree.
    reduces: False starts equal and sends nothing afterwards: for strategies, which exchange something else.
    blocks: with zero=3, the submodules whose parameters are gathered and released together, by name or by class; if
        not given, the members of lists of like modules.

    Memory: the gradients, once (they are views of the buckets), and nothing else of the model's size. With zero=1 the
    optimizer's state is divided by the number of workers, with zero=2 the gradients too. On CPUs C's allocator is told
    to keep what a step frees for the next one (see replica/allocator.py).
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: dist.DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        zero: int = 0,
        blocks: Sequence[str | type[nn.Module]] | None = None,
        precision: Precision | None = None,
        wire: Wire | Auto | Literal["auto"] | None = None,
        shards: Shards | None = None,
        reduces: bool = True,
    ) -> None:
        super().__init__()
        asked = Asked(
            init_sync=init_sync,
            starts_buffers_equal=broadcast_buffers is not False,
            keeps_buffers_equal=broadcast_buffers is not False and forward_sync_buffers is not False,
            bucket_cap_mb=bucket_cap_mb,
            bucket_cap_mb_list=bucket_cap_mb_list,
            optimizer=optimizer,
            zero=zero,
            blocks=blocks,
            precision=precision,
            wire=wire,
            shards=shards,
            reduces=reduces,
        )
        asked.check(module)
        self.module = module
        self._ddp_precision = DDPPrecision(mixed_precision, module) if mixed_precision is not None else None
        self._compute_dtype = precision.params if precision is not None else None
        self.world = wrapping.world_of(process_group, device_mesh)
        self.require_backward_grad_sync = True
        self._input_device = wrapping.input_device(device_ids)
        parts = assemble(self.world, module, asked)
        self._reducer, self._coded, self._zero, self._holding = parts.reducer, parts.coded, parts.zero, parts.holding
        self._update = parts.update
        self.companion: Companion | None = None
        """What a strategy keeps with this replica."""
        reduce_dtype = self._ddp_precision.reduce_dtype if self._ddp_precision is not None else None
        if self._reducer is not None and reduce_dtype is not None:
            self.register_comm_hook((self._reducer.group, reduce_dtype), reduce_in)
        seeds.diverge(self.world.seed, self.world.rank)
        self.world.welcome(self)

    @Untraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What `module` returns for this worker's part of the batch."""
        events = self.world.events
        if self._input_device is not None:
            with events.copying():
                inputs, kwargs = batches.move((inputs, kwargs), self._input_device, non_blocking=True)
        reducer = self._reducer
        if not torch.is_grad_enabled():
            return self._call(inputs, kwargs)
        if reducer is None:
            return lone_pass.tell_of(self._call, self.world, inputs, kwargs) if events else self._call(inputs, kwargs)
        if self.world.has_left:
            raise UsageError("this model was wrapped in a world that has been left. Wrap model.module anew.")
        if events:
            events.emit(Kind.FORWARD, reducer.step, num_samples=num_samples(self.world, (inputs, kwargs)))
        reducer.before_forward(self.require_backward_grad_sync)
        if self._zero is not None:
            self._zero.see_forward()
        output = self._call(inputs, kwargs)
        if events:
            events.emit(Kind.FORWARDED, reducer.step)
            if not self.require_backward_grad_sync:
                call_at_begin(output, QuietPass(events, reducer.step))
        if not call_at_begin(output, reducer.begin):
            reducer.hear_all()
        return output

    def _call(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._ddp_precision is not None:
            return self._ddp_precision.call(inputs, kwargs)
        if self._compute_dtype is not None:
            inputs, kwargs = cast((inputs, kwargs), self._compute_dtype)  # type: ignore[misc]
        return self.module(*inputs, **kwargs)

    def release(self) -> None:
        """Let go of everything that belongs to the world; called when it is left."""
        self.world.release()
        if self._reducer is not None:
            self._reducer.release()
        if self._zero is not None:
            self._zero.release()
        if self._update is not None:
            self._update.release()
        if self.companion is not None:
            self.companion.release()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients here without sending anything; the first pass after the block sends the sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def reducer(self) -> Reducer | None:
        """What sends the gradients; None on a lone worker."""
        return self._reducer

    @property
    def coded(self) -> Coded | None:
        """What the wire remembers and counts, where there is one."""
        return self._coded

    def wire_report(self) -> str:
        """How gradients travel, in words; with wire="auto" what was chosen and why, once it has been."""
        return self._coded.report() if self._coded is not None else "gradients travel as they are."

    # What Trainer needs besides.

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered when they are used, so that all workers must run as many passes."""
        return self._zero is not None and self._zero.gathers

    def expect_overflows(self) -> None:
        """A gradient scaler will decide by the gradients whether to step: let all workers see the same overflows."""
        if self._zero is not None:
            self._zero.placement.agrees_on_overflow = True

    @contextlib.contextmanager
    def sending_nothing(self) -> Iterator[None]:
        """A block whose pass takes part in everything, and adds zero."""
        assert self._reducer is not None
        self._reducer.weighing.withdraw()
        try:
            yield
        finally:
            self._reducer.weighing.factor = 1.0

    def finish_without_pass(self) -> None:
        """End a step without a backward pass on this worker; nothing to do on a lone one."""
        if self._reducer is not None:
            self._reducer.finish_without_pass()

    def abandon(self) -> None:
        """Make the step in flight void on all workers, since this one's pass has failed.

        Where parameters are gathered that is possible in the pass that sends, and not in one before it.
        """
        if self._reducer is not None and (self.require_backward_grad_sync or not self.gathers):
            self._reducer.abandon()

    def whole_params(self) -> contextlib.AbstractContextManager[None]:
        """A block in which all parameters are there to be read, whatever is split; every worker must enter it.

        Changes made in it are kept if all workers make the same ones. It needs memory for the whole model.
        """
        return self._holding.whole_params()

    @property
    def parts(self) -> list[tuple[nn.Parameter, nn.Parameter, int]] | None:
        """What this worker owns where something is split: parameter, fragment, number of its first element."""
        return self._holding.parts

    def before_load(self) -> None:
        """This worker is about to overwrite its part of the parameters; every worker calls this."""
        self._holding.before_load()

    def after_load(self) -> None:
        """This worker has overwritten its part of the parameters; every worker calls this."""
        self._holding.after_load()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # No overloads.
        """As of any module; where parameters are gathered for use (zero=3), every worker must call this."""
        if self._zero is None or not self._zero.gathers:
            return super().state_dict(*args, **kwargs)
        with self.whole_params():
            state = super().state_dict(*args, **kwargs)
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; with zero=1 to 3 every worker must call this."""
        with self.whole_params():
            return super().load_state_dict(*args, **kwargs)

    def join(
        self,
        divide_by_initial_world_size: bool = False,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """A block in which workers may have different numbers of batches: nobody waits for one that has none left.

        Gradients are the mean over the workers that had a batch; `divide_by_initial_world_size=True` divides by the
        number of all workers instead, which is torch DDP's default. After the block all workers have the weights
        and buffers of the one that made the most steps. Optimizer state of workers that ended early is not brought
        up to date. All workers must enter the block; models with SyncBatchNorm cannot, since their forward pass
        needs everybody.
        """
        if enable:
            self._require_whole("model.join()")
            require_lone_forward(self.module)
        return Uneven(
            self.world,
            self._reducer if enable else None,
            [*self.module.parameters(), *self.module.buffers()],
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Reduce buckets by `hook(state, bucket)`, which returns the averaged flat tensor or a Future of it.

        `bucket` has the methods of torch's GradBucket, so torch's own hooks can be given.
        """
        self._require_whole("register_comm_hook")
        comm_hook = CommHook(state, hook, self.world.size)
        if self._reducer is not None:
            self._reducer.use_hook(comm_hook)

    def _require_whole(self, what: str) -> None:
        if self._coded is not None:
            raise UsageError(f"{what} does not go with wire=...: that already says how buckets are reduced.")
        if self._zero is not None:
            raise UsageError(f"{what} needs every worker to have every gradient; it works with zero=0 only.")

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`; returns the old norm."""
        return self._holding.clip_grad_norm_(self.module.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those of this worker's part included."""
        super().zero_grad(set_to_none)
        self._holding.zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        raise UsageError("a DataParallel model cannot be copied or pickled; do that with model.module.")
