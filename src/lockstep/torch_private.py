"""The names of torch's that are not public, looked up in this one place.

Nothing is looked up on import, so `import lockstep` works with any torch. Where a name is missing, a function here
takes the plain way, or returns None where its caller has one; what has neither raises LockstepError, which says what
for. `missing()` tells which names this torch lacks: a test runs it on the oldest and on the newest torch supported.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import LockstepError

NAMES = (
    "torch._C._current_graph_task_id",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C.Future",
    "torch._dynamo.trace_rules.add",
    "torch._C._distributed_c10d",
    "torch._C._distributed_c10d.Backend._get_sequence_number_for_group",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.autograd._profiler_enabled",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.distributed.distributed_c10d._abort_process_group",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.distributed_c10d._set_pg_timeout",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.device_mesh.DeviceMesh._get_root_mesh",
    "torch.distributed.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map",
    "torch.distributed.tensor.DTensor._local_tensor",
    "torch.distributed.tensor.DTensor._spec",
    "torch.Tensor._make_wrapper_subclass",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
)
"""All that are used, from the module or class that has them."""


def missing() -> list[str]:
    """Those of NAMES that this torch has not."""
    for module in ("torch._dynamo", "torch.distributed.optim.apply_optimizer_in_backward", "torch.distributed.tensor"):
        importlib.import_module(module)  # Else loaded by those who use it: see `is_dtensor`.
    return [name for name in NAMES if _found(name) is None]


# The backward pass.


def queue_callback(call: Callable[[], None]) -> None:
    """Have `call` called when the backward pass that is running ends well; it is dropped if the pass raises."""
    _needed("torch.autograd.Variable._execution_engine.queue_callback", "to hear of the end of a backward pass")(call)


def backward_pass() -> int:
    """The number of the backward pass of autograd that this thread is in, which no other one has; -1 in none."""
    return int(_needed("torch._C._current_graph_task_id", "to know the backward pass that runs")())


def in_backward() -> bool:
    """Whether autograd runs a backward pass in this thread."""
    return backward_pass() != -1


@functools.cache
def leave_out_of_compiler(modules: Sequence[str]) -> None:
    """Have torch.compile not look into functions of these modules or packages; it does where torch cannot be told."""
    add = _found("torch._dynamo.trace_rules.add")
    for name in modules if add is not None else ():
        add(name)


def profiled(name: str) -> contextlib.AbstractContextManager[object]:
    """A block that has this name in a profile; nothing where no profiler runs, which is cheaper than torch's own."""
    ask = _found("torch.autograd._profiler_enabled")
    return torch.profiler.record_function(name) if ask is None or ask() else contextlib.nullcontext()


# Tensors.


def is_wrapped_by_functorch(tensor: Tensor) -> bool:
    """Whether it stands for a tensor inside `torch.func`; True where this torch does not tell, the safe answer."""
    ask = _found("torch._C._functorch.is_functorch_wrapped_tensor")
    return ask is None or bool(ask(tensor))


def wrapper_subclass(cls: type[Tensor], like: Tensor) -> Any:
    """A tensor of the subclass `cls` with shape, dtype and device of `like`, and no memory."""
    make = _needed("torch.Tensor._make_wrapper_subclass", "to stand for a gradient that is split (zero=1 to 3)")
    return make(cls, like.shape, dtype=like.dtype, device=like.device)


def is_dtensor(tensor: object) -> bool:
    """Whether it is one of torch's distributed tensors; no module of torch's is loaded to find out."""
    kind = _found("torch.distributed.tensor.DTensor") if "torch.distributed.tensor" in sys.modules else None
    return kind is not None and isinstance(tensor, kind)


def is_made_of_others(tensor: Tensor) -> bool:
    """Whether it has no memory of its own, but tensors inside that have: a quantized one of torchao's, a DTensor."""
    ask = _needed("torch.utils._python_dispatch.is_traceable_wrapper_subclass", "to know what has memory of its own")
    return bool(ask(tensor))


def local_tensor(dtensor: Any) -> Tensor:
    """What this worker holds of a DTensor: the memory itself, which is there (a pending collective is waited for)."""
    local = dtensor._local_tensor
    if hasattr(local, "wait"):  # A collective's result that nobody has asked for.
        local = dtensor._local_tensor = local.wait()
    assert isinstance(local, Tensor)
    return local


def set_local_tensor(dtensor: Any, local: Tensor) -> None:
    """Let a DTensor look at other memory: `local`, which may be of another dtype."""
    if local.dtype != dtensor.dtype:
        made = as_dtensor(local, dtensor)
        torch.Tensor.data.__set__(dtensor, made)  # type: ignore[attr-defined]
        dtensor._spec = made._spec
    dtensor._local_tensor = local


def as_dtensor(local: Tensor, like: Any) -> Any:
    """A DTensor of the global shape and the placements of `like`, of which this worker holds `local`; no copy."""
    kind = _needed("torch.distributed.tensor.DTensor", "for tensor parallelism")
    if local.dtype == like.dtype:
        return kind(local, like._spec, requires_grad=False)
    with torch.no_grad():
        return kind.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )


def root_of(mesh: Any) -> Any:
    """The mesh that `mesh` is a part of; itself where this torch does not tell."""
    ask = getattr(mesh, "_get_root_mesh", None)
    return mesh if ask is None else ask()


def is_future(value: object) -> bool:
    """Whether it is one of torch's futures, those made in C++ included."""
    return isinstance(value, _found("torch._C.Future") or torch.futures.Future)


