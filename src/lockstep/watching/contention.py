"""What communication takes from a backward pass beside it, on a host whose cores do both.

Threads that move bytes run on the cores that compute. While one does, the thread of the backward pass stands ready and
does not run: Linux counts that time (its run delay). Other programs can be the cause as well, so that no more counts as
this process's other threads have run meanwhile.
"""

import os
import threading
import time
from dataclasses import dataclass


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

    def begin(self) -> None:
        """A backward pass begins on this thread."""
        self._begin = self._read()

    def end(self) -> int:
        """It has ended: nanoseconds for which it stood ready while other threads of this process ran."""
        begin, self._begin = self._begin, None
        now = self._read()
        if begin is None or now is None or begin.thread != now.thread:
            return 0
        others = (now.of_process - begin.of_process) - (now.of_thread - begin.of_thread)
        return max(0, min(now.run_delay - begin.run_delay, others))

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
