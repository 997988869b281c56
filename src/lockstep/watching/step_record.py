"""A step as one worker heard it, and as all workers saw it on one clock. Pure, and without torch.

`record_step` turns the moments of a step into stretches of time. Each moment either begins something or ends it; what
lies between two moments belongs to what was begun last, and what nothing was begun for is `other`. So the stretches of
a step leave no gap and never overlap, whatever a script does. The time between the model's return and its first
gradient (the loss) counts as forward if a backward pass follows.

`combine` puts the records of all workers together. After a worker's backward pass has ended it waits for one bucket
after the other. Until the last worker has launched the bucket, it waits for that worker; from then on, for the network.
What is left when all buckets have arrived (the hand-out, the exchange of buffers) counts as exposed too, since a lone
worker would not have it. Communication is hidden while a bucket that everybody has launched is on its way under this
worker's backward pass: an upper bound, since an arrival is seen when the next bucket is launched, at the latest when
the pass has ended, and on a GPU only then. On a host whose cores also move the bytes, what that takes of the backward
pass is exposed as well; it has no stretch of its own, since it is spread over the pass.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

from lockstep.events import Event, Kind

SHARES = ("data", "copy", "forward", "backward", "exposed", "waiting", "optimizer", "other")
"""What a step's time is divided into, in the order in which a step comes to it."""
SYNC = "sync"
"""The span between the end of a backward pass and the last gradient, before it is divided into exposed and waiting."""
_LOSS, _OTHER = "loss", "other"
_BEGINS = {
    Kind.LOADING: "data",
    Kind.LOADED: _OTHER,
    Kind.COPYING: "copy",
    Kind.COPIED: _OTHER,
    Kind.FORWARD: "forward",
    Kind.FORWARDED: _LOSS,
    Kind.BACKWARD: "backward",
    Kind.WAITING: SYNC,
    Kind.SYNCED: _OTHER,
    Kind.ENDED: _OTHER,
    Kind.OPTIMIZER: "optimizer",
    Kind.UPDATED: _OTHER,
}
"""What begins at a moment."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """A stretch of time spent on one thing; nanoseconds since the step began, in a run folder microseconds."""

    name: str
    begin: float
    end: float

    @property
    def length(self) -> float:
        """From begin to end."""
        return self.end - self.begin


@dataclass(slots=True)
class Flight:
    """One bucket on its way, on one worker; times as in TimeSpan."""

    place: int
    """In the launch order of its model."""
    num_bytes: int
    ready: float
    """When it had all of this worker's gradients."""
    launched: float
    """When it was handed to the backend."""
    reduced: float
    """When this worker saw that the sum had arrived."""


@dataclass(slots=True)
class StepRecord:
    """One step of one worker, in numbers small enough to be sent to worker 0 for every step; in nanoseconds."""

    step: int
    """How many steps have been made, this one included."""
    begin: int
    """On the worker's own clock."""
    wall: int
    """How long it took."""
    spans: list[TimeSpan]
    """Without gaps, from 0 to `wall`."""
    flights: list[Flight]
    """In the order in which buckets were launched, which is the same on all workers."""
    num_samples: float = 0.0
    """In this worker's part of the batch; 0 where not known."""
    noted: dict[str, float] = field(default_factory=dict)
    """What else is known: loss, lr, grad_norm, squares of norms."""
    taken: int = 0
    """Of the backward passes, by communication: filling and launching buckets, and threads that moved bytes on the core
    that computes. 0 where that is not known."""

    def to_json(self) -> list[Any]:
        """As it travels."""
        return list(astuple(self))

    @classmethod
    def from_json(cls, found: list[Any]) -> "StepRecord":
        """What `to_json` was made of."""
        step, begin, wall, spans, flights, *rest = found
        return cls(step, begin, wall, [TimeSpan(*each) for each in spans], [Flight(*each) for each in flights], *rest)


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """One worker's part of a step that all have told of."""

    rank: int
    begin: int
    """On worker 0's clock."""
    record: StepRecord
    spans: Sequence[TimeSpan]
    """Those of the record, with the wait after a backward pass divided into waiting and exposed."""
    shares: Mapping[str, int]
    """Nanoseconds by name of the share; they add up to the step's wall time."""
    hidden: int
    """Communication under the backward pass."""

    @property
    def own(self) -> int:
        """Nanoseconds in which the worker was neither waiting nor communicating: what it would need alone."""
        return self.record.wall - self.shares["exposed"] - self.shares["waiting"]


@dataclass(frozen=True, slots=True)
class CombinedStep:
    """One step of all workers that told of it."""

    step: int
    workers: Sequence[WorkerStep]
    """By rank; fewer than there are where one has left or died."""
    launches: Sequence[int]
    """For each bucket, when the last worker launched it, on worker 0's clock."""

    @property
    def wall(self) -> int:
        """Of the slowest worker."""
        return max(worker.record.wall for worker in self.workers)


