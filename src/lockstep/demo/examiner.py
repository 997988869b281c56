"""Looks on while a model is trained: compares with one worker, watches, shows progress, and changes nothing."""

import copy
import hashlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import lockstep
from lockstep.demo.gpt import ByteGPT, Recipe, loss_of
from lockstep.replica.data_parallel import DataParallel
from lockstep.terminal import ProgressLine
from lockstep.watching.collector import Summary
from lockstep.watching.watcher import Watcher
from lockstep.world import World

NUM_COMPARED = 5
"""How many of the first steps are compared with one worker's."""
TOLERANCE = 1e-5
"""Relative difference that float32 sums in another order may make within the first steps; measured: about 1e-6.

A text of one to three different bytes may come to 1e-5: its gradients soon are so small that Adam makes steps of their
rounding."""
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
class Findings:
    """Everything that worker 0 reports at the end of a run."""

    workers: int
    steps: int
    losses: tuple[float, ...]
    """Of every step, over the whole global batch."""
    digests: tuple[str, ...]
    """Of every worker's weights after the last step."""
    parity: Parity
    summary: Summary
    """What watching has found of the steps after those that were compared."""
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
    def is_as_promised(self) -> bool:
        """Whether every check has passed. Speed is measured, not judged."""
        return self.are_identical and self.parity.is_close and self.is_finite


class Examiner:
    """One per worker, around its training loop. The phases, on every worker and in order:

    end_step    once per step; in the first ones worker 0 takes the same step by itself, on the whole batch
    conclude    after the last step: compare the replicas, sum up
    """

    def __init__(self, world: World, net: ByteGPT, recipe: Recipe) -> None:
        """`net` is the initial model, not wrapped yet: it is copied for the comparison."""
        self._world = world
        self._net = net
        self._recipe = recipe
        self._num_compared = min(NUM_COMPARED, recipe.steps)
        self._single = copy.deepcopy(net)
        """Takes the first steps too, on worker 0: a plain model, a plain optimizer, nothing of this library in it."""
        self._optimizer, self._schedule = recipe.optimizer(self._single)
        self._single_losses: list[float] = []
        self._progress = ProgressLine() if world.is_main else None
        self._losses: list[tuple[int, float]] = []
        """Of this worker's part of every step: how many samples it had, and their loss."""
        self._parity: Parity | None = None
        self._watcher: Watcher | None = None
        self._watched_since = time.perf_counter()

    def end_step(self, model: DataParallel, x: Tensor, y: Tensor, loss: Tensor) -> None:
        """The step from this part, with this loss, has been taken."""
        self._losses.append((len(x), loss.item()))  # On a GPU this is where the step's end is waited for.
        step = len(self._losses)
        if step <= self._num_compared:
            self._compare(x, y)
        if step == self._num_compared:
            # In the steps that were compared, memory is touched first and workers wait for worker 0.
            self._watcher = lockstep.watch(model, progress=False, hang_deadline=None)
            self._watched_since = time.perf_counter()
        if self._progress is not None:
            self._progress.show(step, self._recipe.steps, self._words(step))

    def conclude(self) -> Findings | None:
        """What was found, on worker 0."""
        assert self._watcher is not None
        self._watcher.close()
        losses, digests = self._mean_losses(), self._world.gather_json(digest(self._net))
        if not self._world.is_main:
            return None
        assert self._parity is not None
        # Not with the threads of the others, who are idle: beside other programs threads wait for one another in each
        # of these thousands of small operations, and 40 bytes of the small model took 19 s instead of 0.5 s.
        sample = self._net.write(_PROMPT, _SAMPLE_BYTES, seed=self._recipe.seed)
        summary, (workers, steps) = self._watcher.summary(), (self._world.size, self._recipe.steps)
        return Findings(workers, steps, losses, tuple(digests), self._parity, summary, sample)

    def __enter__(self) -> "Examiner":
        return self

    def __exit__(self, *error: object) -> None:
        if self._progress is not None:
            self._progress.close()

    def _compare(self, x: Tensor, y: Tensor) -> None:
        """Let worker 0 take the step by itself, on what all workers had; after the last, compare the weights."""
        parts = self._world.gather_tensors([x, y])
        is_last = len(self._losses) == self._num_compared
        losses = self._mean_losses() if is_last else ()
        if self._world.is_main:
            whole_x, whole_y = (torch.cat(part).to(x.device) for part in zip(*parts, strict=True))
            loss = loss_of(self._single(whole_x), whole_y)
            loss.backward()
            self._optimizer.step()
            self._schedule.step()
            self._optimizer.zero_grad()
            self._single_losses.append(loss.item())
            if is_last:
                self._parity = Parity(
                    steps=self._num_compared,
                    batch=len(whole_x),
                    weights=largest_difference(self._net.parameters(), self._single.parameters()),
                    losses=largest_difference(map(torch.tensor, losses), map(torch.tensor, self._single_losses)),
                )
        self._world.barrier()

    def _mean_losses(self) -> tuple[float, ...]:
        """Of every step so far, over the whole global batch; on every worker, at once."""
        steps = zip(*self._world.gather_json(self._losses), strict=True)
        return tuple(sum(size * loss for size, loss in step) / sum(size for size, _ in step) for step in steps)

    def _words(self, step: int) -> list[str]:
        """How the training goes, the most important first."""
        loss = f"loss {self._losses[-1][1]:.3f}"
        if step <= self._num_compared:
            return [loss]
        per_step = (time.perf_counter() - self._watched_since) / (step - self._num_compared)
        minutes, seconds = divmod(round(per_step * (self._recipe.steps - step)), 60)
        return [loss, f"{self._recipe.batch / per_step:.1f} samples/s", f"{minutes}:{seconds:02} left"]


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
