"""When moments took place, on the clock that counts: the host's, or the device's where work is queued for it.

On CUDA a moment on the host says when work was queued, not when it ran. So with each moment a timing event is recorded
on the current stream; it is read once it has passed, by the background thread, and nothing ever waits for it. On an
idle stream such an event passes at once, so loading that the device had to wait for shows at its full length, and
loading under the device's work not at all. An anchor, an event on a stream of its own whose passing the background
thread waits for, places device times on the host's clock; it is renewed now and then, since the two clocks drift.
"""

import collections
import time
from typing import Any, Protocol

import torch

from lockstep.events import Event

Stamp = Any
"""What `now` returns; `read` turns it into nanoseconds."""

_ANCHOR_S = 20.0
"""After so long a new anchor is dropped: clocks that drift by 10 millionths are apart by 0.2 ms then."""


class Stamps(Protocol):
    """A clock whose readings may be known only later."""

    def now(self, event: Event) -> Stamp:
        """A stamp for a moment that is now."""

    def is_past(self, stamp: Stamp) -> bool:
        """Whether the moment is over, so that it can be read."""

    def read(self, stamp: Stamp) -> int:
        """Nanoseconds of `time.perf_counter_ns` at the moment."""

    def done(self, stamps: list[Stamp]) -> None:
        """These will not be read again."""


class HostStamps:
    """The host's clock: what the event itself says."""

    def now(self, event: Event) -> Stamp:
        """See Stamps."""
        return event.time_ns

    def is_past(self, stamp: Stamp) -> bool:
        """At once."""
        return True

    def read(self, stamp: Stamp) -> int:
        """See Stamps."""
        return int(stamp)

    def done(self, stamps: list[Stamp]) -> None:
        """Nothing: they are numbers."""


class CudaStamps:
    """The device's clock, by timing events on whatever stream is current."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: collections.deque[torch.cuda.Event] = collections.deque()
        self._stream = torch.cuda.Stream(device)
        self._anchor, self._anchored_ns = self._drop_anchor()

    def now(self, event: Event) -> Stamp:
        """See Stamps; while a CUDA graph is captured, where a timing event would become part of it, none is made."""
        if torch.cuda.is_current_stream_capturing():
            return event.time_ns
        try:
            stamp = self._free.pop()
        except IndexError:
            stamp = torch.cuda.Event(enable_timing=True)
        stamp.record(torch.cuda.current_stream(self._device))
        return stamp

    def is_past(self, stamp: Stamp) -> bool:
        """See Stamps."""
        return isinstance(stamp, int) or bool(stamp.query())

    def read(self, stamp: Stamp) -> int:
        """See Stamps; called in the background thread."""
        if isinstance(stamp, int):
            return stamp
        if time.perf_counter_ns() - self._anchored_ns > _ANCHOR_S * 1e9:
            self._anchor, self._anchored_ns = self._drop_anchor()
        since: float = self._anchor.elapsed_time(stamp)
        return self._anchored_ns + round(since * 1e6)

    def done(self, stamps: list[Stamp]) -> None:
        """See Stamps."""
        self._free.extend(stamp for stamp in stamps if not isinstance(stamp, int))

    def _drop_anchor(self) -> tuple[torch.cuda.Event, int]:
        """The best of a few: the one whose passing was seen soonest."""
        tries = []
        for _ in range(5):
            anchor = torch.cuda.Event(enable_timing=True)
            before = time.perf_counter_ns()
            anchor.record(self._stream)
            anchor.synchronize()
            after = time.perf_counter_ns()
            tries.append((after - before, anchor, (before + after) // 2))
        _, anchor, when = min(tries, key=lambda each: each[0])
        return anchor, when


def stamps_of(device: torch.device) -> Stamps:
    """The clock of a worker on `device`."""
    return CudaStamps(device) if device.type == "cuda" else HostStamps()
