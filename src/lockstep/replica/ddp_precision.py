"""torch DDP's `mixed_precision`: compute in a smaller dtype, update in the parameters' own.

Parameters are cast anew in every forward pass, as part of the graph, so autograd brings gradients back to their own
dtype. `torch.autocast` chooses per operation and is the better tool; this is here for scripts that come with it.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.replica.precision import cast

FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype")


class DDPPrecision:
    """The dtypes of DDP's mixed-precision argument, applied to a module."""

    def __init__(self, wanted: Any, module: nn.Module) -> None:
        if not all(hasattr(wanted, field) for field in FIELDS):
            raise UsageError(f"mixed_precision must have {', '.join(FIELDS)}, as torch's own has; got {wanted!r}.")
        self._module = module
        self._param_dtype: torch.dtype | None = wanted.param_dtype
        self.reduce_dtype: torch.dtype | None = wanted.reduce_dtype or wanted.param_dtype
        if wanted.buffer_dtype is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(wanted.buffer_dtype)

    def call(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's output for these inputs, computed in the smaller dtype."""
        if self._param_dtype is None:
            return self._module(*inputs, **kwargs)
        params = {name: self._cast(param) for name, param in self._module.named_parameters()}
        inputs, kwargs = cast((inputs, kwargs), self._param_dtype)  # type: ignore[misc]
        return torch.func.functional_call(self._module, params, inputs, kwargs)

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._param_dtype) if tensor.is_floating_point() else tensor


def reduce_in(state: tuple[dist.ProcessGroup, torch.dtype], bucket: Any) -> Any:
    """A communication hook that averages a bucket in another dtype."""
    group, dtype = state
    small = bucket.buffer().to(dtype).div_(group.size())
    work = dist.all_reduce(small, group=group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0].to(bucket.buffer().dtype))
