"""Looks on while a model is trained: measures, compares with one worker, shows progress, and changes nothing."""

import copy
import hashlib
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.demo.gpt import ByteGPT, Recipe, loss_of
from lockstep.events import Event, Events, Kind
from lockstep.terminal import ProgressLine
from lockstep.world import World

NUM_COMPARED = 5
"""How many of the first steps are compared with one worker's."""
TOLERANCE = 1e-5
"""Relative difference that float32 sums in another order may make within the first steps; measured: about 1e-6.

A text of one to three different bytes may come to 1e-5: its gradients soon are so small that Adam makes steps of their
rounding."""
_PERIOD = 25
"""Steps from one calibration to the next."""
_LONE_STEPS = 3
"""Steps of a calibration; the first brings the caches back and does not count."""
_RECENT = 10
"""Steps that the progress shows the speed of."""
_PROMPT = b"def "
_SAMPLE_BYTES = 240


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


class Examiner:
    """One per worker, around its training loop. The phases, on every worker and in order:

    begin_step, end_step    once per step: time it and average its loss; then one of
        compare             the first steps: worker 0 takes the same step by itself, on the whole batch
        calibrate           every so many steps: worker 0 takes steps on its part while the others are idle
    conclude                after the last step: compare the replicas, sum up
    """

    def __init__(self, world: World, net: ByteGPT, recipe: Recipe) -> None:
        """`net` is the initial model, not wrapped yet: it is copied for the comparison."""
        self._world = world
        self._net = net
        self._recipe = recipe
        self._num_compared = min(NUM_COMPARED, recipe.steps)
        self._single = Single(copy.deepcopy(net), recipe) if world.is_main else None
        self._progress = ProgressLine() if world.is_main else None
        self._stopwatch = Stopwatch(world.events)
        self._losses: list[float] = []
        self._laps: list[Lap] = []
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
        if self._progress is not None:
            self._progress.show(step, self._recipe.steps, self._words(step))

    def conclude(self) -> Findings | None:
        """What was found, on worker 0."""
        # In the steps that were compared, memory is touched first and buckets are laid out anew: they do not count.
        laps = self._laps[self._num_compared :]
        digests = self._world.gather_json(digest(self._net))
        waiting = self._world.gather_json(waiting_share(laps)) if self._sees_waiting else None
        if self._single is None:
            return None
        assert self._parity is not None
        # Not with the threads of the others, who are idle: beside other programs threads wait for one another in each
        # of these thousands of small operations, and 40 bytes of the small model took 19 s instead of 0.5 s.
        sample = self._net.write(_PROMPT, _SAMPLE_BYTES, seed=self._recipe.seed)
        return Findings(
            workers=self._world.size,
            steps=self._recipe.steps,
            losses=tuple(self._losses),
            digests=tuple(digests),
            parity=self._parity,
            speed=self._single.speed(self._recipe.batch, laps),
            waiting=None if waiting is None else tuple(waiting),
            sample=sample,
        )

    def __enter__(self) -> "Examiner":
        return self

    def __exit__(self, *error: object) -> None:
        self._stopwatch.close()
        if self._progress is not None:
            self._progress.close()

    def _compare(self, x: Tensor, y: Tensor) -> None:
        """Let worker 0 take the step by itself, on what all workers had; after the last, compare the weights."""
        parts = self._world.gather_tensors([x, y])
        if self._single is not None:
            whole_x, whole_y = (torch.cat(part).to(x.device) for part in zip(*parts, strict=True))
            self._single.step(whole_x, whole_y)
            if len(self._losses) == self._num_compared:
                losses = map(torch.tensor, self._losses), map(torch.tensor, self._single.losses)
                self._parity = Parity(
                    steps=self._num_compared,
                    batch=len(whole_x),
                    weights=largest_difference(self._net.parameters(), self._single.net.parameters()),
                    losses=largest_difference(*losses),
                )
        self._world.barrier()
        self._free_since = time.perf_counter()

    def _calibrate(self, x: Tensor, y: Tensor) -> None:
        """Let worker 0 take steps alone: on its part, sending nothing, while the others do nothing."""
        self._world.barrier()
        if self._single is not None:
            self._single.time(x, y)
        self._world.barrier()

    def _words(self, step: int) -> list[str]:
        """How the training goes, the most important first."""
        laps = self._laps[1:][-_RECENT:] or self._laps  # The first is no measure: workers start at different times.
        lap_seconds = sum(lap.seconds for lap in laps) / len(laps)
        num_free = step - self._num_compared
        per_step = (time.perf_counter() - self._free_since) / num_free if num_free > 0 else lap_seconds
        minutes, seconds = divmod(round(per_step * (self._recipe.steps - step)), 60)
        waiting = [f"communication {100 * waiting_share(laps):.1f} %"] if self._sees_waiting else []
        speed = f"{self._recipe.batch / lap_seconds:.1f} samples/s"
        return [f"loss {self._losses[-1]:.3f}", speed, *waiting, f"{minutes}:{seconds:02} left"]

    @property
    def _sees_waiting(self) -> bool:
        return self._world.device.type == "cpu"


