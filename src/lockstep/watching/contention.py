"""What communication takes from a backward pass beside it, on a host whose cores do both.

Threads that move bytes run on the cores that compute. While one does, the thread of the backward pass stands ready and
does not run: Linux counts that time (its run delay). Other programs can be the cause as well, so that no more counts as
this process's other threads have run meanwhile.

What arrives from the network is handled in interrupts, on whatever core is at hand, and in the name of the thread that
runs there. The kernel tells how much of all cores' time that was; a backward pass has lost that part of its own.
"""

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

_INTERRUPTS = slice(5, 7)
"""irq and softirq, of the columns user, nice, system, idle, iowait, irq, softirq, steal."""


@dataclass(frozen=True, slots=True)
class _Reading:
    """The clocks of one thread, in nanoseconds."""

    thread: int
    run_delay: int
    of_thread: int
    of_process: int


class Contention:
    """Measures between `begin` and `end`, on one thread."""

    def __init__(self) -> None:
        self._begin: _Reading | None = None
        self._files: dict[int, int] = {}
        self._last: tuple[int, int] | None = None
        self._interrupted = 0.0
        """The part of the cores' time that went into interrupts of late."""

    def begin(self) -> None:
        """A backward pass begins on this thread."""
        self._begin = self._read()

    def end(self) -> int:
        """It has ended: nanoseconds for which others had its core, other threads of this process or the network."""
        begin, self._begin = self._begin, None
        now = self._read()
        if begin is None or now is None or begin.thread != now.thread:
            return 0
        of_thread = now.of_thread - begin.of_thread
        others = (now.of_process - begin.of_process) - of_thread
        return max(0, min(now.run_delay - begin.run_delay, others)) + int(self._interrupted * of_thread)

    def look(self) -> None:
        """See how much time interrupts take; called about once a second, by another thread."""
        try:
            with Path("/proc/stat").open("rb") as file:
                ticks = [int(word) for word in file.readline().split()[1:9]]
        except (OSError, ValueError):
            return
        total, interrupts = sum(ticks), sum(ticks[_INTERRUPTS])
        if self._last is not None and total > self._last[0]:
            self._interrupted = (interrupts - self._last[1]) / (total - self._last[0])
        self._last = total, interrupts

    def close(self) -> None:
        """Let go of what was opened."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _read(self) -> _Reading | None:
        """None where the kernel does not tell."""
        thread = threading.get_native_id()
        try:
            if thread not in self._files:
                self._files[thread] = os.open(f"/proc/self/task/{thread}/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            run_delay = int(os.pread(self._files[thread], 96, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return _Reading(thread, run_delay, time.thread_time_ns(), time.process_time_ns())