# One worker


def is_recorded(step: int, every: int) -> bool:
    """Whether `step` is recorded where one of so many is: on all workers the same."""
    return step % every == 2 % every


def record_step(
    step: int, begin: int, moments: Sequence[tuple[Event, int]], noted: dict[str, float], taken: int = 0
) -> StepRecord:
    """The record of a step that ran from `begin` to the last of `moments`: events, and when they took place."""
    end = moments[-1][1] if moments else begin
    samples = sum(event.num_samples for event, _ in moments)
    return StepRecord(step, begin, end - begin, _spans(begin, moments), _flights(begin, moments), samples, noted, taken)


def _spans(begin: int, moments: Sequence[tuple[Event, int]]) -> list[TimeSpan]:
    spans: list[TimeSpan] = []
    name, since = _OTHER, 0
    for event, time in moments:
        follows = _BEGINS.get(event.kind)
        if follows is None:
            continue
        now = max(time - begin, since)
        if name == _LOSS:
            name = "forward" if follows == "backward" else _OTHER
        if follows == "backward" and name == "backward":
            continue  # Several models, or a pass within a pass: one stretch.
        _append(spans, name, since, now)
        name, since = follows, now
    return spans


def _append(spans: list[TimeSpan], name: str, begin: float, end: float) -> None:
    if end == begin:
        return
    if spans and spans[-1].name == name:
        begin = spans.pop().begin
    spans.append(TimeSpan(name, begin, end))


def _flights(begin: int, moments: Sequence[tuple[Event, int]]) -> list[Flight]:
    full: dict[tuple[int, int], int] = {}
    flights: list[Flight] = []
    in_flight: dict[tuple[int, int], Flight] = {}
    for event, time in moments:
        now = time - begin
        key = (event.step, event.bucket)
        if event.kind is Kind.FULL:
            full[key] = now
        elif event.kind is Kind.LAUNCHED:
            in_flight[key] = Flight(event.bucket, event.num_bytes, full.pop(key, now), now, now)
            flights.append(in_flight[key])
        elif event.kind is Kind.REDUCED and key in in_flight:
            in_flight.pop(key).reduced = now
    return flights


# All workers


def combine(records: Mapping[int, StepRecord], offsets: Mapping[int, int]) -> CombinedStep:
    """The step, from the record of each rank; `offsets` is what to add to a rank's clock to get worker 0's."""
    begins = {rank: record.begin + offsets.get(rank, 0) for rank, record in records.items()}
    # Buckets are launched in one order on all workers.
    number = min(len(record.flights) for record in records.values())
    launches = [
        max(begins[rank] + int(record.flights[place].launched) for rank, record in records.items())
        for place in range(number)
    ]
    workers = [_worker(rank, begins[rank], records[rank], launches) for rank in sorted(records)]
    return CombinedStep(next(iter(records.values())).step, workers, launches)


def _worker(rank: int, begin: int, record: StepRecord, launches: Sequence[int]) -> WorkerStep:
    spans: list[TimeSpan] = []
    for span in record.spans:
        spans.extend(_split(span, begin, record.flights, launches) if span.name == SYNC else [span])
    shares = dict.fromkeys(SHARES, 0)
    for span in spans:
        shares[span.name] += int(span.length)
    taken = min(record.taken, shares["backward"])
    shares["backward"] -= taken
    shares["exposed"] += taken
    return WorkerStep(rank, begin, record, spans, shares, _hidden(record, begin, launches))


def _split(sync: TimeSpan, begin: int, flights: Sequence[Flight], launches: Sequence[int]) -> list[TimeSpan]:
    """The wait after a backward pass, as waiting for others and as exposed communication, in order."""
    parts: list[TimeSpan] = []
    now = sync.begin
    for flight, launched in zip(flights, launches, strict=False):
        if not now <= flight.reduced <= sync.end:
            continue
        for name, end in (("waiting", min(launched - begin, flight.reduced)), ("exposed", flight.reduced)):
            if end > now:
                parts.append(TimeSpan(name, now, end))
                now = end
    if sync.end > now:
        parts.append(TimeSpan("exposed", now, sync.end))
    return parts


def _hidden(record: StepRecord, begin: int, launches: Sequence[int]) -> int:
    backward = [span for span in record.spans if span.name == "backward"]
    stretches = in_flight(record, begin, launches)
    return int(
        sum(max(0, min(span.end, end) - max(span.begin, start)) for start, end in stretches for span in backward)
    )


def in_flight(record: StepRecord, begin: int, launches: Sequence[int]) -> Iterator[tuple[float, float]]:
    """When some bucket that all have launched was on its way, as this worker saw it arrive; no moment twice."""
    until = 0.0
    for flight, launched in zip(record.flights, launches, strict=False):
        start, until = max(launched - begin, until), max(until, flight.reduced)
        if flight.reduced > start:
            yield start, flight.reduced
