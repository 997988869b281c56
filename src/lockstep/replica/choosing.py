"""`wire="auto"`: a reduction that finds out in its first steps which wires pay, and uses those from then on.

    two passes   plain, the second of them watched: when is each bucket ready?
    measure      what messages cost here, and what each wire computes
    try          the most promising for a few passes each (see wire/auto.py), all of them timed
    settle       on the fastest

All workers decide from the same numbers, since they exchange what they have measured. Where buckets are laid out anew
(after the first step, when parameters are unfrozen) it all begins again.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from lockstep.replica.bucket import Bucket
from lockstep.replica.coded import AUTO, Coded
from lockstep.wire import Full, Wire
from lockstep.wire.auto import Auto, Costs, Link, best_of, proposals
from lockstep.wire.exchange import rehearse
from lockstep.wire.protocol import Route
from lockstep.world import World

PROBE_BYTES = (1 << 14, 1 << 20, 8 << 20, 64 << 20)
"""Messages that show what the link does: the first for its latency, a longer one while they are too quick to tell."""
SLOW_ENOUGH_S = 0.01


@dataclass(frozen=True, slots=True)
class Trial:
    """Something that was tried."""

    wires: tuple[Wire, ...]
    """For each bucket."""
    predicted_s: float
    """From the beginning of the backward pass until all gradients are in place."""
    seconds: float
    """The same as measured on the slowest worker: the median pass."""

    def __str__(self) -> str:
        return f"{_names(self.wires)} {1e3 * self.seconds:.1f} ms (predicted {1e3 * self.predicted_s:.1f})"


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen, and why; the same on every worker."""

    wires: tuple[Wire, ...]
    """For each bucket, in the order in which they are sent."""
    tried: tuple[Trial, ...]
    """The first without any encoding."""
    link: Link
    backward_s: float
    """The backward pass alone."""
    exposed_s: float
    """How much longer a pass takes without any encoding: what a wire can win."""

    def __str__(self) -> str:
        return (
            f'wire="auto" chose {_names(self.wires)}. The link takes {1e3 * self.link.latency_s:.2f} ms a message and '
            f"{8e-9 * self.link.bytes_per_s:.3g} Gbit/s; sending plainly takes {1e3 * self.exposed_s:.1f} ms beyond "
            f"the {1e3 * self.backward_s:.1f} ms of a backward pass. Tried: {'; '.join(map(str, self.tried))}."
        )


