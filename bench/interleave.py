"""Times several actions in turn, round by round in one run, and compares them.

Two runs on a shared machine differ by more than the things compared here. So every round does each action once, in
an order that is shuffled anew but the same on all workers, and actions are compared within a round: slow phases of
the machine then hit numerator and denominator alike.

Each action starts at a barrier. Its time is the largest over the workers, since a step of synchronised training is
over when the last worker is done; that holds for the no-communication limit too, which is thus a limit one could
really reach, and not the mean of workers that never wait for each other.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import lockstep

Action = Callable[[int], None]
"""Takes the number of the round."""
Times = dict[str, np.ndarray]
"""For each action its time in seconds, by round."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and where it lies, with 95 % confidence."""

    median: float
    low: float
    high: float


def measure(world: lockstep.World, actions: Mapping[str, Action], *, rounds: int, warmup: int) -> Times:
    """The times of `actions` over `rounds` rounds, after `warmup` rounds that do not count. The same on all workers."""
    shuffler = random.Random(0)
    names = list(actions)
    mine: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warmup + rounds):
        shuffler.shuffle(names)
        for name in names:
            seconds = _timed(world, actions[name], number)
            if number >= warmup:
                mine[name].append(seconds)
    everybody = world.gather(mine)
    return {name: np.max([theirs[name] for theirs in everybody], axis=0) for name in actions}


def compare(times: Times, quantity: Callable[..., np.ndarray], *names: str, resamples: int = 2000) -> Estimate:
    """The median over the rounds of `quantity(times of each name)`, with a bootstrap interval over the rounds."""
    per_round = quantity(*(times[name] for name in names))
    draws = np.random.default_rng(0).integers(len(per_round), size=(resamples, len(per_round)))
    low, high = np.quantile(np.median(per_round[draws], axis=1), [0.025, 0.975])
    return Estimate(float(np.median(per_round)), float(low), float(high))


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """What to give `compare` for the ratio of two actions."""
    return numerator / denominator


def spread(times: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """10 %, 50 % and 90 % quantile."""
    low, median, high = np.quantile(times, [0.1, 0.5, 0.9])
    return float(low), float(median), float(high)


def _timed(world: lockstep.World, action: Action, number: int) -> float:
    _settle(world)
    world.barrier()
    start = time.perf_counter()
    action(number)
    _settle(world)
    return time.perf_counter() - start


def _settle(world: lockstep.World) -> None:
    """Wait for what is queued on the device."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
