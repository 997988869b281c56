"""Numbers about the step that travel with the gradients and are summed like them.

Each worker writes its own, and reads the sum: how much was counted, whether somebody's backward pass failed,
which parameters somebody used, which buffers somebody changed. In host memory they ride in the tail of the bucket
that closes the step, so they cost no message. On a GPU only the weight rides there; the rest goes through host
memory, so that reading it never makes the host wait for the device.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm.work import waited_for
from lockstep.replica.bucket import Bucket, Factor
from lockstep.world import World

_COUNTED, _VOID, _EXTRA, _ACTIVE, _EXPLICIT = range(5)
NUM_FLAGS = 5


def tail_numel(num_params: int, num_buffers: int) -> int:
    """How many numbers there are."""
    return NUM_FLAGS + num_params + num_buffers


class Notes:
    """This worker's notes before the reduction, everybody's sum after it."""

    def __init__(self, world: World, closing: Bucket, num_params: int, num_buffers: int) -> None:
        self._world = world
        self._tail = closing.tail
        self._rides = closing.tail.device.type == "cpu"
        numel = tail_numel(num_params, num_buffers)
        self._values = closing.tail[:numel] if self._rides else torch.zeros(numel)
        self._num_params = num_params
        self._own = torch.zeros(numel, dtype=self._values.dtype)
        """What this worker wrote last, but for what it counted;"""
        self._key: object = None
        """and from what: it is nearly always the same."""
        self._sums: list[float] = []
        self._work: Any = None

    def write(
        self,
        counted: Factor,
        unused: Sequence[int],
        changed: Sequence[int],
        *,
        explicit: bool,
        extra: bool = False,
        active: bool = True,
        void: bool = False,
    ) -> None:
        """Say what this worker did in the step."""
        flags, key = (0.0, void, extra, active, explicit), (void, extra, active, explicit, *unused, None, *changed)
        if key != self._key:
            used = [1.0 if active and not void else 0.0] * self._num_params
            for index in unused:
                used[index] = 0.0
            self._own.zero_()
            self._own[: NUM_FLAGS + self._num_params] = torch.tensor([*flags, *used], dtype=self._own.dtype)
            for index in changed:
                self._own[NUM_FLAGS + self._num_params + index] = 1.0
            self._key = key
        self._values.copy_(self._own)
        self._tail[_COUNTED] = counted

    def launch(self) -> None:
        """Send them, unless they ride in the closing bucket."""
        if not self._rides:
            with waited_for():
                self._work = dist.all_reduce(self._values, group=self._world.host_group, async_op=True)

    def wait(self) -> None:
        """Until the host can read the sums; those that ride arrive with the closing bucket."""
        self._world.wait(self._work, "agreeing on the end of a step")
        self._work = None

    def read(self) -> None:
        """Everything has arrived: see what all workers wrote."""
        self._sums = self._values.tolist()

    @property
    def counted(self) -> Tensor:
        """The sum of what was counted, as a share of what was expected; on the bucket's device."""
        return self._tail[_COUNTED].clone()

    @property
    def num_void(self) -> int:
        """How many workers' backward pass failed."""
        return round(self._sums[_VOID])

    @property
    def has_extra(self) -> bool:
        """Whether some worker has gradients that no bucket of this step took."""
        return self._sums[_EXTRA] > 0

    @property
    def num_active(self) -> int:
        """How many workers had a batch."""
        return round(self._sums[_ACTIVE])

    @property
    def num_explicit(self) -> int:
        """How many workers gave a weight of their own."""
        return round(self._sums[_EXPLICIT])

    def is_used(self, index: int) -> bool:
        """Whether any worker has a gradient for the parameter."""
        return self._sums[NUM_FLAGS + index] > 0

    def used(self) -> list[bool]:
        """The same for every parameter, in order."""
        return [total > 0 for total in self._sums[NUM_FLAGS : NUM_FLAGS + self._num_params]]

    def changed(self) -> list[int]:
        """Numbers of the buffers that some worker changed."""
        return [number for number, total in enumerate(self._sums[NUM_FLAGS + self._num_params :]) if total]
