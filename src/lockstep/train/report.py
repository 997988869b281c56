"""What the workers tell each other of a step, in one small message: the shards' losses and weights, the units' norms.

Every number has one place in a row and one worker that writes it there; the others leave a zero. So the sum over the
workers is exact, whatever their number, and what is computed from the row is computed alike by all.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.replica.unit_norms import Piece
from lockstep.replica.units import Units
from lockstep.world import World


class Report:
    """The row of one step."""

    def __init__(self, world: World, shards: int, units: Units) -> None:
        self._world, self._units = world, units
        self._row = torch.zeros(2 * shards + units.total, dtype=torch.float64, device=world.device)
        self._losses, self._weights, self._norms = self._row.split([shards, shards, units.total])

    def begin(self) -> None:
        """A step begins."""
        self._row.zero_()

    def add(self, shard: int, loss: Tensor, weight: float | Tensor) -> None:
        """What this worker's `shard` gave."""
        self._losses[shard].copy_(loss.detach().reshape(()))
        if isinstance(weight, Tensor):
            self._weights[shard].copy_(weight)
        else:
            self._weights[shard].fill_(weight)  # An assignment would have the host wait for the device.

    def prepare(self, pieces: Sequence[Piece]) -> None:
        """`end` is about to be recorded as a CUDA graph, with these."""
        self._units.norms(pieces, self._norms)

    def end(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor, Tensor]:
        """Loss over all shards, their weight, and the norm of the gradients, of which this worker has `pieces`."""
        self._units.norms(pieces, self._norms)
        if self._world.size > 1:
            group = self._world.host_group if self._row.device.type == "cpu" else self._world.group
            work = dist.all_reduce(self._row, group=group, async_op=True)
            self._world.await_on_device(work, "reporting on a step")
        weight = self._weights.sum()
        counted = torch.where(self._weights == 0, 0.0, self._losses * self._weights)
        loss = counted.sum() / torch.where(weight == 0, 1.0, weight)
        return loss, weight, self._norms.square().sum().sqrt()
