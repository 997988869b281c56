"""Which workers have a batch, where they may run out of them at different steps: set by `with model.join():`."""

import torch
import torch.distributed as dist

from lockstep.errors import UsageError
from lockstep.world import World


class Attendance:
    """What it means for a step that some workers have nothing to add to it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.is_joining = False
        """Whether workers may run out of batches at different steps."""
        self.is_uneven = False
        """Whether the total weight then is that of those who had a batch, known only after the reduction."""
        self.stops_when_uneven = False
        """Whether the first worker without a batch is an error for all."""

    def check(self, num_active: int, *, is_active: bool) -> None:
        """Raise UsageError, on those who had a batch, if somebody had none and that is an error."""
        if self.stops_when_uneven and is_active and num_active < self._world.size:
            raise UsageError(f"worker {self._world.rank}: another worker ran out of batches before this one.")

    def authority(self, *, is_active: bool) -> int:
        """The worker whose buffers count: the first, or the first that still has batches."""
        if not self.is_joining:
            return 0
        mine = torch.tensor(self._world.rank if is_active else self._world.size)
        work = dist.all_reduce(mine, dist.ReduceOp.MIN, group=self._world.host_group, async_op=True)
        self._world.wait(work, "choosing whose buffers count")
        return int(mine) % self._world.size
