"""How well a run scales: throughput, efficiency, what travels, what of the device's arithmetic is used. Pure.

Efficiency is T_1 / T_N, for the same work per worker. T_N is a step's time. T_1, the time of a step of one worker by
itself, is measured in the same run: what a worker's step takes without exposed communication and waiting (data, copy,
forward, backward, optimizer, other), the median over workers and the last 20 steps.

A loop of the user's own cannot be run twice to know better. `Trainer` can: before its first step it runs that batch's
passes without communication a few times (see calibration.py), and these times take the place of forward and backward.
"""

import collections
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.watching.combined import CombinedStep, WorkerStep

_WINDOW = 20


@dataclass(frozen=True, slots=True)
class Scaling:
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


class Speed:
    """The scaling of a run, step by step."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._own: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self.passes_ns: float | None = None
        """Forward and backward of a step without communication, where they were calibrated."""
        self.flops_per_sample: float | None = None
        """Of forward and backward."""
        self.peak_flops: float | None = None
        """Of one worker's device, per second."""

    @property
    def single_step_ns(self) -> float | None:
        """T_1."""
        return statistics.median(self._own) if self._own else None

    def _alone(self, worker: WorkerStep) -> float:
        """What the worker's step would take by itself."""
        if self.passes_ns is None:
            return worker.own
        return worker.own - worker.shares["forward"] - worker.shares["backward"] + self.passes_ns

    def see(self, step: CombinedStep) -> Scaling:
        """What `step` says."""
        self._own.append(statistics.median(self._alone(worker) for worker in step.workers))
        seconds = step.wall / 1e9
        samples = [worker.record.num_samples for worker in step.workers]
        batch = sum(samples) if all(samples) else None
        single = self.single_step_ns
        first = step.workers[0]
        sent = sum(bucket.num_bytes for bucket in first.buckets)
        return Scaling(
            batch,
            batch / seconds if batch and seconds else None,
            min(1.0, single / step.wall) if single and step.wall else None,
            sent,
            self._bus(step, sent),
            self._mfu(batch, seconds),
        )

    def _bus(self, step: CombinedStep, sent: int) -> float | None:
        busy = time_on_the_way(step.workers)
        if self._size < 2 or not sent or not busy:
            return None
        return 2 * (self._size - 1) / self._size * sent / busy

    def _mfu(self, batch: float | None, seconds: float) -> float | None:
        if not (self.flops_per_sample and self.peak_flops and batch and seconds):
            return None
        return self.flops_per_sample * batch / seconds / (self.peak_flops * self._size)


def time_on_the_way(workers: Sequence[WorkerStep]) -> int:
    """Nanoseconds in which some bucket that all have launched was on its way, as the first worker saw it arrive."""
    first = workers[0]
    number = min(len(worker.buckets) for worker in workers)
    busy, until = 0, 0
    for place in range(number):
        launched = max(worker.begin + worker.buckets[place].launched for worker in workers)
        arrived = first.begin + first.buckets[place].reduced
        busy += max(0, arrived - max(launched, until))
        until = max(until, arrived)
    return busy
