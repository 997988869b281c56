"""What programs ask of torch's DistributedDataParallel besides training: its class, its attributes, its copies, `Join`.

Accelerate, Lightning, transformers, torchmetrics and torch itself ask `isinstance(model, DistributedDataParallel)`, and
unwrap, accumulate or save by the answer. So the wrapper is one. It inherits the class and none of its engine: DDP's
constructor is not called, and what would reach torch's reducer is answered here, in a sense of ours, or refused.
"""

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import UsageError
from lockstep.replica import agreement, logging_data
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.engine import Engine
from lockstep.replica.granularity import BUCKET_BYTES
from lockstep.replica.local_params import local_part
from lockstep.replica.step_state import JoinMode
from lockstep.replica.wrapping import DataWorlds, WrapOptions, data_worlds
from lockstep.world import World, join


class AsDDP(DistributedDataParallel):
    """A wrapped model as torch's programs know it; `DataParallel` is made of it, and of an engine."""

    _engine_class: type[Engine] = Engine

    def __init__(self, module: nn.Module, asked: Mapping[str, Any], options: WrapOptions, data: DataWorlds) -> None:
        """asked: what torch's constructor was given, by its names."""
        if isinstance(module, DistributedDataParallel) and not isinstance(module, AsDDP):
            raise UsageError(
                "this model is wrapped by torch's DistributedDataParallel already, which averages its gradients. Give "
                "lockstep.DataParallel the module itself, model.module, and leave the other out."
            )
        nn.Module.__init__(self)
        Joinable.__init__(self)
        _warn_of_deprecated(asked)
        if options.keeps_buffers_equal and asked["broadcast_buffers"] and "timm.utils.distributed" in sys.modules:
            _warn_of_equal_statistics(module)
        self.module = module
        self.world: World = data.all
        """The workers that train on different data: its rank, sums and means are for loaders and losses."""
        self._options, self._data = options, data
        self._made: Engine | None = None
        self._comm_hook: str | None = None
        self._error = ""
        self._has_joined = False
        """Whether workers were allowed to run out of batches."""
        self._buffer_hook: tuple[object, Callable[[Any, dict[str, Tensor]], Any], bool] | None = None
        params = list(module.parameters())
        self.device = params[0].device if params else data.all.device
        self.device_type = self.device.type
        self.is_multi_device_module = len({param.device for param in params}) > 1
        self.device_ids = list(asked["device_ids"]) if asked["device_ids"] and self.device_type != "cpu" else None
        output_device = asked["output_device"]
        self.output_device = output_device if output_device is not None or not self.device_ids else self.device_ids[0]
        self.dim: int = asked["dim"]
        if asked["device_mesh"] is not None:
            self.device_mesh: dist.DeviceMesh = asked["device_mesh"]
        self.forward_sync_buffers = options.keeps_buffers_equal
        self.find_unused_parameters: bool = asked["find_unused_parameters"]
        self.gradient_as_bucket_view: bool = asked["gradient_as_bucket_view"]
        self.batched_grad_copy: bool = asked["batched_grad_copy"]
        self.static_graph: bool = asked["static_graph"]
        self.mixed_precision = asked["mixed_precision"]
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self.parameters_to_ignore: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        caps = asked["bucket_cap_mb_list"] or ()
        self.bucket_bytes_cap_list = [int(cap * (1 << 20)) for cap in caps]
        self.bucket_bytes_cap_default = options.bucket_cap_mb is None
        cap_mb = options.bucket_cap_mb
        self.bucket_bytes_cap = BUCKET_BYTES if cap_mb is None else int(cap_mb * (1 << 20))
        self.broadcast_bucket_size = agreement.MESSAGE_BYTES
        self.logger = None

    # The engine: made when the model is wrapped, and by a copy when it trains for the first time

    @property
    def _engine(self) -> Engine:
        """All that is behind; the trainer, checkpoints and watchers reach it by this, and users need none of it.

        A copy makes its own when this is first asked for, at the same time on all workers.
        """
        if self._made is None:
            if self.world.has_left and self.world.size > 1:
                raise UsageError("this model was copied in a world that has been left. Wrap its module anew.")
            self.world.agree_on_seed()
            self._made = self._engine_class(self._data, self.module, self._options, None)
            self._take_up()
        return self._made

    def _take_up(self) -> None:
        """The engine has been made: what else belongs to it."""
        raise NotImplementedError

    # Attributes

    @property
    def process_group(self) -> dist.ProcessGroup | None:  # type: ignore[override]  # None once the world is left.
        """What gradients are reduced over."""
        return self.world.group

    @property  # type: ignore[misc]  # Read-only.
    def broadcast_buffers(self) -> bool:
        """Whether buffers are kept equal; torch's older name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @property
    def reducer(self) -> "TorchReducer":  # type: ignore[override]
        """What programs call of torch's reducer."""
        return TorchReducer(self)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """What torch logs, by its names; times on CPUs, of passes whose gradients are sent: see logging_data.py."""
        params = [param for param in self.module.parameters() if param.requires_grad]
        kinds = sorted({_TYPE_NAMES.get(param.dtype, str(param.dtype)) for param in params})
        syncs = any(isinstance(each, SyncBatchNorm | nn.SyncBatchNorm) for each in self.module.modules())
        reducer = self._made.reducer if self._made is not None else None
        steps = reducer.step if reducer is not None else 0
        data: dict[str, Any] = {
            "world_size": self.world.size,
            "rank": self.world.rank,
            "backend_name": self.world.backend,
            "module_name": type(self.module).__name__,
            "device_ids": ", ".join(map(str, self.device_ids or ())),
            "output_device": -1 if self.output_device is None else self.output_device,
            "broadcast_buffers": int(self.forward_sync_buffers),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "iteration": 0,
            "dtypes": ", ".join(kinds),
            "num_parameter_tensors": len(params),
            "total_parameter_size_bytes": sum(param.nbytes for param in params),
            "has_sync_bn": int(syncs),
            "has_rebuilt_buckets": int(bool(steps) and (self.static_graph or not self.find_unused_parameters)),
            "can_set_static_graph": int(self.reducer._ddp_graph_static()),
            "join_uneven_inputs": int(self._has_joined),
            "has_error": int(bool(self._error)),
            "error": self._error,
            **logging_data.environment(self.world.backend, self.world.group),
        }
        if reducer is not None:
            data |= reducer.logged()
        return data if self._comm_hook is None else {**data, "comm_hook": self._comm_hook}

    def _set_static_graph(self) -> None:
        """Without effect: graphs may change here."""
        self.static_graph = True

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Of which passes `_get_ddp_logging_data` has times: the first ten, and then one in so many."""
        if sample_rate < 1:
            raise UsageError(f"the sample rate must be 1 or more, got {sample_rate}.")
        if self._made is not None and self._made.reducer is not None:
            self._made.reducer.times.sample_rate = sample_rate

    def _check_reducer_finalized(self) -> None:
        """Without effect: a pass that does not end well raises."""

    def _remove_autograd_hooks(self) -> None:
        """Hear of no gradient any more."""
        if self._made is not None and self._made.reducer is not None:
            self._made.reducer.detach()

    def _update_process_group(self, new_process_group: Any) -> None:
        raise UsageError(
            "a wrapped model keeps its workers. Wrap model.module anew: lockstep.DataParallel(model.module, "
            "process_group=group), or let `lockstep run --elastic` and Trainer change the workers."
        )

    # Hooks

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Reduce buckets by `hook(state, bucket)`, which returns the averaged flat tensor or a Future of it.

        `bucket` has the methods of torch's GradBucket, so torch's own hooks can be given.
        """
        self._require_whole("register_comm_hook")
        if not callable(hook):
            self._error = f"register_comm_hook: the hook must be callable, got {type(hook).__name__}."
            raise NotCallable(self._error)
        self._comm_hook = getattr(hook, "__qualname__", type(hook).__qualname__)
        if self._engine.reducer is not None:
            self._engine.reducer.use_hook(state, hook)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """One of those that torch has in C++."""
        in_half = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if in_half else default_hooks.allreduce_hook
        self.register_comm_hook(self.process_group, hook)
        self._comm_hook = str(comm_hook_type)

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[[Any, dict[str, Tensor]], Any], comm_hook_location: Any = None
    ) -> None:
        """Keep buffers equal by `hook(state, {name: buffer})`, called in every training pass, in place of worker 0's.

        It may return a list of Futures, which are waited for at once.
        """
        if not callable(hook):
            raise NotCallable(f"the hook of buffers must be callable, got {type(hook).__name__}.")
        self._buffer_hook = (state, hook, getattr(comm_hook_location, "name", "") == "PRE_FORWARD")
        if self._engine.reducer is not None:
            self._engine.reducer.shared.buffers.leave_alone()

    def _call_buffer_hook(self, *, is_before: bool) -> None:
        """Called before and after every training pass of the module."""
        if self._buffer_hook is None or self._buffer_hook[2] != is_before:
            return
        state, hook, _ = self._buffer_hook
        futures = hook(state, dict(self.module.named_buffers()))
        if futures is not None:
            torch.futures.collect_all(list(futures)).wait()

    def _default_broadcast_coalesced(
        self, bufs: Any = None, bucket_size: Any = None, authoritative_rank: Any = 0
    ) -> None:
        """Give these buffers the values they have on one worker."""
        assert self.world.group is not None
        with torch.no_grad():
            agreement.broadcast(list(bufs), self.world, authoritative_rank, self.world.group)

    def _require_whole(self, what: str) -> None:
        if self._engine.wire is not None:
            raise UsageError(f"{what} does not go with wire=...: that already says how buckets are reduced.")
        if self._engine.split is not None:
            raise UsageError(f"{what} needs every worker to have every gradient; it works with zero=0 only.")

    # Workers with fewer batches, by torch's Join

    @property
    def join_device(self) -> torch.device:
        """See torch's Joinable."""
        return self.world.device

    @property
    def join_process_group(self) -> Any:
        """See torch's Joinable."""
        return self.process_group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What `torch.distributed.algorithms.join.Join` calls; takes `divide_by_initial_world_size`, as DDP's."""
        self._require_whole("Join")
        self._has_joined = True
        mode = JoinMode(is_uneven=not kwargs.get("divide_by_initial_world_size", True))
        return _Hook(self, mode)

    def _tell_join_context(self) -> None:
        """A pass that will send begins: inside torch's `Join`, tell those who have no batch left."""
        work = Join.notify_join_context(self)
        if work is not None:
            self.world.await_on_device(work, "telling workers without batches of a step")

    def _become_equal(self, steps: int) -> None:
        """Let all have the weights and buffers of the worker that made the most steps; every worker calls this."""
        everybodys = self.world.gather_json(steps)
        # The last of them, as torch has it.
        source = self._authoritative_rank = self.world.size - 1 - everybodys[::-1].index(max(everybodys))
        if len(set(everybodys)) == 1 or self.world.group is None:
            return
        held = [*self.module.parameters(), *(self.module.buffers() if self.forward_sync_buffers else ())]
        with torch.no_grad():
            agreement.broadcast([local_part(each) for each in held], self.world, source, self.world.group)

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> "AsDDP":
        """A wrapped model of the same workers, which meet when the copy trains for the first time, and never if not."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        shared = {name: vars(self)[name] for name in ("world", "_data", "device_mesh") if name in vars(self)}
        copied.__dict__.update(copy.deepcopy(self._kept(), memo), **shared)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        kept = self._kept()
        if self.world is not join() or self._data.split is not self.world:
            raise UsageError(
                "this model is wrapped for some of the workers only (process_group or device_mesh), which do not go "
                "into a file. Save what it wraps, torch.save(model.module, ...), and wrap it again after loading."
            )
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self._data = data_worlds(None, None)
        self.world = self._data.all

    def _kept(self) -> dict[str, Any]:
        """What goes into a copy."""
        if self._options.zero or self._engine_class is not Engine:
            raise UsageError(
                "this model's optimizer, gradients or parameters are split over the workers (zero=1 to 3, or Async), "
                "and so a copy of the wrapper would need an optimizer of its own. Copy what it wraps, on every worker: "
                "with model.whole_params(): copied = copy.deepcopy(model.module)."
            )
        dropped = ("_made", "world", "_data", "device_mesh", "_buffer_hook", "forward", "_compiled_call_impl")
        state = {name: value for name, value in vars(self).items() if name not in dropped}
        options = replace(self._options, optimizer=None)
        return {**state, "_made": None, "_buffer_hook": None, "_comm_hook": None, "_options": options}


class NotCallable(UsageError, TypeError):
    """Something else was given in place of a function."""


class TorchReducer:
    """What Accelerate, Lightning and torch's pipelines call of DDP's reducer."""

    def __init__(self, model: AsDDP) -> None:
        self._model = model

    def prepare_for_backward(self, outputs: Sequence[Tensor] = ()) -> None:
        """The next backward pass sends, though the forward passes that it is over were under `no_sync`.

        Not inside `no_sync`: a loop that has a pipeline run there sends by itself, with `sync_gradients`.
        """
        reducer = self._model._engine.reducer
        if reducer is not None and self._model.require_backward_grad_sync:
            reducer.send_next_pass()

    def prepare_for_forward(self) -> None:
        """Without effect."""

    def _rebuild_buckets(self) -> bool:
        """Without effect: buckets are laid out anew when that is due."""
        return False

    def _ddp_graph_static(self) -> bool:
        """Whether the same parameters were used in all steps so far."""
        made = self._model._made
        return made is None or made.reducer is None or made.reducer.is_graph_static

    def _delay_all_reduce(self) -> None:
        """Without effect: what is sent has been when a backward pass returns."""


class _Hook(JoinHook):
    """Takes part in the steps of the others with nothing to add."""

    def __init__(self, model: AsDDP, mode: JoinMode) -> None:
        super().__init__()
        self._model, self._reducer = model, model._engine.reducer
        self._mode = contextlib.ExitStack()
        self._first_step = 0
        self._num_own: int | None = None
        if self._reducer is not None:
            self._first_step = self._reducer.step
            self._mode.enter_context(self._reducer.joining(mode))

    def main_hook(self) -> None:
        """The others make a step."""
        if self._reducer is not None:
            self._count_own()
            self._reducer.shadow(keeps_grads=False)  # torch's ZeroRedundancyOptimizer updates its part of the model.

    def post_hook(self, is_last_joiner: bool) -> None:
        """No worker has a batch left."""
        if self._reducer is not None:
            self._mode.close()
            self._model._become_equal(self._count_own())

    def _count_own(self) -> int:
        """How many steps this worker made itself, in the block."""
        if self._num_own is None:
            assert self._reducer is not None
            self._num_own = self._reducer.step - self._first_step
        return self._num_own


_TYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}
"""As torch's C++ has them."""


