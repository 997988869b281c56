"""A user's own script as a workload: `lockstep plan train.py [args]`.

The script runs in a process of its own, alone, until its second update:

    construction    as it is written, but parameters become fake tensors as modules take them: a model of any size is
                    built in no more memory than its largest tensor
    first forward   of DataParallel, or of a shard of Trainer: from here to the update that follows all tensors are
                    fake, and a tracer watches (see tracing.py); what asks for a value, as `loss.item()`, gets 1
    second update   the same with half the samples, so that it is known what grows with them

What cannot be done without values (shapes that depend on them, numpy) is done once more with real tensors, and one
real update. A script that cannot be followed so either is planned from its model's parameters, and a warning says why.
"""

import contextlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import UsageError
from lockstep.plan.workload import Layer, Workload

if TYPE_CHECKING:
    from lockstep.plan.tracing import StepTrace

LIMIT_S = 28.0
"""For both attempts, the start of Python and torch included."""
FAKE_SHARE = 0.7
"""Of it for the first."""


def workload_of_script(script: str | Path, args: Sequence[str] = (), *, limit_s: float = LIMIT_S) -> Workload:
    """What the script at `script`, called with `args`, trains; found out in `limit_s` seconds, or not at all.

    A warning says what could not be found out.
    """
    if not Path(script).is_file():
        raise UsageError(f"lockstep plan: there is no script {str(script)!r}.")
    deadline = time.monotonic() + limit_s
    found = _attempt(script, args, "fake", FAKE_SHARE * limit_s)
    if "trace" not in found:
        again = _attempt(script, args, "real", deadline - time.monotonic())
        found = again if "trace" in again or "params" not in found else found
    if "params" not in found:
        raise UsageError(
            f"lockstep plan: {script} came to no step of DataParallel or Trainer: {found['why']}. Give the arguments "
            "that it needs, or plan by numbers: lockstep plan --params 124M --layers 12 --hidden 768 --seq 1024."
        )
    if "trace" not in found:
        warnings.warn(
            f"{script} could not be followed through a step ({found['why']}): what follows is from its "
            f"{sum(found['params']):,} parameters alone, without activations and operations.",
            stacklevel=2,
        )
        layers = tuple(Layer(f"parameter {n}", (numel,), 2.0 * numel, 0.0) for n, numel in enumerate(found["params"]))
        return Workload(Path(script).name, layers, **found["facts"])
    from lockstep.plan.tracing import StepTrace

    traces = [StepTrace.from_json(each) for each in (found["trace"], found.get("other")) if each]
    return workload_of(
        traces[0], other=traces[1] if len(traces) > 1 else None, name=Path(script).name, **found["facts"]
    )


