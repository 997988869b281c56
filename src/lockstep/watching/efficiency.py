"""How well a run scales: throughput, efficiency, what travels, what of the device's arithmetic is used.

Efficiency is T_1 / T_N, for the same work per worker. T_N is a step's time. T_1, the time of a step of one worker by
itself, is measured in the same run: what a worker's step takes without exposed communication and waiting (data, copy,
forward, backward, optimizer, other), the median over workers and the last 20 steps.
"""

import collections
import contextlib
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.watching.step_record import CombinedStep, in_flight

_WINDOW = 20
_PRODUCT_TRIES = 5


@dataclass(frozen=True, slots=True)
class StepSpeed:
    """What one step says about speed; None where it cannot be told."""

    batch: float | None
    """Samples of the global batch."""
    samples_per_s: float | None
    efficiency: float | None
    """T_1 / T_N."""
    sent_bytes: int
    """Bytes of gradients that were reduced."""
    bus_gb_per_s: float | None
    """2 (N - 1) / N of them, over the time in which any was on its way: as NCCL's tests count it."""
    mfu: float | None
    """Part of the devices' arithmetic that the model's floating-point operations took."""


class SpeedTracker:
    """The speed of a run, step by step, on worker 0. `peak_flops`: of one worker's device, per second."""

    def __init__(self, size: int, peak_flops: float | None = None) -> None:
        self._size, self._peak_flops = size, peak_flops
        self._own: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self.flops_per_sample: float | None = None
        """What forward and backward pass take, once that is known."""

    @property
    def single_step_ns(self) -> float | None:
        """T_1."""
        return statistics.median(self._own) if self._own else None

    def see(self, step: CombinedStep) -> StepSpeed:
        """What `step` says."""
        self._own.append(statistics.median(worker.own for worker in step.workers))
        seconds = step.wall / 1e9
        samples = [worker.record.num_samples for worker in step.workers]
        batch = sum(samples) if all(samples) else None
        single = self.single_step_ns
        sent = sum(flight.num_bytes for flight in step.workers[0].record.flights)
        first = step.workers[0]
        busy = sum(end - start for start, end in in_flight(first.record, first.begin, step.launches))
        flops = (self.flops_per_sample or 0.0) * (batch or 0.0)
        return StepSpeed(
            batch,
            batch / seconds if batch and seconds else None,
            min(1.0, single / step.wall) if single and step.wall else None,
            sent,
            2 * (self._size - 1) / self._size * sent / busy if self._size > 1 and sent and busy else None,
            flops / seconds / (self._peak_flops * self._size) if flops and seconds and self._peak_flops else None,
        )


# Arithmetic


class FlopCount:
    """Counts the operations of the first forward pass of `module` that will be followed by a backward pass.

    The backward pass takes twice as many: for each product of the forward pass, one for the gradient of each factor.
    """

    def __init__(self, module: nn.Module) -> None:
        self._mode: FlopCounterMode | None = None
        self._total = 0.0
        # What torch.compile made has kernels of its own, whose operations are not seen.
        is_compiled = any(type(each).__name__ == "OptimizedModule" for each in module.modules())
        self._hooks: list[Any] = []
        if not is_compiled:
            self._hooks.append(module.register_forward_pre_hook(self._begin))
            self._hooks.append(module.register_forward_hook(self._end, always_call=True))

    def per_sample(self, num_samples: float) -> float | None:
        """Operations per sample, once a step is over whose first pass had so many; None if they are not known."""
        self._remove_hooks()
        return 3.0 * self._total / num_samples if self._total and num_samples else None

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin(self, _module: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._mode = FlopCounterMode(display=False)
            self._mode.__enter__()

    def _end(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._total = float(self._mode.get_total_flops())
            self._remove_hooks()


def measured_peak(module: nn.Module, device: torch.device) -> float | None:
    """What the device does per second in a matrix product of the module's dtype, with this process's threads."""
    dtype = next((param.dtype for param in module.parameters() if param.is_floating_point()), None)
    if dtype is None or (device.type == "cpu" and dtype is not torch.float32):
        return None
    side = 4096 if device.type == "cuda" else 512
    with contextlib.suppress(RuntimeError), torch.no_grad():
        a = torch.ones(side, side, device=device, dtype=dtype)
        _product_seconds(a)
        return 2.0 * side**3 / min(_product_seconds(a) for _ in range(_PRODUCT_TRIES))
    return None


def _product_seconds(a: torch.Tensor) -> float:
    before = time.perf_counter()
    torch.mm(a, a)[0, 0].item()  # Waits for it: on a GPU some hundredths of the milliseconds that it takes.
    return time.perf_counter() - before
