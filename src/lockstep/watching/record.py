"""What one worker knows of one step, in numbers small enough to be sent to worker 0 for every step.

Times are nanoseconds on the worker's own clock, those within the step since its begin.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHARES = ("data", "copy", "forward", "backward", "exposed", "waiting", "optimizer", "other")
"""What a step's time is divided into."""

SYNC = "sync"
"""The span between the end of a backward pass and the last gradient, before it is divided into exposed and waiting."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time spent on one thing."""

    name: str
    begin: int
    end: int

    @property
    def length(self) -> int:
        """In nanoseconds."""
        return self.end - self.begin


@dataclass(slots=True)
class Sent:
    """One bucket on its way."""

    place: int
    """In the launch order of its model."""
    num_bytes: int
    ready: int
    """When it had all of this worker's gradients."""
    launched: int
    """When it was handed to the backend."""
    reduced: int
    """When this worker saw that the sum had arrived."""


@dataclass(slots=True)
class Record:
    """One step of one worker."""

    step: int
    """How many steps have been made, this one included."""
    begin: int
    """On the worker's own clock."""
    wall: int
    """How long it took."""
    spans: list[Span]
    """Without gaps, from 0 to `wall`."""
    buckets: list[Sent]
    """In the order in which they were launched, which is the same on all workers."""
    num_samples: float = 0.0
    """In this worker's part of the batch; 0 where not known."""
    noted: dict[str, float] = field(default_factory=dict)
    """What else is known: loss, lr, grad_norm, squares of norms."""
    taken: int = 0
    """Of the backward passes, by communication: filling and launching buckets, and threads that moved bytes on the core
    that computes. 0 where that is not known."""

    def to_json(self) -> list[Any]:
        """As it travels."""
        spans = [[each.name, each.begin, each.end] for each in self.spans]
        buckets = [[b.place, b.num_bytes, b.ready, b.launched, b.reduced] for b in self.buckets]
        return [self.step, self.begin, self.wall, spans, buckets, self.num_samples, self.noted, self.taken]

    @classmethod
    def from_json(cls, found: list[Any]) -> "Record":
        """What `to_json` was made of."""
        step, begin, wall, spans, buckets, *rest = found
        return cls(step, begin, wall, [Span(*each) for each in spans], [Sent(*each) for each in buckets], *rest)

    def time_in(self, names: Mapping[str, Any] | set[str]) -> int:
        """Nanoseconds spent on things of these names."""
        return sum(span.length for span in self.spans if span.name in names)

    @property
    def own(self) -> int:
        """Nanoseconds in which this worker was neither waiting nor communicating: what it would need alone."""
        return self.wall - self.time_in({SYNC})