def workload_of(trace: "StepTrace", *, name: str, other: "StepTrace | None" = None, **known: Any) -> Workload:
    """The workload of a traced step; `known` says more of it, by the fields of Workload.

    other: the same step with another number of samples.
    """
    samples = max(1, trace.samples)
    tensors: dict[int, list[int]] = {}
    blocks: dict[int, int] = {}
    for param in trace.params:
        if param.is_trained:
            tensors.setdefault(param.layer, []).append(param.numel)
        blocks[param.layer] = max(blocks.get(param.layer, -1), param.block)
    kept: dict[int, int] = {}
    inputs: dict[int, int] = {}
    for use in trace.uses:
        if use.is_saved:
            kept[use.layer] = kept.get(use.layer, 0) + use.num_bytes
            inputs.setdefault(use.layer, use.num_bytes)
    layers, seen = [], {-1}
    for number, layer in enumerate(trace.layers):
        block = blocks.get(number, -1)
        layers.append(
            Layer(
                layer,
                tuple(tensors.get(number, ())),
                trace.layer_flops[number] / samples,
                kept.get(number, 0) / samples,
                boundary_bytes=0.0 if block in seen else inputs.get(number, 0) / samples,
                block=block,
            )
        )
        seen.add(block)
    trained = [param for param in trace.params if param.is_trained]
    width = max((param.num_bytes // max(1, param.numel) for param in trained), default=4)
    facts: dict[str, Any] = {
        "param_bytes": width,
        "grad_bytes": width,
        "optimizer_bytes": trace.state_bytes / max(1, sum(param.numel for param in trained)),
        "batch": samples,
        "micro_batch": samples,
        "buffer_bytes": trace.buffer_bytes,
        "transient_bytes": max(0.0, trace.activation_peak - trace.saved_bytes) / samples,
        "input_bytes": trace.batch_bytes / samples,
        "trace": (trace, other),
    }
    return Workload(name, tuple(layers), **{**facts, **known})


def _attempt(script: str | Path, args: Sequence[str], kind: str, limit_s: float) -> dict[str, Any]:
    """What a process of its own found out."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        code = "import sys; from lockstep.plan.script import follow; follow(*sys.argv[1:4], sys.argv[4:])"
        command = [sys.executable, "-c", code, str(out), kind, str(script), *args]
        lone = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
        why = ""
        try:
            with Path(folder, "stderr").open("w+b") as errors:
                subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=lone,
                    timeout=max(1.0, limit_s),
                )
                errors.seek(0)
                lines = errors.read().decode(errors="replace").strip().splitlines()
                why = lines[-1] if lines else "it ended before"
        except subprocess.TimeoutExpired:
            why = f"it took more than {limit_s:.0f} s"
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
        return {"why": why, **found}


# In the process of the script


class _Enough(BaseException):
    """All is known that was asked for."""


def follow(out: str, kind: str, script: str, args: Sequence[str]) -> None:
    """Run `script` as far as it is needed, and write to `out` what it trains; runs in a process of its own."""
    watch = _Watch(Path(out), is_fake=kind == "fake")
    watch.install()
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
    except _Enough:
        pass
    except BaseException as error:
        watch.note(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}")
        if os.environ.get("LOCKSTEP_PLAN_DEBUG"):
            traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)  # Not through the script's own ends: loader processes, sockets, files of a run.


class _Watch:
    """Follows one script."""

    def __init__(self, out: Path, *, is_fake: bool) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._out = out
        self._fake = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else None
        self._found: dict[str, Any] = {}
        self._tracer: Any = None
        self._steps = contextlib.ExitStack()
        """What is entered for a step: fake tensors,"""
        self._seeing = contextlib.ExitStack()
        """and the tracer, for its first micro-batch and for the update."""
        self._samples = 0
        """Of a micro-batch, as the script makes it."""
        self._num_forwards = 0
        self._num_updates = 0
        self._facts: dict[str, Any] = {}

    def install(self) -> None:
        """Be called by what the script calls."""
        import torch
        import torch.optim.optimizer as optimizers
        from torch import nn

        import lockstep
        from lockstep.replica.data_parallel import DataParallel
        from lockstep.train.trainer import Trainer

        forward, construct = DataParallel.forward, DataParallel.__init__
        watch = self

        def init(model: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            construct(model, module, *args, **kwargs)
            watch._see_model(module, kwargs)

        def forward_watched(model: Any, *inputs: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(model, *inputs, **kwargs)
            inputs, kwargs = watch._begin(model, inputs, kwargs)
            return model.module(*inputs, **kwargs)

        DataParallel.__init__ = init  # type: ignore[method-assign,assignment]
        DataParallel.forward = forward_watched  # type: ignore[assignment]
        Trainer.step = lambda trainer, batch: watch._trainer_step(trainer, batch)  # type: ignore[assignment,method-assign]
        lockstep.launch = lambda function, *_, args=(), **__: [function(*args)]
        optimizers.register_optimizer_step_pre_hook(lambda *_: self._before_update())
        optimizers.register_optimizer_step_post_hook(lambda *_: self._after_update())
        if self._fake is not None:
            self._let_params_be_fake(nn.Module)
            _let_values_be_one()

    def note(self, why: str) -> None:
        """It could not be followed any further."""
        self._found.setdefault("why", why)
        self._write()

    def _write(self) -> None:
        self._out.write_text(json.dumps({**self._found, "facts": self._facts}))

    def _let_params_be_fake(self, module_class: Any) -> None:
        import torch
        from torch._subclasses.fake_tensor import FakeTensor
        from torch.utils.weak import WeakIdKeyDictionary

        register, mode = module_class.register_parameter, self._fake
        assert mode is not None
        made = WeakIdKeyDictionary()  # Tied weights stay tied.

        def register_fake(module: Any, name: str, param: Any) -> None:
            if param is not None and not isinstance(param, FakeTensor):
                if param not in made:
                    with mode:
                        like = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device=param.device)
                    made[param] = torch.nn.Parameter(like, requires_grad=param.requires_grad)
                param = made[param]
            register(module, name, param)

        def apply_fake(module: Any, change: Any, recurse: bool = True) -> Any:  # torch swaps tensors, not fake ones.
            for child in module.children() if recurse else ():
                child._apply(change)
            for name, param in module._parameters.items():
                if param is None:
                    continue
                changed = change(param.detach())
                if (changed.dtype, changed.device) != (param.dtype, param.device):
                    made[param] = torch.nn.Parameter(changed, requires_grad=param.requires_grad)
                    module._parameters[name] = made[param]
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer if buffer is None else change(buffer)
            return module

        module_class.register_parameter, module_class._apply = register_fake, apply_fake

    def _see_model(self, module: Any, options: Mapping[str, Any]) -> None:
        from lockstep.plan.tracing import Tracer

        params = [param for param in module.parameters() if param.requires_grad]
        self._found["params"] = [param.numel() for param in params]
        width = max((param.element_size() for param in params), default=4)
        precision = options.get("precision")
        self._facts.update(
            zero=options.get("zero", 0),
            param_bytes=width,
            grad_bytes=precision.grads.itemsize if precision is not None else width,
            master_bytes=precision.master.itemsize if precision is not None else 0,
            precision=_precision_of(params),
        )
        self._tracer = _scaling(Tracer)(module, self._fake)
        self._write()

    # A step

    def _begin(self, model: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """A forward pass begins: the inputs that it is to have."""
        import torch

        from lockstep.data import tree

        self._num_forwards += 1
        if self._num_forwards > 1:
            self._seeing.close()  # A further micro-batch is like the first.
        leaves = [leaf for leaf in tree.leaves((inputs, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.ndim]
        samples = len(leaves[0]) if leaves else 1
        if self._num_forwards == 1:
            self._samples = self._samples or samples
            if torch.is_autocast_enabled(model.world.device.type):
                self._facts["precision"] = "amp"
            wanted = max(1, samples // 2) if self._num_updates and self._fake is not None else samples
            if self._fake is not None:
                self._steps.enter_context(self._fake)
            self._tracer.reset()
            self._tracer.scale(samples, wanted)
            if self._fake is not None:
                self._steps.enter_context(_scaled_rows(self._tracer))
            self._seeing.enter_context(self._tracer.watching())
        dtype = model._compute_dtype
        made = _mapped((inputs, kwargs), lambda tensor: self._tracer.own(tensor, dtype))
        if self._num_forwards == 1:
            for leaf in tree.leaves(made):
                if isinstance(leaf, torch.Tensor):
                    self._tracer.ignore(leaf, is_input=True)
        return made  # type: ignore[no-any-return]

    def _before_update(self) -> None:
        if self._tracer is None or not self._num_forwards:
            return
        if self._num_forwards > 1:
            self._seeing.enter_context(self._tracer.watching())
        self._tracer.begin_update()

    def _after_update(self) -> None:
        if self._tracer is None or not self._num_forwards:
            return
        self._seeing.close()
        self._steps.close()
        trace = self._tracer.trace(self._tracer.samples)
        self._found["other" if self._num_updates else "trace"] = trace.to_json()
        if not self._num_updates:
            self._facts.setdefault("batch", self._samples * self._num_forwards)
            self._facts.setdefault("micro_batch", self._samples)
        self._write()
        self._num_updates += 1
        self._num_forwards = 0
        if self._num_updates == 2 or self._fake is None or self._samples < 2:
            raise _Enough

    def _trainer_step(self, trainer: Any, batch: Any) -> Any:
        """One shard, twice."""
        from lockstep.data.source import GlobalBatch

        whole = trainer._own(batch) if isinstance(batch, GlobalBatch) else trainer._cut(batch)
        shard = next(shard for shard in whole.shards if shard.size)
        options = trainer._options
        self._facts.update(batch=whole.total, micro_batch=shard.size, zero=options.zero)
        while True:
            loss = options.loss_fn(trainer.model, shard.batch)
            loss = loss[0] if isinstance(loss, tuple) else loss
            loss.backward()
            options.optimizer.step()
            options.optimizer.zero_grad()


def _scaling(tracer_class: type) -> Any:
    """A tracer that gives real tensors of a batch another number of samples, and answers for values."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import _disable_current_modes

    class ScalingTracer(tracer_class):  # type: ignore[misc]
        def __init__(self, module: Any, fake: Any) -> None:
            self._fake = fake
            self._was = self.samples = 0
            self._owned: dict[int, tuple[Any, Any]] = {}
            super().__init__(module)

        def scale(self, was: int, samples: int) -> None:
            """Let tensors of `was` rows have `samples`."""
            self._was, self.samples = was, samples
            self._owned.clear()

        def own(self, tensor: Any, dtype: Any = None) -> Any:
            """A tensor of the batch, as the step is to see it."""
            if self._fake is None:
                return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            if isinstance(tensor, FakeTensor | torch.nn.Parameter):
                return tensor
            if id(tensor) not in self._owned:
                shape = list(tensor.shape)
                if shape and shape[0] == self._was and not self._is_buffer(tensor):
                    shape[0] = self.samples
                kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                with _disable_current_modes(), self._fake:
                    made = torch.empty(shape, dtype=kind, device=tensor.device, requires_grad=tensor.requires_grad)
                    self.ignore(made)
                self._owned[id(tensor)] = (tensor, made)
            return self._owned[id(tensor)][1]

        def _is_buffer(self, tensor: Any) -> bool:
            return any(tensor is buffer for buffer in self._module.buffers())

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self._fake is None:
                return super().__torch_dispatch__(func, types, args, kwargs)
            if func is torch.ops.aten._local_scalar_dense.default:
                return _one(args[0].dtype)
            return super().__torch_dispatch__(func, types, args, kwargs)

        def rows(self, tensor: Any) -> Any:
            """Only what is a batch's: all else is left to the fake mode."""
            is_rows = not isinstance(tensor, FakeTensor) and tensor.ndim > 0 and tensor.shape[0] == self._was
            return self.own(tensor) if is_rows and not self._is_buffer(tensor) else tensor

    return ScalingTracer


def _scaled_rows(tracer: Any) -> Any:
    """A mode in which whatever is called sees tensors of the batch as the step is to see them."""
    from torch.overrides import TorchFunctionMode

    class ScaledRows(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            args, kwargs = _mapped((args, kwargs or {}), tracer.rows)
            return func(*args, **kwargs)

    return ScaledRows()


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, change, value)


def _one(dtype: Any) -> Any:
    return True if str(dtype) == "torch.bool" else 1.0 if dtype.is_floating_point else 1


def _let_values_be_one() -> None:
    """Between two steps a loop prints a loss, or adds it up."""
    from torch._subclasses.fake_tensor import FakeTensor

    answers: Mapping[str, Callable[..., Any]] = {
        "item": lambda tensor: _one(tensor.dtype),
        "tolist": lambda tensor: _one(tensor.dtype),
        "__float__": lambda _: 1.0,
        "__int__": lambda _: 1,
        "__bool__": lambda _: True,
        "__format__": lambda _, spec: format(1.0, spec),
    }
    for name, answer in answers.items():
        setattr(FakeTensor, name, answer)


def _precision_of(params: Sequence[Any]) -> str:
    kinds = {str(param.dtype) for param in params}
    return "bf16" if kinds == {"torch.bfloat16"} else "fp16" if kinds == {"torch.float16"} else "fp32"
