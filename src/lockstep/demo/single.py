"""The same training on one worker: a plain model and a plain optimizer, with nothing of this library in them."""

import time
from dataclasses import dataclass

from torch import Tensor

from lockstep.demo.gpt import GPT, loss_of
from lockstep.demo.recipe import Recipe


@dataclass(frozen=True, slots=True)
class LoneStep:
    """How long a step took that waited for nobody."""

    seconds: float
    cpu_seconds: float
    """What its thread had of a core in that time: all of it, unless something else ran there."""


class Single:
    """A copy of the initial model, trained by worker 0 beside the real one.

    First it takes the first steps on the same global batches, to be compared with. From then on only its speed
    counts: what it learns is thrown away, and nothing of the real training depends on it.
    """

    def __init__(self, net: GPT, recipe: Recipe) -> None:
        self.net = net
        self._optimizer, self._schedule = recipe.optimizer(net)

    def step(self, x: Tensor, y: Tensor) -> float:
        """One update from this batch; returns its loss."""
        loss = loss_of(self.net(x), y)
        loss.backward()
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()
        return loss.item()

    def time(self, x: Tensor, y: Tensor) -> LoneStep:
        """One update from this batch, timed."""
        start, cpu_start = time.perf_counter(), time.thread_time()
        self.step(x, y)
        return LoneStep(time.perf_counter() - start, time.thread_time() - cpu_start)