class Choosing(Coded):
    """Sums of all workers, by the wires that are found to be the fastest."""

    def __init__(
        self, auto: Auto, world: World, group: dist.ProcessGroup, device: torch.device, names: Sequence[str]
    ) -> None:
        super().__init__(Full(), group, device, names)
        self._auto, self._world, self._device = auto, world, device
        self._clock = _Clock(device)
        self._buckets: list[Bucket] = []
        self._course: Iterator[None] | None = None
        self._pass_s = 0.0
        self.choice: Choice | None = None
        """What was chosen, once it has been."""

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Begin anew."""
        self._wires = (Full(),)
        self._buckets = list(buckets)
        self.choice = None
        super().adopt(buckets)
        self._course = self._choose([bucket for bucket in buckets if bucket.plan.slots])

    def report(self) -> str:
        """What was chosen, and why."""
        return str(self.choice) if self.choice is not None else 'wire="auto" has not chosen yet: it is measuring.'

    def begin(self) -> None:
        """A pass begins."""
        if self._course is not None:
            self._clock.start()

    def all_reduce(self, bucket: Bucket) -> Any:
        """See BucketReduction."""
        if self._course is not None:
            self._clock.stamp(bucket.place)
        return super().all_reduce(bucket)

    def end(self) -> None:
        """A pass has ended: go on in the course of choosing."""
        if self._course is not None:
            self._pass_s = self._clock.stop()
            next(self._course, None)

    def _choose(self, buckets: Sequence[Bucket]) -> Iterator[None]:
        """The course of choosing, one pass after the other."""
        yield
        if not buckets:
            self._course = None
            return
        stamps = dict(self._clock.stamps)
        wires, link = self._auto.wires(), self._probe()
        costs = self._costs(wires, link, buckets, stamps)
        tried = []
        for chosen in proposals(costs):
            self._use([wires[each] for each in chosen])
            yield  # To get warm.
            seconds = []
            for _ in range(self._auto.trial_steps):
                yield
                seconds.append(self._pass_s)
            tried.append((chosen, max(self._world.gather(median(seconds)))))
        best = best_of(tried)
        self._use([wires[each] for each in best])
        trials = [Trial(tuple(wires[each] for each in c), costs.predict(c), seconds) for c, seconds in tried]
        exposed = max(0.0, tried[0][1] - costs.backward_s)
        self.choice = Choice(tuple(wires[each] for each in best), tuple(trials), link, costs.backward_s, exposed)
        self._course = None

    def _use(self, wires: Sequence[Wire]) -> None:
        self._wires = wires
        super().adopt(self._buckets)

    def _costs(
        self, wires: Sequence[Wire], link: Link, buckets: Sequence[Bucket], stamps: Mapping[int, float]
    ) -> Costs:
        """What the workers have measured, on average."""
        shapes = [self.shape(bucket) for bucket in buckets]
        largest = max(buckets, key=lambda bucket: bucket.plan.tail_offset)
        ready = [stamps.get(bucket.place, 0.0) for bucket in buckets]
        mine = [*ready, max(stamps.values(), default=0.0), *(self._per_value(wire, largest) for wire in wires)]
        means = [sum(column) / len(column) for column in zip(*self._world.gather(mine), strict=True)]
        ready, backward, per_value = means[: len(ready)], means[len(ready)], means[len(ready) + 1 :]
        size = self._world.size
        return Costs(
            tuple(ready),
            backward,
            tuple(tuple(each * shape.numel for shape in shapes) for each in per_value),
            tuple(tuple(link.seconds(wire, shape, size) for shape in shapes) for wire in wires),
            steals=self._device.type == "cpu",
        )

    def _per_value(self, wire: Wire, bucket: Bucket) -> float:
        """Seconds of encoding and decoding for one value."""
        if isinstance(wire, Full):
            return 0.0
        shape, flat = self.shape(bucket), bucket.flat_grads.clone()
        go_through = rehearse(wire, shape, flat, self._world.rank, self._world.size)
        go_through()  # To get warm.
        self._clock.start()
        go_through()
        return self._clock.stop() / max(1, shape.numel)

    def _probe(self) -> Link:
        """What messages cost here; all workers send at once."""
        latency = self._message_s(PROBE_BYTES[0])
        for num_bytes in PROBE_BYTES[1:]:
            seconds = self._message_s(num_bytes)
            if seconds > SLOW_ENOUGH_S:
                break
        sent = Route.SUM.num_bytes(num_bytes, self._world.size)
        return Link(latency, sent / max(seconds - latency, 0.1 * seconds, 1e-9))

    def _message_s(self, num_bytes: int) -> float:
        """Seconds of an all-reduce: the mean over the workers, so that all decide alike."""
        message = torch.zeros(num_bytes // 4, device=self._device)
        taken = []
        for _ in range(4):
            self._clock.start()
            work = dist.all_reduce(message, group=self._group, async_op=True)
            self._world.await_on_device(work, "measuring the link")
            taken.append(self._clock.stop())
        return float(mean(self._world.gather(median(taken[1:]))))


class _Clock:
    """Times passes. On a GPU it waits for all that has been queued, which only the first steps of a run can bear."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = 0.0
        self.stamps: dict[int, float] = {}
        """Seconds from the start to each stamp."""
        self._events: dict[int, torch.cuda.Event] = {}

    def start(self) -> None:
        """From now on."""
        self._wait()
        self.stamps, self._events = {}, {}
        if self._device.type == "cuda":
            self.stamp(-1)
        self._began = time.perf_counter()

    def stamp(self, place: int) -> None:
        """The computation has come to this place."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events[place] = event
        else:
            self.stamps[place] = time.perf_counter() - self._began

    def stop(self) -> float:
        """Seconds since the start."""
        self._wait()
        seconds = time.perf_counter() - self._began
        start = self._events.pop(-1, None)
        if start is not None:
            self.stamps = {place: 1e-3 * start.elapsed_time(event) for place, event in self._events.items()}
        return seconds

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def coded_by(wire: Any, world: World, group: dist.ProcessGroup, device: torch.device, names: Sequence[str]) -> Coded:
    """The reduction for what a user gave as `wire`."""
    if wire == AUTO or isinstance(wire, Auto):
        return Choosing(Auto() if wire == AUTO else wire, world, group, device, names)
    return Coded(wire, group, device, names)


def _names(wires: Sequence[Wire]) -> str:
    kinds = {str(wire): sum(1 for each in wires if each == wire) for wire in wires}
    if len(kinds) == 1:
        return next(iter(kinds))
    return ", ".join(f"{kind} for {count} of {len(wires)} buckets" for kind, count in kinds.items())