class Single:
    """The same training on one worker: a plain model and a plain optimizer, with nothing of this library in them.

    Worker 0 trains it beside the real one. First it takes the first steps on the same global batches, to be compared
    with. From then on only its speed counts: what it learns is thrown away, and nothing of the real training depends
    on it.
    """

    def __init__(self, net: ByteGPT, recipe: Recipe) -> None:
        self.net = net
        self.losses: list[float] = []
        self._optimizer, self._schedule = recipe.optimizer(net)
        self._part = 0
        self._timed: list[tuple[float, float]] = []
        """Seconds of each step that waited for nobody, and what its thread had of a core in that time."""

    def step(self, x: Tensor, y: Tensor) -> None:
        """One update from this batch."""
        loss = loss_of(self.net(x), y)
        loss.backward()
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())

    def time(self, x: Tensor, y: Tensor) -> None:
        """Some updates from this batch, timed."""
        self._part = len(x)
        for number in range(_LONE_STEPS):
            start, cpu_start = time.perf_counter(), time.thread_time()
            self.step(x, y)
            if number:
                self._timed.append((time.perf_counter() - start, time.thread_time() - cpu_start))

    def speed(self, batch: int, laps: "Sequence[Lap]") -> Speed | None:
        """These steps of all workers, beside the timed ones; None if there are none."""
        if not laps or not self._timed:
            return None
        return Speed(
            samples=batch,
            together=statistics.median(lap.seconds for lap in laps),
            num_together=len(laps),
            part=self._part,
            alone=statistics.median(seconds for seconds, _ in self._timed),
            num_alone=len(self._timed),
            core_share=statistics.median(cpu_seconds / seconds for seconds, cpu_seconds in self._timed),
        )


@dataclass(frozen=True, slots=True)
class Lap:
    """One step."""

    seconds: float
    """All of it."""
    waiting: float
    """Seconds of it in which this worker had nothing to do but wait for the others or for what they sent."""


class Stopwatch:
    """Where a step's time goes, on this worker: `start`, the step, `stop`.

    It listens for how long the gradients were waited for after each backward pass; what was sent while that still
    ran has cost no waiting. Other waits are put into a `waiting` block. On a GPU, which waits by itself, none of
    this is seen here.
    """

    def __init__(self, events: Events) -> None:
        self._started = 0.0
        self._waiting = 0.0
        self._waiting_since = 0.0
        self.close = events.subscribe(self._hear)
        """Stop listening."""

    def start(self) -> None:
        """A step begins."""
        self._waiting = 0.0
        self._started = time.perf_counter()

    def stop(self) -> Lap:
        """A step has ended."""
        return Lap(time.perf_counter() - self._started, self._waiting)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which the others are waited for."""
        since = time.perf_counter()
        yield
        self._waiting += time.perf_counter() - since

    def _hear(self, event: Event) -> None:
        if event.kind is Kind.WAITING:
            self._waiting_since = event.time_ns / 1e9
        elif event.kind is Kind.SYNCED:
            self._waiting += event.time_ns / 1e9 - self._waiting_since


def is_calibration(step: int, steps: int) -> bool:
    """Whether worker 0 takes lone steps after `step`: about every 25 steps, and twice at least in a short run."""
    return step % max(1, min(_PERIOD, steps // 4)) == 0


def waiting_share(laps: Sequence[Lap]) -> float:
    """The part of the time of these steps that was spent waiting."""
    return sum(lap.waiting for lap in laps) / sum(lap.seconds for lap in laps) if laps else 0.0


def digest(net: nn.Module) -> str:
    """SHA-256 over the names and bytes of all weights and buffers."""
    sha = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        sha.update(name.encode())
        sha.update(tensor.detach().cpu().contiguous().numpy())
    return sha.hexdigest()


def largest_difference(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest distance of two tensors, relative to the length of the second; not a number if one is none.

    By the whole tensor, not by its elements: Adam's step for an element whose gradient is near zero goes one way or
    the other by rounding alone.
    """
    found = []
    for a, b in zip(ours, theirs, strict=True):
        exact = b.detach().double()
        found.append(torch.linalg.vector_norm(a.detach().double() - exact) / torch.linalg.vector_norm(exact))
    return torch.stack(found).max().item()
