"""Where a step's time goes, on this worker."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.events import Event, Events, Kind


@dataclass(frozen=True, slots=True)
class Lap:
    """One step."""

    seconds: float
    """All of it."""
    waiting: float
    """Seconds of it in which this worker had nothing to do but wait for the others or for what they sent."""


class Stopwatch:
    """Times steps: `start`, the step, `stop`.

    It listens for how long the gradients were waited for after each backward pass; what was sent while that still
    ran has cost no waiting. Other waits are put into a `waiting` block. On a GPU, which waits by itself, none of
    this is seen here.
    """

    def __init__(self, events: Events) -> None:
        self._started = 0.0
        self._waiting = 0.0
        self._waiting_since = 0.0
        self.close = events.subscribe(self._hear)
        """Stop listening."""

    def start(self) -> None:
        """A step begins."""
        self._waiting = 0.0
        self._started = time.perf_counter()

    def stop(self) -> Lap:
        """A step has ended."""
        return Lap(time.perf_counter() - self._started, self._waiting)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block in which the others are waited for."""
        since = time.perf_counter()
        yield
        self._waiting += time.perf_counter() - since

    def _hear(self, event: Event) -> None:
        if event.kind is Kind.WAITING:
            self._waiting_since = event.time_ns / 1e9
        elif event.kind is Kind.SYNCED:
            self._waiting += event.time_ns / 1e9 - self._waiting_since
