"""Times several actions in turn, round by round in one run, and compares them.

Two runs on a shared machine differ by more than the things compared here. So every round does each action once, in
an order that is shuffled anew but the same on all workers, and actions are compared within a round: slow phases of
the machine then hit numerator and denominator alike. Rounds in which processes other than the workers took more
than 5 % of the workers' cores do not count (if that is nearly all of them, the quietest quarter does).

Each action starts at a barrier. Its time is the largest over the workers, since a step of synchronised training is
over when the last worker is done; that holds for the no-communication limit too, which is thus a limit one could
really reach, and not the mean of workers that never wait for each other.
"""

import functools
import os
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lockstep

QUIET = 0.05
"""The share of the cores that others may take in a round that counts."""

WALL, BUSY, USED = "(wall)", "(busy)", "(used)"
Action = Callable[[int], None]
"""Takes the number of the round."""
Times = dict[str, np.ndarray]
"""For each action its time in seconds, by round."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What `measure` found."""

    times: Times
    """Of the rounds that count."""
    rounds: int
    """How many rounds there were, warm-up aside."""
    disturbance: float
    """The share of the workers' cores that other processes took, in the median round of all."""

    def __str__(self) -> str:
        kept = len(next(iter(self.times.values())))
        return (
            f"{kept} of {self.rounds} rounds count; in the median round others took {self.disturbance:.0%} of the cores"
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median and where it lies, with 95 % confidence."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def measure(world: lockstep.World, actions: Mapping[str, Action], *, rounds: int, warmup: int) -> Measured:
    """Time `actions` over `rounds` rounds, after `warmup` rounds that do not count. The same on all workers."""
    cores = set().union(*world.gather_json(sorted(os.sched_getaffinity(0))))

    def act(name: str, number: int) -> float:
        return timed(world, functools.partial(actions[name], number))

    mine = take_turns(list(actions), warmup + rounds, act, time.process_time, cores)
    everybody = [{name: values[warmup:] for name, values in theirs.items()} for theirs in world.gather_json(mine)]
    times = {name: np.max([theirs[name] for theirs in everybody], axis=0) for name in actions}
    used = np.sum([theirs[USED] for theirs in everybody], axis=0)
    return counted(times, everybody[0], used, len(cores))


def take_turns(
    names: list[str],
    rounds: int,
    act: Callable[[str, int], float],
    used_seconds: Callable[[], float],
    cores: Collection[int],
) -> dict[str, list[float]]:
    """By name and round the seconds that `act(name, number of the round)` returned; the order is the same everywhere.

    Of each round also: how long it took (WALL), how much of that `cores` worked for anybody (BUSY), and how much more
    `used_seconds` says after it (USED).
    """
    shuffler = random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in [*names, WALL, BUSY, USED]}
    for number in range(rounds):
        shuffler.shuffle(names)
        start, used, busy = time.perf_counter(), used_seconds(), busy_seconds(cores)
        for name in names:
            found[name].append(act(name, number))
        found[WALL].append(time.perf_counter() - start)
        found[BUSY].append(busy_seconds(cores) - busy)
        found[USED].append(used_seconds() - used)
    return found


def counted(times: Times, found: Mapping[str, Any], used: np.ndarray, num_cores: int) -> Measured:
    """The rounds that count among all; `used` is what the workers took of the cores that were BUSY in each."""
    disturbance = (np.array(found[BUSY]) - used) / (num_cores * np.array(found[WALL]))
    quiet = disturbance <= max(QUIET, np.quantile(disturbance, 0.25))
    kept = {name: seconds[quiet] for name, seconds in times.items()}
    return Measured(kept, len(disturbance), float(np.median(disturbance)))


def compare(times: Times, quantity: Callable[..., np.ndarray], *names: str, resamples: int = 2000) -> Estimate:
    """The median over the rounds of `quantity(times of each name)`, with a bootstrap interval over the rounds."""
    per_round = quantity(*(times[name] for name in names))
    draws = np.random.default_rng(0).integers(len(per_round), size=(resamples, len(per_round)))
    low, high = np.quantile(np.median(per_round[draws], axis=1), [0.025, 0.975])
    return Estimate(float(np.median(per_round)), float(low), float(high))


def ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """What to give `compare` for the ratio of two actions."""
    quotient: np.ndarray = numerator / denominator
    return quotient


def spread(times: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    """10 %, 50 % and 90 % quantile."""
    low, median, high = np.quantile(times, [0.1, 0.5, 0.9]).tolist()
    return low, median, high


def timed(world: lockstep.World, action: Callable[[], None]) -> float:
    """The seconds that `action` takes on this worker, if all start at once."""
    _settle(world)
    world.barrier()
    start = time.perf_counter()
    action()
    _settle(world)
    return time.perf_counter() - start


def _settle(world: lockstep.World) -> None:
    """Wait for what is queued on the device."""
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def busy_seconds(cores: Iterable[int]) -> float:
    """How long `cores` have worked for any process since the machine started, interrupts (ours too) left out."""
    lines = dict(line.split(maxsplit=1) for line in Path("/proc/stat").read_text().splitlines())
    ticks = [lines[f"cpu{core}"].split()[:3] for core in cores]  # In user mode, niced, in the kernel.
    return sum(int(count) for counts in ticks for count in counts) / os.sysconf("SC_CLK_TCK")
