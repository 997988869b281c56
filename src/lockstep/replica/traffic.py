"""Buckets on their way: how each is sent and waited for, and who is told that it has arrived.

    send             hand a bucket to the backend, or to the user's communication hook
    vacate           wait for the bucket whose memory another is about to use
    settle           wait until its sum is there, and let the placement take what this worker keeps of it
    tell_arrivals    of buckets that came while others were being filled, to those who listen

Which bucket travels when is the reducer's.
"""

from collections.abc import Sequence
from typing import Any

from lockstep.events import Kind
from lockstep.replica import words
from lockstep.replica.bucket import Bucket
from lockstep.replica.hook import CommHook
from lockstep.replica.placement import Placement
from lockstep.world import World


class Traffic:
    """How the buckets of one replica travel."""

    def __init__(self, world: World, names: Sequence[str], placement: Placement) -> None:
        self._world = world
        self._names = names
        self._placement = placement
        self._hook: CommHook | None = None
        self._told: set[int] = set()
        """Places of buckets that listeners know to have arrived."""

    @property
    def has_hook(self) -> bool:
        """Whether buckets are reduced by a hook of the user's."""
        return self._hook is not None

    def use_hook(self, hook: CommHook) -> None:
        """Reduce buckets by `hook` from now on."""
        self._hook = hook

    def send(self, bucket: Bucket) -> Any:
        """Start the reduction of a bucket; returns what to wait for."""
        if self._hook is not None and bucket.plan.slots:
            return self._hook.launch(bucket)
        return self._placement.send(bucket)

    def settle(self, bucket: Bucket, step: int) -> None:
        """Return when this worker has what it keeps of a bucket that was sent."""
        self._await(bucket, step)
        self._placement.settle(bucket)
        bucket.work = None  # It may hold copies of the bucket: gloo's reduce-scatter does.
        bucket.is_settled = True
        self._tell_reduced(bucket, step)

    def vacate(self, bucket: Bucket, step: int) -> bool:
        """Whether `bucket` has its memory for itself; waits for the one before it if that is on its way."""
        before = bucket.previous
        if before is None or before.is_settled:
            return True
        if not before.is_launched:
            return False
        self.settle(before, step)
        return True

    def is_vacant(self, bucket: Bucket, step: int) -> bool:
        """The same, without waiting."""
        before = bucket.previous
        if before is not None and before.is_launched and not before.is_settled and not before.work.is_completed():
            return False
        return self.vacate(bucket, step)

    def _await(self, bucket: Bucket, step: int) -> None:
        if self._hook is not None and bucket.plan.slots:
            self._hook.wait(bucket, self._world, words.reducing(self._names, bucket, step))
        else:
            self.await_plainly(bucket, step)

    def await_plainly(self, bucket: Bucket, step: int) -> None:
        """Return when the sum is in a bucket that no hook has seen; on a GPU the current stream waits."""
        if bucket.flat.device.type == "cpu":
            self._world.wait(bucket.work, words.reducing(self._names, bucket, step))
        elif bucket.work is not None:
            bucket.work.wait()

    def tell_arrivals(self, launched: Sequence[Bucket], step: int) -> None:
        """Tell of buckets that have arrived while others were being filled: nobody has waited for them.

        Not on a GPU, where the host is ahead of what it queues, and its own clock says nothing.
        """
        if self._world.device.type != "cpu":
            return
        for bucket in launched:
            if bucket.place not in self._told and bucket.work is not None and bucket.work.is_completed():
                self._tell_reduced(bucket, step)

    def _tell_reduced(self, bucket: Bucket, step: int) -> None:
        if self._world.events and bucket.place not in self._told:
            self._told.add(bucket.place)
            self._world.events.emit(Kind.REDUCED, step, bucket.place, bucket.num_bytes)

    def reset(self) -> None:
        """The step is over, or void."""
        self._told.clear()