def foreach_(name: str, tensors: Iterable[Tensor], *args: Any) -> None:
    """`torch._foreach_NAME_`, in place: as one call for many tensors, else tensor by tensor."""
    together = getattr(torch, f"_foreach_{name}_", None)
    if together is not None:
        together(list(tensors), *args)
        return
    for number, tensor in enumerate(tensors):
        getattr(tensor, f"{name}_")(*(each[number] if isinstance(each, list | tuple) else each for each in args))


def foreach_norm(tensors: list[Tensor]) -> list[Tensor]:
    """The norm of each: as one call for many tensors, else tensor by tensor."""
    together = getattr(torch, "_foreach_norm", None)
    return list(together(tensors)) if together is not None else [torch.linalg.vector_norm(each) for each in tensors]


@functools.cache
def has_triton() -> bool:
    """Whether there is Triton, as with torch's builds for CUDA: then kernels of ours can be used there."""
    return importlib.util.find_spec("triton") is not None


# Optimizers.


def loss_scale(scaler: Any) -> Tensor:
    """The present scale of a gradient scaler, on its device: `get_scale()` would have the host wait for a GPU."""
    scale: Tensor | None = getattr(scaler, "_scale", None)
    return scale if scale is not None else torch.tensor(float(scaler.get_scale()))


def forget_unscaling(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Let a gradient scaler take `optimizer`'s gradients for scaled: they come to nothing, and others follow."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is not None:
        states.pop(id(optimizer), None)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a hook of this optimizer's wants to be called at every step; True where this torch does not tell."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    return any(getattr(optimizer, name, True) for name in names)


def has_backward_steps() -> bool:
    """Whether torch has hooks in place that step optimizers within the backward pass, of whichever parameters."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    return module is not None and len(getattr(module, "param_to_optim_hook_handle_map", ())) > 0


def take_over_backward_steps(param: Tensor) -> Sequence[torch.optim.Optimizer]:
    """The optimizers that torch's `_apply_optimizer_in_backward` would have stepped within the backward pass.

    They are the caller's from here on: nothing of torch's calls them any more.
    """
    optimizers = getattr(param, "_in_backward_optimizers", ())
    if optimizers:
        handles = _needed(
            "torch.distributed.optim.apply_optimizer_in_backward.param_to_optim_hook_handle_map",
            "to have an optimizer step in the backward pass when gradients have been averaged",
        )
        for handle in handles.pop(param, ()):
            handle.remove()
    return list(optimizers)


# Process groups.


def c10d() -> Any:
    """torch's own module of process groups and their options, in C++."""
    return _needed("torch._C._distributed_c10d", "for process groups")


def default_store() -> dist.Store:
    """The store by which torch's default group was opened."""
    store: dist.Store = _needed("torch.distributed.distributed_c10d._get_default_store", "to adopt torch's group")()
    return store


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Give a group another deadline; where torch cannot, it keeps the one that it was opened with."""
    change = _found("torch.distributed.distributed_c10d._set_pg_timeout")
    if change is not None:
        change(timeout, group)


def abort_groups() -> None:
    """End all groups without the goodbye of their peers; where torch cannot, they end with the process."""
    abort = _found("torch.distributed.distributed_c10d._abort_process_group")
    if abort is not None:
        abort()


def forget_groups() -> None:
    """Have no group be known any more, nor counted: a first one that failed to open was counted all the same.

    The name of the next one follows from that count, so processes that had counted differently would never meet.
    """
    registry = _found("torch.distributed.distributed_c10d._world")
    unregister = _found("torch.distributed.distributed_c10d._unregister_all_process_groups")
    if registry is None or unregister is None:
        return
    unregister()
    registry.default_pg = None
    for name in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg"):
        getattr(registry, name, {}).clear()
    registry.group_count = 0


def group_names() -> dict[Any, str]:
    """All groups of this process, with the names that torch gave them; none where it does not tell."""
    registry = _found("torch.distributed.distributed_c10d._world")
    return dict(getattr(registry, "pg_names", {}))


def backend_of(group: Any, kind: str) -> Any:
    """What carries the group's tensors on devices of this kind; None if nothing does, or this torch does not tell."""
    try:
        return group._get_backend(torch.device(kind))
    except (RuntimeError, AttributeError, KeyError):
        return None


def num_collectives(backend: Any) -> int | None:
    """How many collectives were called on a group's backend; None if this torch does not tell, or it ends just now."""
    try:
        return int(backend._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return None


def num_gloo_threads(group: Any) -> int | None:
    """How many threads of gloo's serve a group; None if this torch does not tell."""
    return getattr(getattr(backend_of(group, "cpu"), "options", None), "_threads", None)


def nccl_calls(*, with_stacks: bool) -> bytes | None:
    """What torch's flight recorder has kept of the last calls of NCCL, pickled; None where there is none."""
    dump = getattr(c10d(), "_dump_nccl_trace", None)
    return None if dump is None else bytes(dump(True, with_stacks, False))


def _found(name: str) -> Any:
    """What `name` stands for; None if some part of it is missing."""
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part, None)
    return found


def _needed(name: str, purpose: str) -> Any:
    found = _found(name)
    if found is None:
        raise LockstepError(
            f"torch {torch.__version__} has no {name}, which Lockstep needs {purpose}. Use a version of torch that "
            "Lockstep is tested with: see the README."
        )
    return found
