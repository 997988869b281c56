"""What a run has shown, in numbers, and whether it is as promised."""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

TOLERANCE = 1e-5
"""Relative difference that float32 sums in another order may make within the first steps; measured: about 1e-6."""


@dataclass(frozen=True, slots=True)
class Parity:
    """How far the first steps were from the same steps of one worker."""

    steps: int
    """How many steps were compared."""
    batch: int
    """Samples that the workers' parts had together, in each of them."""
    weights: float
    """The largest relative difference of a parameter after these steps."""
    losses: float
    """The largest relative difference of a loss in these steps."""

    @property
    def is_close(self) -> bool:
        """Whether both are within the tolerance; not if one is no number."""
        return self.weights <= TOLERANCE and self.losses <= TOLERANCE


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured of the steps' durations, on worker 0."""

    samples: int
    """Samples in the global batch."""
    together: float
    """Median seconds of a step of all workers together."""
    num_together: int
    """How many such steps were measured."""
    part: int
    """Samples in worker 0's part of the batch."""
    alone: float
    """Median seconds of worker 0's step on its part while the others were idle, with nothing sent."""
    num_alone: int
    """How many such steps were measured."""
    core_share: float
    """The part of a core that worker 0 had in these: less than nearly 1 if other programs were running."""

    @property
    def throughput(self) -> float:
        """Samples per second of all workers."""
        return self.samples / self.together

    @property
    def throughput_alone(self) -> float:
        """Samples per second of one worker that is alone."""
        return self.part / self.alone


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that worker 0 reports at the end of a run."""

    workers: int
    steps: int
    losses: tuple[float, ...]
    """Of every step, over the whole global batch."""
    digests: tuple[str, ...]
    """Of every worker's weights after the last step."""
    parity: Parity
    speed: Speed | None
    """None if there were too few steps to measure."""
    waiting: tuple[float, ...] | None
    """For every worker, the part of its time in which it waited for others; None if that was not measured."""
    sample: bytes
    """What the trained model writes."""

    @property
    def are_identical(self) -> bool:
        """Whether all workers hold the same weights, to the bit."""
        return len(set(self.digests)) == 1

    @property
    def is_finite(self) -> bool:
        """Whether every loss was a number."""
        return all(map(math.isfinite, self.losses))

    @property
    def efficiency(self) -> float | None:
        """The throughput of N workers as a part of N times that of one alone."""
        if self.speed is None:
            return None
        return self.speed.throughput / (self.workers * self.speed.throughput_alone)

    @property
    def is_as_promised(self) -> bool:
        """Whether every check has passed. Speed is measured, not judged."""
        return self.are_identical and self.parity.is_close and self.is_finite


def digest(net: nn.Module) -> str:
    """SHA-256 over the names and bytes of all weights and buffers."""
    sha = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().numpy())
    return sha.hexdigest()


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The distance of two tensors, relative to the length of the second.

    By the whole tensor, not by its elements: Adam's step for an element whose gradient is near zero goes one way or
    the other by rounding alone.
    """
    a, b = ours.detach().double(), theirs.detach().double()
    return float(torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b))


def largest_difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest of the differences; not a number if one of them is none."""
    return torch.tensor([difference(a, b) for a, b in zip(ours, theirs, strict=True)]).max().item()
