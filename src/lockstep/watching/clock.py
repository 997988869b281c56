"""How the clocks of two workers differ.

Processes under one kernel read the same monotonic clock, unless they were given time namespaces of their own; so the
offset is zero there, also between containers and network namespaces. Between hosts it is measured by round trips: of
many, the one that took least says most (see probes.py). Where nothing answers, the hosts' calendar clocks are trusted,
which NTP keeps within some milliseconds.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Clock:
    """Which clock a worker reads, and where that stands."""

    kernel: str
    """Equal for workers that read the same monotonic clock; empty where that cannot be told."""
    calendar_ns: int
    """What the calendar clock is ahead of the monotonic one, in nanoseconds."""

    @classmethod
    def mine(cls) -> "Clock":
        """Of this process, now."""
        calendar, monotonic = time.time_ns(), time.perf_counter_ns()
        return cls(_kernel(), calendar - monotonic)

    def is_same_as(self, other: "Clock") -> bool:
        """Whether the two read one clock."""
        return bool(self.kernel) and self.kernel == other.kernel

    def to_json(self) -> list[Any]:
        """As it travels."""
        return [self.kernel, self.calendar_ns]


def offset(first: Clock, other: Clock, calendar_ahead_ns: int) -> int:
    """What to add to `other`'s monotonic clock to get `first`'s, if its calendar is ahead of `first`'s by so much."""
    if first.is_same_as(other):
        return 0
    return other.calendar_ns - calendar_ahead_ns - first.calendar_ns


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/time").stat().st_ino
    except OSError:
        return ""
    return f"{boot}/{space}"
