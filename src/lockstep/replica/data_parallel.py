"""The wrapper that ties it together: takes the place of torch's DistributedDataParallel."""

import contextlib
import functools
import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal
from typing import cast as typed

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join

from lockstep.data import batch as batches
from lockstep.data import tree
from lockstep.errors import UsageError
from lockstep.events import Kind
from lockstep.replica import clipping
from lockstep.replica.as_ddp import AsDDP
from lockstep.replica.autograd_hooks import PassEvents, Untraced, call_at_begin, drop_gradient
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.engine import StepShards, StrategyTensors
from lockstep.replica.grad_weight import scale_grads
from lockstep.replica.optimizer import IdleOptimizers
from lockstep.replica.precision import DDPPrecision, Precision, cast, reduce_in
from lockstep.replica.reducer import Reducer
from lockstep.replica.step_state import JoinMode
from lockstep.replica.wrapping import WrapOptions, data_worlds, input_device
from lockstep.weight import Weight, checked
from lockstep.wire import Auto, Half, Int8, Wire
from lockstep.wire.reduction import WireReduction
from lockstep.world import join


class DataParallel(AsDDP):
    """Trains `module` on every worker as one worker would train it on the whole batch.

    After a backward pass, `param.grad` is on every worker `sum(weight * grad) / sum(weight)` over the workers: the
    weights are those given to `lockstep.backward`, else the sizes of the parts that a sharded loader cut, else equal.
    Gradients travel while the backward pass still runs. On one worker the module runs as it is.

    Takes every argument of torch's DistributedDataParallel, in its order. Those that have a meaning here:

    module: the model, on this worker's device. Names, shapes, dtypes and memory formats must be the same on all
        workers, or ModelMismatch is raised. Weights and buffers are set to worker 0's; where they differed, a warning
        names the first one and the workers.
    device_ids: a list of one device; inputs are moved there.
    broadcast_buffers, forward_sync_buffers: False leaves buffers alone between the steps.
    init_sync: False leaves the first weights and buffers as they are.
    process_group, device_mesh: reduce over these workers instead of all. A mesh of two dimensions: zero splits over the
        second, and replicates over the first. Parameters may be DTensors on other dimensions: see docs/mesh.md.
    bucket_cap_mb: the size of a bucket; if not given 25, and on GPUs growing to 100. `bucket_cap_mb_list`: its last
        entry counts.
    skip_all_reduce_unused_params: with zero=0, parameters that no worker used in the first step are not sent. One that
        is used later is reduced in an extra round then, and travels with the others from the next step on.
    mixed_precision: torch's own experiment, as there; `torch.autocast` is the better tool.

    Unnecessary here, accepted and without effect: `find_unused_parameters`, `static_graph`,
    `gradient_as_bucket_view`, `check_reduction`, `batched_grad_copy` (unused parameters, changing graphs and bucket
    views always work), `delay_all_reduce_named_params` and
    `param_to_hook_all_reduce` (buckets leave in the observed order anyway), `dim`, `output_device`.

    Lockstep's own:

    optimizer: what updates the model; needed with zero=1 to 3.
    zero: split what is redundant over the workers (see docs/zero.md): 1 the optimizer's state and work, 2 the gradients
        as well, 3 the parameters as well. `optimizer` is re-pointed, in place, at this worker's part; the loop,
        schedulers and groups stay as they are. `param.grad` has no values then, and raises when it is used: clip with
        `model.clip_grad_norm_`, and give all parameters to the one optimizer.
    precision: `lockstep.Precision(params=..., grads=..., master=...)`: compute in one dtype, reduce in another, update
        master weights in a third; with zero=1 to 3.
    wire: one of `lockstep.wire` (Half, Int8, Sign, TopK, LowRank): how gradients are encoded while they travel, for
        slow networks; "auto" measures in the first steps and picks (see `lockstep.wire.Auto`, `model.wire_report()`).
        Each says in its docstring what it costs and what it does to exactness.
    gather_wire: with zero=3, how parameters are encoded while they are gathered, as wire.Int8() or wire.Half(): the
        model computes with what is left of them, the optimizer and checkpoints have them whole. Over shared memory
        nothing is gathered.
    shards, keeps_units: `Trainer` uses these, to have everything added along one tree, and norms counted alike.
    reduces: False starts equal and sends nothing afterwards: for strategies, which exchange something else.
    blocks: with zero=3, the submodules whose parameters are gathered and released together, by name or by class; if
        not given, the members of lists of like modules.
    reshard_after_forward: with zero=3, whether a block's parameters are released between its forward and its backward
        pass. False gathers them once a step, not twice, and holds the whole model from a forward pass to the end of the
        backward pass. None: False on GPUs where all have free memory for eight times the parameters, else True.

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
        reshard_after_forward: bool | None = None,
        precision: Precision | None = None,
        wire: Wire | Auto | Literal["auto"] | None = None,
        gather_wire: Int8 | Half | None = None,
        shards: StepShards | None = None,
        reduces: bool = True,
        keeps_units: bool = False,
    ) -> None:
        asked = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        starts = broadcast_buffers is not False or forward_sync_buffers is not None
        keeps = broadcast_buffers is not False if forward_sync_buffers is None else forward_sync_buffers
        options = WrapOptions(
            init_sync=init_sync,
            starts_buffers_equal=starts,
            keeps_buffers_equal=keeps,
            bucket_cap_mb=bucket_cap_mb_list[-1] if bucket_cap_mb_list else bucket_cap_mb,
            optimizer=optimizer,
            zero=zero,
            blocks=blocks,
            precision=precision,
            wire=wire,
            gather_wire=gather_wire,
            reduces=reduces,
            keeps_units=keeps_units,
            reshard_after_forward=reshard_after_forward,
            skips_unused=skip_all_reduce_unused_params,
        )
        options.check(module)
        data = data_worlds(process_group, device_mesh)
        super().__init__(module, asked, options, data)
        self._ddp_precision = DDPPrecision(mixed_precision, module) if mixed_precision is not None else None
        self._compute_dtype = precision.params if precision is not None else None
        self._input_device = input_device(device_ids)
        self.world.agree_on_seed()
        self._made = self._engine_class(data, module, options, shards)
        self._take_up()

    def _take_up(self) -> None:
        reduce_dtype = self._ddp_precision.reduce_dtype if self._ddp_precision is not None else None
        if self._ddp_precision is not None:
            self._ddp_precision.name_dtypes()
        reducer = self._engine.reducer
        if reducer is not None and reduce_dtype is not None:
            reducer.use_hook((reducer.group, reduce_dtype), reduce_in)
        if self._engine.number == 0:
            self.world.on_leave.append(IdleOptimizers(self.world.rank).release)
        self.world.replicas.add(self)

    @Untraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What `module` returns for this worker's part of the batch."""
        events = self.world.events
        weight = self._weigh(inputs, kwargs)
        if self._input_device is not None:
            with events.copying():
                inputs, kwargs = batches.move((inputs, kwargs), self._input_device, non_blocking=True)
        if self._made is None and not self._trains():
            return self._compute_as_copy(inputs, kwargs)
        engine, reducer = self._engine, self._engine.reducer
        step = reducer.step if reducer is not None else -1
        is_pass = torch.is_grad_enabled() and (reducer is not None or bool(events))
        if is_pass and self.world.has_left and reducer is not None:
            raise UsageError("this model was wrapped in a world that has been left. Wrap model.module anew.")
        if is_pass and events:
            events.emit(Kind.FORWARD, step, num_samples=_num_samples(weight, (inputs, kwargs)))
        if is_pass and reducer is not None:
            if reducer.inputs is not None:
                reducer.inputs.see((inputs, kwargs))
            reducer.before_forward(self.require_backward_grad_sync, weight)
        if is_pass and engine.split is not None and _computes_in_half(self.world.device):
            engine.split.expect_overflows()  # A gradient scaler may decide by the gradients whether to step.
        if is_pass and (self.require_backward_grad_sync or self._join_config.throw_on_early_termination):
            self._tell_join_context()
        if is_pass:
            self._call_buffer_hook(is_before=True)
        if self._compute_dtype is not None:
            inputs, kwargs = cast((inputs, kwargs), self._compute_dtype)  # type: ignore[misc]
        with engine.own_numbers:
            if self._ddp_precision is not None:
                output = self._ddp_precision.call(inputs, kwargs)
            else:
                output = self.module(*inputs, **kwargs)
        if is_pass:
            self._call_buffer_hook(is_before=False)
        if is_pass and events:
            events.emit(Kind.FORWARDED, step)
            if reducer is None or not self.require_backward_grad_sync:
                call_at_begin(output, PassEvents(events, step))
        if is_pass and reducer is not None:
            if weight is not None and weight.is_stand_in:
                drop_gradient(output)  # Gradients that are accumulated here must not get it.
            call_at_begin(output, functools.partial(reducer.begin, weight))
        return output

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As of any module: the module inside is compiled, and not what is around it."""
        importlib.import_module("torch._dynamo")
        _ = self.forward  # Untraced from here on: what is traced must not be the looking up.
        super().compile(*args, **kwargs)

    def _trains(self) -> bool:
        """Whether a backward pass may follow on the forward pass that is about to be made."""
        return torch.is_grad_enabled() and any(param.requires_grad for param in self.module.parameters())

    def _compute_as_copy(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the module returns where nothing is trained, and no other worker takes part."""
        with self.world.own_stream("copy", torch_only=True, device=self.world.device):
            if self._compute_dtype is not None:
                inputs, kwargs = cast((inputs, kwargs), self._compute_dtype)  # type: ignore[misc]
            if self._ddp_precision is not None:
                return self._ddp_precision.call(inputs, kwargs)
            return self.module(*inputs, **kwargs)

    def _weigh(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Weight | None:
        """The weight of the batch that the inputs are of; batch norms ask the world's `hand_outs` for it."""
        if (self._made is not None and self._made.is_driven) or not self.world.hand_outs.have_begun:
            self.world.hand_outs.find_none()
            return None
        tensors = [leaf for leaf in tree.leaves((inputs, kwargs)) if isinstance(leaf, Tensor)]
        weight = self.world.hand_outs.find(tensors, trains=torch.is_grad_enabled())
        if weight is not None and weight.num_parts not in (None, self.world.size) and torch.is_grad_enabled():
            raise UsageError(
                f"the batch was cut between {weight.num_parts} workers, and the gradients of this model are added over "
                f"{self.world.size}: samples would be lost, or differ between workers that hold parts of one model. "
                "Shard the loader over the same workers: lockstep.shard(loader, device_mesh=mesh['dp']), with the "
                "device_mesh that DataParallel was given, or lockstep.shard(loader, world=model.world)."
            )
        return weight

    def release(self) -> None:
        """Let go of everything that belongs to the world; called when it is left."""
        self.world.release()
        if self._made is not None:
            self._made.release()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients here without sending anything; the first pass after the block sends the sum."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def sync_gradients(self, weight: float | Tensor | None = None) -> None:
        """Send what was accumulated under `no_sync`, without a backward pass of its own; every worker calls this.

        For loops that belong to somebody else and make many backward passes a step, as the schedules of
        torch.distributed.pipelining: run those under `no_sync`, then call this, then step. What is sent is
        `param.grad`, whoever made it.

        weight: what this worker's losses were averaged over; if not given, what the sharded loader cut counts, else all
            workers the same.
        """
        self._engine.is_sent_by_call = True
        window, reducer = self.world.accumulation, self._engine.reducer
        given = Weight(checked(weight, "model.sync_gradients")) if weight is not None else window.pending()
        if reducer is not None:
            reducer.send_accumulated(given)
        factor = window.end()
        if reducer is None:
            scale_grads(factor, self.module.parameters())

    @property
    def companion(self) -> StrategyTensors | None:
        """What a strategy keeps with this model, `num_bytes` that it sent among it; None without a strategy."""
        return self._made.strategy if self._made is not None else None

    @property
    def coded(self) -> WireReduction | None:
        """What the wire remembers, and the `num_bytes` that this worker sent in the last step; None without a wire."""
        return self._made.wire if self._made is not None else None

    def wire_report(self) -> str:
        """How gradients travel, in words; with wire="auto" what was chosen and why, once it has been."""
        wire = self.coded
        if wire is not None:
            return wire.report()
        rounded = self._engine.rounded_to
        return "gradients travel as they are." if rounded is None else f"gradients and their sums are {rounded}."

    @contextlib.contextmanager
    def whole_params(self) -> Iterator[None]:
        """A block in which all parameters are there to be read, whatever is split; every worker must enter it.

        Changes made in it, without gradients, are kept if all workers make the same ones. It needs memory for the whole
        model.
        """
        with self._engine.whole_params("model.whole_params()"), torch.no_grad():
            yield

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # No overloads.
        """As of any module; where parameters are gathered for use (zero=3), every worker must call this."""
        if self._made is None or not self._made.gathers:
            return super().state_dict(*args, **kwargs)
        with self._made.whole_params("model.state_dict()"):
            state = super().state_dict(*args, **kwargs)
            return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; with zero=1 to 3 every worker must call this."""
        if self._made is None:  # A copy, of which nothing is split.
            return super().load_state_dict(*args, **kwargs)
        with self._made.whole_params("model.load_state_dict()"):
            return super().load_state_dict(*args, **kwargs)

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> contextlib.AbstractContextManager[None]:
        """A block in which workers may have different numbers of batches: nobody waits for one that has none left.

        Gradients are divided by the number of all workers, as torch DDP does; `divide_by_initial_world_size=False`
        gives the mean over those that had a batch. After the block all workers have the weights and buffers of the one
        that made the most steps. Optimizer state of workers that ended early is not brought up to date. All workers
        must enter the block; models with SyncBatchNorm cannot, since their forward pass needs everybody.

        throw_on_early_termination: end the block on all workers, by an exception, when the first one has no batch left.
        For several models and torch's ZeroRedundancyOptimizer together there is torch's `Join([model, ...])`.
        """
        if not enable:
            return contextlib.nullcontext()
        self._require_whole("model.join()")
        if throw_on_early_termination:
            joined = Join([self], True, True, divide_by_initial_world_size=divide_by_initial_world_size)
            return typed("contextlib.AbstractContextManager[None]", joined)
        if any(isinstance(each, SyncBatchNorm | nn.SyncBatchNorm) for each in self.module.modules()):
            raise UsageError(
                "model.join() cannot run a model with SyncBatchNorm: its forward pass needs every worker. Give all "
                "workers the same number of batches, as lockstep.shard does."
            )
        if self._engine.reducer is None:
            return contextlib.nullcontext()
        self._has_joined = True
        return self._joined(self._engine.reducer, JoinMode(is_uneven=not divide_by_initial_world_size))

    @contextlib.contextmanager
    def _joined(self, reducer: Reducer, mode: JoinMode) -> Iterator[None]:
        """A worker that leaves the block early goes on taking part in every step of the others with nothing to add.

        It does so until a step in which no worker had anything: that is how all find the end together, with no message
        of its own. At the end the weights and buffers of the worker that made the most steps become everybody's, since
        a worker without batches makes no updates.
        """
        first_step = reducer.step
        with reducer.joining(mode):
            yield
            num_own = reducer.step - first_step
            while reducer.shadow():
                pass
            self._become_equal(num_own)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
        *,
        stages: dist.DeviceMesh | None = None,
        also: Sequence["DataParallel"] = (),
    ) -> Tensor:
        """Scale the gradients so that their norm over the whole model is at most `max_norm`; returns the old norm.

        What workers hold in parts is counted once: parts of split gradients, of DTensors, and of a pipeline.

        stages: the dimension of a mesh over which a pipeline is cut, whose workers must all call this.
        also: wrapped models that count as parts of this one and are scaled with it: further stages on this worker.
        """
        engines = [self._engine, *(each._engine for each in also)]
        here = [each._engine for each in self.world.replicas if isinstance(each, DataParallel)]
        clipping.require_all_stages(engines, here, has_stages=stages is not None)
        if engines[0].split is None and engines[0].mesh is None and stages is None and not also:
            params = self.module.parameters()
            return nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
        over = [join().within(stages)] if stages is not None else []
        total = clipping.total_norm(engines, float(norm_type), over, strict=error_if_nonfinite)
        for engine in engines:
            nn.utils.clip_grads_with_norm_(engine.clipped, max_norm, total, foreach)
        return total

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those of this worker's part included."""
        super().zero_grad(set_to_none)
        split = self._made.split if self._made is not None else None
        for param in split.owned_params() if split is not None else ():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.zero_()


def _num_samples(weight: Weight | None, inputs: Any) -> float:
    """How many samples a forward pass sees: what the sharded loader cut, else the length of the first tensor."""
    if weight is not None and not weight.doubt and weight.total is not None and not isinstance(weight.value, Tensor):
        return float(weight.value)
    first = next((leaf for leaf in tree.leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim), None)
    return float(len(first)) if first is not None else 0.0


def _computes_in_half(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16
