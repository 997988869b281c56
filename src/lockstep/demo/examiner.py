"""Looks on while a model is trained: measures, compares, shows progress, and changes nothing."""

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

from lockstep.demo.findings import Findings, Parity, Speed, digest, largest_difference
from lockstep.demo.gpt import GPT
from lockstep.demo.progress import Moment, Progress
from lockstep.demo.recipe import Recipe
from lockstep.demo.single import LoneStep, Single
from lockstep.demo.stopwatch import Lap, Stopwatch
from lockstep.world import World

NUM_COMPARED = 5
"""How many of the first steps are compared with one worker's."""
_PERIOD = 25
"""Steps from one calibration to the next."""
_LONE_STEPS = 3
"""Steps of a calibration; the first brings the caches back and does not count."""
_RECENT = 10
"""Steps that the progress shows the speed of."""
_PROMPT = b"def "
_SAMPLE_BYTES = 240


class Examiner:
    """One per worker, around its training loop. The phases, on every worker and in order:

    begin_step, end_step    once per step: time it and average its loss; then one of
        compare             the first steps: worker 0 takes the same step by itself, on the whole batch
        calibrate           every so many steps: worker 0 takes steps on its part while the others are idle
    conclude                after the last step: compare the replicas, sum up
    """

    def __init__(self, world: World, net: GPT, recipe: Recipe) -> None:
        """`net` is the initial model, not wrapped yet: it is copied for the comparison."""
        self._world = world
        self._net = net
        self._recipe = recipe
        self._num_compared = min(NUM_COMPARED, recipe.steps)
        self._single = Single(copy.deepcopy(net), recipe) if world.is_main else None
        self._progress = Progress() if world.is_main else None
        self._stopwatch = Stopwatch(world.events)
        self._losses: list[float] = []
        self._single_losses: list[float] = []
        self._laps: list[Lap] = []
        self._lone_steps: list[LoneStep] = []
        self._part = 0
        self._parity: Parity | None = None
        self._free_since = 0.0

    def begin_step(self) -> None:
        """This worker's part of the batch is there."""
        self._stopwatch.start()

    def end_step(self, x: Tensor, y: Tensor, loss: Tensor) -> None:
        """The step from this part, with this loss, has been taken."""
        own_loss = loss.item()  # On a GPU this is where the step's end is waited for.
        with self._stopwatch.waiting():
            self._losses.append(float(self._world.mean(own_loss, weight=len(x))))
        self._laps.append(self._stopwatch.stop())
        step = len(self._losses)
        if step <= self._num_compared:
            self._compare(x, y)
        elif is_calibration(step, self._recipe.steps):
            self._calibrate(x, y)
        self._show(step)

    def conclude(self) -> Findings | None:
        """What was found, on worker 0."""
        digests = self._world.gather(digest(self._net))
        waiting = self._world.gather(waiting_share(self._timed_laps())) if self._sees_waiting else None
        if not self._world.is_main:
            return None
        assert self._parity is not None
        with _threads_of_all(self._world):
            sample = self._net.write(_PROMPT, _SAMPLE_BYTES, seed=self._recipe.seed)
        return Findings(
            workers=self._world.size,
            steps=self._recipe.steps,
            losses=tuple(self._losses),
            digests=tuple(digests),
            parity=self._parity,
            speed=self._speed(),
            waiting=None if waiting is None else tuple(waiting),
            sample=sample,
        )

    def __enter__(self) -> "Examiner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopwatch.close()
        if self._progress is not None:
            self._progress.end()

    def _compare(self, x: Tensor, y: Tensor) -> None:
        """Let worker 0 take the step by itself, on what all workers had; after the last, compare the weights."""
        parts = self._world.gather((x.cpu(), y.cpu()))
        if self._single is not None:
            whole_x, whole_y = (torch.cat(part).to(x.device) for part in zip(*parts, strict=True))
            with _threads_of_all(self._world):
                self._single_losses.append(self._single.step(whole_x, whole_y))
            if len(self._single_losses) == self._num_compared:
                self._parity = Parity(
                    steps=self._num_compared,
                    batch=len(whole_x),
                    weights=largest_difference(self._net.parameters(), self._single.net.parameters()),
                    losses=largest_difference(map(torch.tensor, self._losses), map(torch.tensor, self._single_losses)),
                )
        self._world.barrier()
        self._free_since = time.perf_counter()

    def _calibrate(self, x: Tensor, y: Tensor) -> None:
        """Let worker 0 take steps alone: on its part, sending nothing, while the others do nothing."""
        self._world.barrier()
        if self._single is not None:
            self._part = len(x)
            self._lone_steps += [self._single.time(x, y) for _ in range(_LONE_STEPS)][1:]
        self._world.barrier()

    def _show(self, step: int) -> None:
        if self._progress is None:
            return
        laps = self._laps[1:][-_RECENT:] or self._laps  # The first is no measure: workers start at different times.
        lap_seconds = sum(lap.seconds for lap in laps) / len(laps)
        num_free = step - self._num_compared
        per_step = (time.perf_counter() - self._free_since) / num_free if num_free > 0 else lap_seconds
        self._progress.show(
            Moment(
                step=step,
                steps=self._recipe.steps,
                loss=self._losses[-1],
                samples_per_s=self._recipe.batch / lap_seconds,
                waiting=waiting_share(laps) if self._sees_waiting else None,
                seconds_left=per_step * (self._recipe.steps - step),
            )
        )

    @property
    def _sees_waiting(self) -> bool:
        return self._world.device.type == "cpu"

    def _timed_laps(self) -> list[Lap]:
        """The steps that count for speed: in those before, memory is touched first and buckets are laid out anew."""
        return self._laps[self._num_compared :]

    def _speed(self) -> Speed | None:
        laps = self._timed_laps()
        if not laps or not self._lone_steps:
            return None
        return Speed(
            samples=self._recipe.batch,
            together=statistics.median(lap.seconds for lap in laps),
            num_together=len(laps),
            part=self._part,
            alone=statistics.median(step.seconds for step in self._lone_steps),
            num_alone=len(self._lone_steps),
            core_share=statistics.median(step.cpu_seconds / step.seconds for step in self._lone_steps),
        )


def is_calibration(step: int, steps: int) -> bool:
    """Whether worker 0 takes lone steps after `step`: about every 25 steps, and twice at least in a short run."""
    return step % max(1, min(_PERIOD, steps // 4)) == 0


def waiting_share(laps: Sequence[Lap]) -> float:
    """The part of the time of these steps that was spent waiting."""
    return sum(lap.waiting for lap in laps) / sum(lap.seconds for lap in laps) if laps else 0.0


@contextmanager
def _threads_of_all(world: World) -> Iterator[None]:
    """A block in which this worker computes with the threads of all workers of its host, who are idle."""
    before = torch.get_num_threads()
    torch.set_num_threads(before * world.local_size)
    try:
        yield
    finally:
        torch.set_num_threads(before)
