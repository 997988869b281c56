"""Permits to make a step, where the bound on staleness allows fewer at a time than there are workers."""

import threading
from collections import deque


class Permits:
    """So many permits, given in the order in which they were asked for; kept by worker 0 for all."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._queue: deque[int] = deque()
        self._change = threading.Condition()

    def ask(self, worker: int) -> None:
        """Let `worker` stand in line."""
        with self._change:
            self._queue.append(worker)

    def get(self, worker: int, timeout_s: float) -> bool:
        """Take a permit when it is the turn of `worker`, who has asked; False if it was not within the time."""
        with self._change:
            if not self._change.wait_for(lambda: self._free > 0 and self._queue[0] == worker, timeout_s):
                return False
            self._queue.popleft()
            self._free -= 1
            self._change.notify_all()
            return True

    def give_back(self) -> None:
        """Let the next one have it."""
        with self._change:
            self._free += 1
            self._change.notify_all()
