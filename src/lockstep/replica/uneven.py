"""Workers that run out of batches before the others: `with model.join():`.

A worker that leaves the block early goes on taking part in every step of the others with nothing to add, until a
step in which nobody had anything; that is how all find the end together, with no message of its own. Gradients are
divided by the weight of those who had a batch. At the end the weights and buffers of the worker that made the most
steps become everybody's, since a worker without batches makes no updates.
"""

from types import TracebackType

import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.replica.agreement import broadcast
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.reducer import Reducer
from lockstep.world import World


def require_lone_forward(module: nn.Module) -> None:
    """Raise UsageError if the forward pass needs all workers."""
    if any(isinstance(m, SyncBatchNorm | nn.SyncBatchNorm) for m in module.modules()):
        raise UsageError(
            "model.join() cannot run a model with SyncBatchNorm: its forward pass needs every worker. Give all "
            "workers the same number of batches, as lockstep.shard does."
        )


class Uneven:
    """The block in which workers may have different numbers of batches."""

    def __init__(
        self,
        world: World,
        reducer: Reducer | None,
        state: list[Tensor],
        *,
        divide_by_initial_world_size: bool,
        throw_on_early_termination: bool,
    ) -> None:
        self._world = world
        self._reducer = reducer
        self._state = state
        self._divides_by_size = divide_by_initial_world_size
        self._throws = throw_on_early_termination

    def __enter__(self) -> None:
        if self._reducer is not None:
            self._first_step = self._reducer.step
            attendance = self._reducer.attendance
            attendance.is_uneven = not self._divides_by_size
            attendance.stops_when_uneven = self._throws
            attendance.is_joining = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        reducer = self._reducer
        if reducer is None:
            return
        try:
            if error is None:
                own_steps = reducer.step - self._first_step
                while reducer.shadow():
                    if self._throws:
                        raise UsageError(f"worker {self._world.rank} ran out of batches before the others.")
                self._adopt_most_trained(own_steps, reducer)
        finally:
            attendance = reducer.attendance
            attendance.is_uneven = attendance.is_joining = attendance.stops_when_uneven = False

    def _adopt_most_trained(self, own_steps: int, reducer: Reducer) -> None:
        steps = self._world.gather(own_steps)
        if len(set(steps)) > 1:
            with torch.no_grad():
                broadcast(self._state, self._world, steps.index(max(steps)), reducer.group)
