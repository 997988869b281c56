"""What the engine says while it runs: small records that listeners may take, and nothing when nobody listens.

The hot path asks `if events:` and emits; listeners (progress, timelines, stall reports) do the rest. A listener
must not raise, block or keep tensors alive.
"""

import contextlib
import enum
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Batch = TypeVar("Batch")

ON_JOIN: list[Callable[[Any], None]] = []
"""Called with every world that this process joins: how what stands above the world comes to see it."""


class Kind(enum.Enum):
    """The moments of a step, in the order in which they come."""

    LOADING = "loading"
    """The next batch is asked for."""
    LOADED = "loaded"
    """It is there, in host memory."""
    COPYING = "copying"
    """A batch is about to be moved to the worker's device."""
    COPIED = "copied"
    """It is there (on CUDA: has been queued on the current stream)."""
    FORWARD = "forward"
    """The wrapped module was called."""
    FORWARDED = "forwarded"
    """The wrapped module has returned."""
    BACKWARD = "backward"
    """The first gradient of a backward pass is about to be computed."""
    FULL = "full"
    """A bucket has all its gradients; it leaves when those before it have left."""
    LAUNCHED = "launched"
    """A bucket was handed to the backend."""
    WAITING = "waiting"
    """The backward pass has ended; what has not arrived is waited for from here on."""
    REDUCED = "reduced"
    """A bucket's reduced gradients have arrived (on CUDA: have been queued behind the current stream)."""
    SYNCED = "synced"
    """Every gradient is in place."""
    ENDED = "ended"
    """A backward pass has ended that sends nothing: gradients are accumulated, or the worker is alone."""
    OPTIMIZER = "optimizer"
    """An optimizer's step begins. This and the next are told while the worker is watched: see watching/recorder.py."""
    UPDATED = "updated"
    """An optimizer's step has ended."""


@dataclass(frozen=True, slots=True)
class Event:
    """One moment on this worker."""

    kind: Kind
    time_ns: int
    """`time.perf_counter_ns` of this process."""
    step: int
    """How many synchronised backward passes came before, or -1 where that is not known."""
    bucket: int = -1
    """Place of the bucket in the launch order, or -1."""
    num_bytes: int = 0
    """Size of the bucket, or 0."""
    num_samples: float = 0
    """With FORWARD: how many samples this worker's part of the batch has, or 0 where that is not known."""
    spent_ns: int = 0
    """With WAITING: nanoseconds of the backward pass in which the host filled and launched buckets."""


Listener = Callable[[Event], None]

_END = object()


class Events:
    """The listeners of one world. False while there are none."""

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with every event from now on; returns the function that ends it."""
        self._listeners += (listener,)

        def unsubscribe() -> None:
            self._listeners = tuple(x for x in self._listeners if x is not listener)

        return unsubscribe

    def emit(
        self,
        kind: Kind,
        step: int = -1,
        bucket: int = -1,
        num_bytes: int = 0,
        *,
        num_samples: float = 0,
        spent_ns: int = 0,
    ) -> None:
        """Tell every listener, in the order in which they subscribed."""
        event = Event(kind, time.perf_counter_ns(), step, bucket, num_bytes, num_samples, spent_ns)
        for listener in self._listeners:
            listener(event)

    def loading(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """`batches`, with word of each time that one is asked for."""
        while True:
            if not self._listeners:
                batch = next(batches, _END)
            else:
                self.emit(Kind.LOADING)
                batch = next(batches, _END)
                self.emit(Kind.LOADED)
            if batch is _END:
                return
            yield batch  # type: ignore[misc]

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """A block that moves a batch to the worker's device."""
        if not self._listeners:
            yield
            return
        self.emit(Kind.COPYING)
        try:
            yield
        finally:
            self.emit(Kind.COPIED)
