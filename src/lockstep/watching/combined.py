"""One step of all workers, on one clock: what of the communication was hidden, exposed, or waiting for others. Pure.

After a worker's backward pass has ended it waits for one bucket after the other. Until the last worker has launched
the bucket, it waits for that worker; from then on, for the network. What is left when all buckets have arrived (the
hand-out, the exchange of buffers) counts as exposed too, since a lone worker would not have it. Communication is hidden
while a bucket that everybody has launched is on its way under this worker's backward pass: an upper bound, since an
arrival is seen when the next bucket is launched, at the latest when the pass has ended, and on a GPU only then.

On a host whose cores also move the bytes, what that takes of the backward pass is exposed as well: a worker by itself
would not have it. It has no stretch of its own, since it is spread over the pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.watching.record import SHARES, SYNC, Record, Sent, Span


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """One worker's part of a step."""

    rank: int
    begin: int
    """On worker 0's clock."""
    wall: int
    shares: Mapping[str, int]
    """Nanoseconds by name of the share; they add up to `wall`."""
    hidden: int
    """Communication under the backward pass."""
    spans: Sequence[Span]
    buckets: Sequence[Sent]
    record: Record

    @property
    def own(self) -> int:
        """Nanoseconds without exposed communication and waiting."""
        return self.wall - self.shares["exposed"] - self.shares["waiting"]


@dataclass(frozen=True, slots=True)
class CombinedStep:
    """One step of all workers that told of it."""

    step: int
    workers: Sequence[WorkerStep]
    """By rank; fewer than there are where one has left or died."""

    @property
    def wall(self) -> int:
        """Of the slowest worker."""
        return max(worker.wall for worker in self.workers)


def combine(records: Mapping[int, Record], offsets: Mapping[int, int]) -> CombinedStep:
    """The step, from the record of each rank; `offsets` is what to add to a rank's clock to get worker 0's."""
    begins = {rank: record.begin + offsets.get(rank, 0) for rank, record in records.items()}
    last = _last_launches(records, begins)
    workers = [_worker(rank, begins[rank], records[rank], last) for rank in sorted(records)]
    return CombinedStep(next(iter(records.values())).step, workers)


def _last_launches(records: Mapping[int, Record], begins: Mapping[int, int]) -> list[int]:
    """For each bucket, when the last worker launched it. Buckets are launched in one order on all workers."""
    number = min(len(record.buckets) for record in records.values())
    return [
        max(begins[rank] + record.buckets[place].launched for rank, record in records.items())
        for place in range(number)
    ]


def _worker(rank: int, begin: int, record: Record, last: Sequence[int]) -> WorkerStep:
    spans: list[Span] = []
    for span in record.spans:
        spans.extend(_split(span, begin, record.buckets, last) if span.name == SYNC else [span])
    shares = dict.fromkeys(SHARES, 0)
    for span in spans:
        shares[span.name] += span.length
    taken = min(record.taken, shares["backward"])
    shares["backward"] -= taken
    shares["exposed"] += taken
    hidden = _hidden(record, begin, last)
    return WorkerStep(rank, begin, record.wall, shares, hidden, spans, record.buckets, record)


def _split(sync: Span, begin: int, buckets: Sequence[Sent], last: Sequence[int]) -> list[Span]:
    """The wait after a backward pass, as waiting for others and as exposed communication, in order."""
    parts: list[Span] = []
    now = sync.begin
    for bucket, launched in zip(buckets, last, strict=False):
        if not now <= bucket.reduced <= sync.end:
            continue
        for name, end in (("waiting", min(launched - begin, bucket.reduced)), ("exposed", bucket.reduced)):
            if end > now:
                parts.append(Span(name, now, end))
                now = end
    if sync.end > now:
        parts.append(Span("exposed", now, sync.end))
    return parts


def _hidden(record: Record, begin: int, last: Sequence[int]) -> int:
    backward = [span for span in record.spans if span.name == "backward"]
    hidden, until = 0, 0
    for bucket, launched in zip(record.buckets, last, strict=False):
        start = max(launched - begin, until)
        until = max(until, bucket.reduced)
        hidden += sum(max(0, min(span.end, bucket.reduced) - max(span.begin, start)) for span in backward)
    return hidden
