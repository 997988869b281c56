"""What the folder of a watched run says, as values. `run_folder` reads them."""

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = ("data", "copy", "forward", "backward", "exposed", "waiting", "optimizer", "other")
"""What a worker's time in a step is spent on, in the order in which a step comes to it."""

NUMBERS = (
    "wall_ms", "loss", "grad_norm", "lr", "batch", "samples_per_s", "efficiency", "sent_bytes", "bus_gb_per_s", "mfu",
    "noise_scale",
)  # fmt: skip
"""Of a step, all but what is said per worker."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket of gradients, as the run had it."""

    place: int
    num_bytes: int
    params: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What does not change from step to step."""

    lockstep: str
    torch: str
    started: str
    """Date and time in UTC, as ISO 8601."""
    script: str
    size: int
    device: str
    backend: str
    hosts: tuple[str, ...]
    """One per worker."""
    num_params: int
    grad_bytes: int
    buckets: tuple[Bucket, ...]
    single_ms: float | None
    """A worker's own step without communication, measured in the same run."""

    def host(self, rank: int) -> str:
        """Where a worker runs; "" if not known, or if it tells nobody apart since all are there."""
        return self.hosts[rank] if 0 <= rank < len(self.hosts) and len(set(self.hosts)) > 1 else ""


@dataclass(frozen=True, slots=True)
class WorkerTime:
    """What one worker's time went into, in one step."""

    rank: int
    begin_us: float
    wall_ms: float
    hidden_ms: float
    """Communication under the backward pass; not one of the shares."""
    shares_ms: Mapping[str, float]
    """By kind; they add up to `wall_ms`."""


@dataclass(frozen=True, slots=True)
class Last:
    """The worker that the others waited for."""

    worker: int
    late_ms: float
    cause: str
    """data, compute or network."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of all workers."""

    step: int
    time: float | None
    """Seconds since 1970, at its end."""
    numbers: Mapping[str, float | None]
    """By name: wall_ms, loss, grad_norm, lr, batch, samples_per_s, efficiency, sent_bytes, ..."""
    last: Last | None
    verdict: str
    workers: tuple[WorkerTime, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a worker's time."""

    kind: str
    begin_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Flight:
    """A bucket's way through one step on one worker."""

    place: int
    num_bytes: int
    ready_us: float
    launched_us: float
    reduced_us: float


@dataclass(frozen=True, slots=True)
class WorkerTrace:
    """The detail of one step on one worker."""

    rank: int
    spans: tuple[Span, ...]
    flights: tuple[Flight, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """The detail of one step."""

    step: int
    workers: tuple[WorkerTrace, ...]


@dataclass(frozen=True, slots=True)
class Hang:
    """A hang, as it was reported."""

    step: int | None
    bucket: int | None
    params: tuple[str, ...]
    missing: tuple[int, ...]
    text: str
    """The whole report."""
    stacks: Mapping[str, str]
    """What each worker was doing, by the name of its file."""
