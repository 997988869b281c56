"""How much arithmetic a model takes, and how much its device can do."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

_TRIES = 5


class FlopCount:
    """Counts the operations of one forward pass of `module`, the next one, and then leaves it alone.

    The backward pass takes twice as many: for each product of the forward pass, one for the gradient of each factor.
    """

    def __init__(self, module: nn.Module, tell: Callable[[float], None]) -> None:
        self._tell = tell
        """Called with the operations of forward and backward."""
        self._mode: FlopCounterMode | None = None
        self._hooks = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def close(self) -> None:
        """Leave the module alone."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled() and self._mode is None:
            self._mode = FlopCounterMode(display=False)
            self._mode.__enter__()

    def _end(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._mode is None:
            return
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        self.close()
        self._tell(3.0 * mode.get_total_flops())


def is_countable(module: nn.Module) -> bool:
    """Whether operations can be counted: not inside what torch.compile made, whose kernels are its own."""
    return not any(type(each).__name__ == "OptimizedModule" for each in module.modules())


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """What the device does per second in a matrix product of `dtype`, with this process's threads; best of a few."""
    side = 4096 if device.type == "cuda" else 512
    if device.type == "cpu" and dtype is not torch.float32:
        return None
    with contextlib.suppress(RuntimeError), torch.no_grad():
        a = torch.ones(side, side, device=device, dtype=dtype)
        torch.mm(a, a)
        return max(2.0 * side**3 / _seconds(a) for _ in range(_TRIES))
    return None


def _seconds(a: torch.Tensor) -> float:
    if a.is_cuda:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.mm(a, a)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    before = time.perf_counter()
    torch.mm(a, a)
    return time.perf_counter() - before