def _warn_of_equal_statistics(module: nn.Module) -> None:
    """Warn, for timm's training script, that averaging the statistics of batch norms over the workers does nothing."""
    if any(isinstance(each, _BatchNorm) and not isinstance(each, SyncBatchNorm) for each in module.modules()):
        warnings.warn(
            "the running statistics of batch norms are worker 0's after every step, so timm's --dist-bn averages equal "
            "numbers. To have each worker keep its own until then, give --no-ddp-bb (forward_sync_buffers=False here); "
            "to have those of the whole batch all along, convert the model: lockstep.SyncBatchNorm.convert(net).",
            stacklevel=4,
        )


def _warn_of_deprecated(asked: Mapping[str, Any]) -> None:
    """Warn, as torch does, of keywords that will go; the caller's caller's caller gave them."""
    if asked["broadcast_buffers"] is not None:
        text = (
            "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead: there, False still starts from "
            "worker 0's buffers."
        )
        if asked["forward_sync_buffers"] is not None:
            text = "`broadcast_buffers` is deprecated, and ignored where `forward_sync_buffers` is given."
        warnings.warn(text, FutureWarning, stacklevel=4)
    if asked["check_reduction"]:
        warnings.warn("`check_reduction` is deprecated, and has no effect.", FutureWarning, stacklevel=4)
