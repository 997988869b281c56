"""What the engine says while it runs: small records that listeners may take, and nothing when nobody listens.

The hot path asks `if events:` and emits; listeners (progress, timelines, stall reports) do the rest. A listener
must not raise, block or keep tensors alive.
"""

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass


class Kind(enum.Enum):
    """The moments of a step, in the order in which they come."""

    FORWARD = "forward"
    """The wrapped module was called."""
    BACKWARD = "backward"
    """The first gradient of a synchronised backward pass is about to be computed."""
    LAUNCHED = "launched"
    """A bucket was handed to the backend."""
    WAITING = "waiting"
    """The backward pass has ended; what has not arrived is waited for from here on."""
    REDUCED = "reduced"
    """A bucket's reduced gradients have arrived (on CUDA: have been queued behind the current stream)."""
    SYNCED = "synced"
    """Every gradient is in place."""


@dataclass(frozen=True, slots=True)
class Event:
    """One moment on this worker."""

    kind: Kind
    time_ns: int
    """`time.perf_counter_ns` of this process."""
    step: int
    """How many synchronised backward passes came before."""
    bucket: int = -1
    """Place of the bucket in the launch order, or -1."""
    num_bytes: int = 0
    """Size of the bucket, or 0."""


Listener = Callable[[Event], None]


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

    def emit(self, kind: Kind, step: int, bucket: int = -1, num_bytes: int = 0) -> None:
        """Tell every listener, in the order in which they subscribed."""
        event = Event(kind, time.perf_counter_ns(), step, bucket, num_bytes)
        for listener in self._listeners:
            listener(event)
