"""Which buckets of a step have left: strictly in the order of the plan, and the one that closes the step last."""

from collections.abc import Sequence

from lockstep.comm.shm.work import beside_the_pass, waited_for
from lockstep.events import Kind
from lockstep.replica.bucket import Bucket
from lockstep.replica.buckets import Buckets
from lockstep.replica.gauge import Gauge
from lockstep.replica.notes import Notes
from lockstep.replica.partials import Partials
from lockstep.replica.traffic import Traffic
from lockstep.replica.weighing import Weighing
from lockstep.world import World


class Departures:
    """The buckets of one replica, leaving."""

    def __init__(
        self, world: World, buckets: Buckets, traffic: Traffic, weighing: Weighing, partials: Partials | None
    ) -> None:
        self._world = world
        self._buckets = buckets
        self._traffic = traffic
        self._weighing = weighing
        self._partials = partials
        """Sums of earlier shards, where all is added along a tree."""
        self.gauge: Gauge | None = None
        """Measures gradients on their way, where somebody wants to know."""
        self._num_launched = 0

    @property
    def left(self) -> Sequence[Bucket]:
        """Those that have."""
        return self._buckets.all[: self._num_launched]

    @property
    def staying(self) -> Sequence[Bucket]:
        """Those that have not yet; the last one closes the step."""
        return self._buckets.all[self._num_launched :]

    def launch_full(self, step: int) -> None:
        """Launch, in turn, the buckets that are full, if they leave early; not the one that closes the step."""
        while self._buckets.leave_early and self._num_launched < len(self._buckets.all) - 1:
            bucket = self._buckets.all[self._num_launched]
            if not (bucket.is_ready() or bucket.is_apart):
                return
            self.launch(bucket, step)

    def launch(self, bucket: Bucket, step: int, *, is_over: bool = False) -> None:
        """Let the next one leave, with what is in it; `is_over`: nothing more will come in this pass."""
        self._num_launched += 1
        self._traffic.vacate(bucket, step)
        if bucket.is_apart:
            bucket.is_launched = bucket.is_settled = True
            return
        bucket.put_waiting(self._weighing.factor, keeps=is_over)
        if self._partials is not None:
            self._partials.complete(bucket)
        if self.gauge is not None:
            self.gauge.see_own(step, bucket)
        has_time = self._buckets.leave_early and bucket is not self._buckets.closing
        is_awaited = is_over and not has_time and not self._traffic.has_hook
        with waited_for() if is_awaited else beside_the_pass():
            bucket.launch(self._traffic.send)
        if self._world.events:
            self._world.events.emit(Kind.LAUNCHED, step, bucket.place, bucket.num_bytes)
            self._traffic.tell_arrivals(self.left, step)

    def exchange(self, notes: Notes, step: int) -> None:
        """Send what is left, and wait for everything."""
        for bucket in self.staying:
            self.launch(bucket, step, is_over=True)
        notes.launch()
        notes.wait()
        for bucket in self._buckets.all:
            if not bucket.is_settled:
                self._traffic.settle(bucket, step)
        notes.read()

    def reset(self) -> None:
        """Ready for the next step."""
        self._num_launched = 0
