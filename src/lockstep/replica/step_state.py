"""What is known of a step: on this worker while it is in flight, and on all of them when it ends.

`StepState` is this worker's own. `StepNotes` are numbers that travel with the gradients and are summed like them: each
worker writes its own, and reads the sum: how much was counted, whether some worker's backward pass failed, which
parameters were used anywhere, which buffers were changed. In host memory they ride in the tail of the bucket that
closes the step, so they cost no message. On a GPU only the weight rides there; the rest goes through host memory, so
that reading it never makes the host wait for the device.
"""

import enum
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import StepVoid, UsageError
from lockstep.replica.bucket import Bucket
from lockstep.replica.collectives import finish
from lockstep.weight import Factor, Weight
from lockstep.world import World


class PassPhase(enum.Enum):
    """Where a replica is in its step."""

    BETWEEN = "between two steps"
    """Loading, updating, evaluating, or in the script's own code."""
    FORWARD = "forward"
    """The model was called, and its backward pass has not begun."""
    ACCUMULATING = "accumulating"
    """The same under `no_sync`, where the backward pass sends nothing."""
    BACKWARD = "backward"
    REDUCING = "reducing"
    """The backward pass has ended here, and what has not arrived is waited for."""


@dataclass(frozen=True, slots=True)
class PassProgress:
    """How far a replica has come, in plain values."""

    step: int = 0
    phase: PassPhase = PassPhase.BETWEEN
    num_launched: int = 0
    """How many buckets of the step in flight have left."""
    num_buckets: int = 0
    lacking: tuple[str, ...] = ()
    """Parameters of the next bucket whose gradients this worker has not computed yet."""


class StepState:
    """The step in flight; a fresh one follows when it has come to its end, or to nothing."""

    def __init__(self) -> None:
        self.is_expected = False
        """Whether gradients that arrive are this replica's: not another wrapper's, or of the module by itself."""
        self.syncs = True
        self.weight: Weight | None = None
        """Of the batch that the pass is over."""
        self.pass_end: weakref.ref[Any] | None = None
        """The end of the backward pass that sends, once it has begun; dead if the pass has raised."""
        self.has_arrived = False
        self.observed: list[int] = []
        """Parameters in the order of their gradients; kept in the first step, and in those that are sampled."""
        self.touched: set[int] = set()
        """Parameters whose gradients were accumulated here and are in no bucket yet."""
        self.late: set[int] = set()
        """Parameters whose gradients no bucket of this step can take."""
        self.spent_ns = 0
        """In filling and launching buckets, if there is a listener."""


@dataclass(frozen=True, slots=True)
class JoinMode:
    """What it means for a step that some workers have no batch: see `DataParallel.join`."""

    is_uneven: bool
    """Whether the total weight is that of the workers with a batch, known only after the reduction."""


_COUNTED, _VOID, _EXTRA, _ACTIVE, _EXPLICIT = range(5)
NUM_FLAGS = 5


def tail_numel(num_params: int, num_buffers: int) -> int:
    """How many numbers there are."""
    return NUM_FLAGS + num_params + num_buffers


class StepNotes:
    """This worker's notes before the reduction, the sum of all workers' after it."""

    def __init__(self, world: World, closing: Bucket, num_params: int, num_buffers: int) -> None:
        self._world = world
        self._tail = closing.flat[closing.plan.tail_offset :]
        self._rides = self._tail.device.type == "cpu"
        numel = tail_numel(num_params, num_buffers)
        self._values = self._tail[:numel] if self._rides else torch.zeros(numel)
        self._num_params = num_params
        self._sums: list[float] = []

    def write(
        self,
        counted: Factor,
        unused: Sequence[int] = (),
        changed: Sequence[int] = (),
        *,
        explicit: bool = False,
        extra: bool = False,
        active: bool = True,
        void: bool = False,
    ) -> None:
        """Say what this worker did in the step."""
        used = [float(active and not void)] * self._num_params
        for index in unused:
            used[index] = 0.0
        values = [0.0, void, extra, active, explicit, *used, *[0.0] * (len(self._values) - NUM_FLAGS - len(used))]
        for index in changed:
            values[NUM_FLAGS + len(used) + index] = 1.0
        self._values.copy_(torch.tensor(values))
        self._tail[_COUNTED] = counted

    def exchange(self) -> None:
        """Return when the sums can be read, but for those that ride: they arrive with the closing bucket."""
        if not self._rides:
            group = self._world.host_group
            send = partial(dist.all_reduce, self._values, group=group, async_op=True)
            finish(send, self._world, self._values.device, "agreeing on the end of a step")

    def read(self) -> None:
        """Everything has arrived: see what all workers wrote."""
        self._sums = self._values.tolist()

    def require_valid(self, step: int) -> None:
        """Raise on all workers if the backward pass of one failed, or if some gave a weight and others did not."""
        world = self._world
        if round(self._sums[_VOID]):
            # Every worker asks, and those that failed say so: see Reducer.abandon.
            failed = [str(rank) for rank, has_failed in enumerate(world.gather_json(False)) if has_failed]
            raise StepVoid(
                f"worker {world.rank}: the backward pass of worker {', '.join(failed)} failed in step {step}, so this "
                "step's gradients are void on every worker. Its own output says why. To go on, call "
                "optimizer.zero_grad() and take the next batch, on every worker."
            )
        num_explicit = round(self._sums[_EXPLICIT])
        if num_explicit not in (0, self.num_active):
            raise UsageError(
                f"worker {world.rank}: {num_explicit} of {self.num_active} workers called lockstep.backward(loss, "
                "weight=...) in this step and the others loss.backward(), so their gradients have no common weight. "
                "Use the same call on every worker."
            )

    @property
    def counted(self) -> Tensor:
        """The sum of what was counted, as a share of what was expected; in the bucket, until the next step."""
        return self._tail[_COUNTED]

    @property
    def has_extra(self) -> bool:
        """Whether some worker has gradients that no bucket of this step took."""
        return self._sums[_EXTRA] > 0

    @property
    def num_active(self) -> int:
        """How many workers had a batch."""
        return round(self._sums[_ACTIVE])

    @property
    def is_explicit(self) -> bool:
        """Whether the workers gave weights of their own."""
        return self._sums[_EXPLICIT] > 0

    def used(self) -> list[bool]:
        """For every parameter, in order, whether any worker has a gradient for it."""
        return [total > 0 for total in self._sums[NUM_FLAGS : NUM_FLAGS + self._num_params]]

    def changed(self) -> list[int]:
        """Numbers of the buffers that some worker changed."""
        return [number for number, total in enumerate(self._sums[NUM_FLAGS + self._num_params :]) if total]
