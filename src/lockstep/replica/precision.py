"""Mixed precision with master weights: compute in one dtype, reduce in another, update in a third.

And torch DDP's `mixed_precision`: compute in a smaller dtype, update in the parameters' own. There parameters are cast
anew in every forward pass, as part of the graph, so autograd brings gradients back to their own dtype. `torch.autocast`
chooses per operation and is the better tool; this is here for scripts that come with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data import tree
from lockstep.errors import UsageError
from lockstep.replica.layout import strides_of
from lockstep.replica.local_params import local_part, whole_param
from lockstep.replica.params import Owned


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a training step; only of what is floating-point."""

    params: torch.dtype = torch.bfloat16
    """Of the parameters that the model computes with; inputs are cast to it."""
    grads: torch.dtype = torch.float32
    """In which gradients are summed over the workers."""
    master: torch.dtype = torch.float32
    """Of the weights that the optimizer updates, and of its state; parameters are rounded from them after each step."""

    def __post_init__(self) -> None:
        for name in ("params", "grads", "master"):
            dtype = getattr(self, name)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise UsageError(f"Precision({name}={dtype!r}): a floating-point torch.dtype is needed.")


def cast(value: object, dtype: torch.dtype) -> object:
    """`value` with every floating-point tensor in it in `dtype`."""
    held = tree.children(value)
    if held is not None:
        return tree.rebuild(value, [cast(child, dtype) for child in held])
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Masters:
    """Master weights of a lone worker: the optimizer is re-pointed at them, in place."""

    def __init__(self, params: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, precision: Precision) -> None:
        floating = [param for param in params if param.is_floating_point()]
        self._pairs = [(param, nn.Parameter(param.detach().to(precision.master, copy=True))) for param in floating]
        master_of = {whole_param(param): master for param, master in self._pairs}
        for group in optimizer.param_groups:
            group["params"] = [master_of.get(param, param) for param in group["params"]]
        for param, master in self._pairs:
            if (whole := whole_param(param)) in optimizer.state:
                state = optimizer.state.pop(whole)
                optimizer.state[master] = {k: local_part(v) if isinstance(v, Tensor) else v for k, v in state.items()}
            param.data = param.data.to(precision.params)
        optimizer.register_step_pre_hook(lambda *_: self._bring_grads())
        optimizer.register_step_post_hook(lambda *_: self.publish())

    def owned(self) -> list[Owned]:
        """The masters, as if they were parts."""
        return [Owned(whole_param(param), master, 0, strides_of(param)) for param, master in self._pairs]

    def publish(self) -> None:
        """Round the parameters from their masters."""
        with torch.no_grad():
            for param, master in self._pairs:
                param.copy_(master)

    def take_back(self) -> None:
        """Parameters were changed by hand: change their masters where they were."""
        with torch.no_grad():
            for param, master in self._pairs:
                is_changed = param != master.to(param.dtype)
                master.copy_(torch.where(is_changed, param.to(master.dtype), master))

    def _bring_grads(self) -> None:
        for param, master in self._pairs:
            if param.grad is not None:
                master.grad = param.grad.to(master.dtype, copy=True)
                param.grad = None


FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype")


class DDPPrecision:
    """The dtypes of DDP's mixed-precision argument, applied to a module."""

    def __init__(self, wanted: Any, module: nn.Module) -> None:
        if not all(hasattr(wanted, field) for field in FIELDS):
            raise UsageError(f"mixed_precision must have {', '.join(FIELDS)}, as torch's own has; got {wanted!r}.")
        self._module = module
        self._ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        """Names of parameters and buffers that DDP is to leave alone."""
        self._param_dtype: torch.dtype | None = wanted.param_dtype
        self.reduce_dtype: torch.dtype | None = wanted.reduce_dtype or wanted.param_dtype
        if wanted.buffer_dtype is not None:
            for name, buffer in module.named_buffers():
                if buffer.is_floating_point() and name not in self._ignored:
                    buffer.data = buffer.data.to(wanted.buffer_dtype)

    def name_dtypes(self) -> None:
        """Let parameters tell, by torch's names, the dtypes that a pass computes with and that is updated.

        `_mp_param` never has elements: a pass casts in its graph. Called when parameters lie where they are to stay.
        """
        for name, param in self._module.named_parameters():
            if self._param_dtype is not None and param.is_floating_point() and name not in self._ignored:
                named: Any = param
                named._mp_param = param.detach().new_empty(0, dtype=self._param_dtype)
                named._fp_param = param.detach()

    def call(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for these inputs, computed in the smaller dtype."""
        if self._param_dtype is None:
            return self._module(*inputs, **kwargs)
        params: dict[str, Any] = {
            name: cast(param, self._param_dtype)
            for name, param in self._module.named_parameters()
            if name not in self._ignored
        }
        inputs, kwargs = cast((inputs, kwargs), self._param_dtype)  # type: ignore[misc]
        return torch.func.functional_call(self._module, params, inputs, kwargs)


def reduce_in(state: tuple[dist.ProcessGroup, torch.dtype], bucket: Any) -> Any:
    """A communication hook that averages a bucket in another dtype."""
    group, dtype = state
    small = bucket.buffer().to(dtype).div_(group.size())
    work = dist.all_reduce(small, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0].to(bucket.buffer().dtype))
