"""What a wrapped model says of its passes to those who listen; nothing here runs while nobody does."""

from typing import Any

import torch
from torch import Tensor

from lockstep.data import tree
from lockstep.events import Events, Kind
from lockstep.world import World


def num_samples(world: World, inputs: Any) -> float:
    """How many samples a forward pass sees: what the sharded loader cut, else the length of the first tensor."""
    weight = world.weight
    if weight is not None and weight.total is not None and not isinstance(weight.value, Tensor):
        return float(weight.value)
    first = next((leaf for leaf in tree.leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim), None)
    return float(len(first)) if first is not None else 0.0


class QuietPass:
    """Tells of a backward pass that sends nothing: when its first gradient is due, and when it has ended.

    Called by the hook of each output of the model. The engine calls what is queued here after all else.
    """

    def __init__(self, events: Events, step: int) -> None:
        self._events, self._step = events, step
        self._has_begun = False

    def __call__(self) -> None:
        """A gradient has come to an output of the model."""
        if self._has_begun:
            return
        self._has_begun = True
        self._events.emit(Kind.BACKWARD, self._step)
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._has_begun = False  # The graph may be kept, and walked again.
        self._events.emit(Kind.ENDED, self._step)
