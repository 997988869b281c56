"""How the watches of the workers hear of each other: a few keys in the store in which the workers met.

    state/R    worker R's state; written by it alone, once per beat
    calls      how often a report was called for; everybody may add one
    report     the last report in short; written by whoever called for it

A thread of its own talks to the store, over a connection of its own: a store whose server is stopped answers nobody,
and then the thread that watches must not be stuck as well. `calls` is added to by whoever finds that it has waited for
too long. Who gets the number that follows the last one it knew writes the report; everybody else hears the call at the
next beat, writes its stack and answers by a fresh state.
"""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from lockstep.watching.hang_state import THREAD_NAME, WorkerState

_HURRY_S = 0.15
"""Time between two rounds while a report is being made."""


class Heartbeats:
    """One worker's exchange with the others: the thread that watches calls it and reads what it has heard.

    compose: makes this worker's state, given the number of the last call that was heard.
    """

    def __init__(self, store: Any, ranks: Sequence[int], compose: Callable[[int], WorkerState], beat_s: float) -> None:
        # Several groups of workers may watch apart from each other.
        self._store: Any = dist.PrefixStore(f"hangs/{min(ranks)}/{len(ranks)}", store.clone())
        self._ranks = ranks
        self._compose = compose
        self._beat_s = beat_s
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """What the thread is to do besides its rounds, at once; None: to end."""
        self._gathers = False
        """Whether a report is being made: then everybody's state is read, and there is a hurry."""
        self._thread = threading.Thread(target=self._serve, name=f"{THREAD_NAME}-post", daemon=True)
        self.calls = int(self._store.add("calls", 0))
        """How many calls have been heard."""
        self.heard_at = time.monotonic()
        """When the store answered last; minus infinity if it is gone for good."""
        self.claimed = 0
        """The number of the call that this worker made last, where it is the one to write the report."""
        self.states: dict[int, WorkerState] = {}
        """What everybody has told of itself, since this worker has called."""
        self.report = ("", 0.0)
        """The last report in short, whoever wrote it, and when it came on the monotonic clock."""

    def start(self) -> None:
        """Begin to tell of this worker."""
        self._thread.start()

    def close(self) -> bool:
        """Tell of this worker for the last time; returns whether the thread has ended."""
        self._requests.put(None)
        self._thread.join(timeout=2)
        return not self._thread.is_alive()

    def call(self) -> None:
        """Call everybody for a report, as soon as the store answers, and gather their states until `stop_gathering`."""
        self.claimed, self.states, self._gathers = 0, {}, True
        known = self.calls

        def add_call() -> None:
            number = int(self._store.add("calls", 1))
            self.claimed = number if number == known + 1 else 0

        self._requests.put(add_call)

    def stop_gathering(self) -> None:
        """The states that have come are enough."""
        self._gathers = False

    def publish(self, report: str) -> None:
        """Let everybody have the report."""
        self._requests.put(lambda: self._store.set("report", report))

    def is_silent(self, for_s: float) -> bool:
        """Whether the store has not answered for so long."""
        return time.monotonic() - self.heard_at > self._beat_s + for_s

    # The thread that talks to the store

    def _serve(self) -> None:
        try:
            while True:
                hears_more = self._round()
                self.heard_at = time.monotonic()
                with contextlib.suppress(queue.Empty):
                    wait_s = _HURRY_S if self._gathers else self._beat_s
                    request = self._requests.get(timeout=0.0 if hears_more else wait_s)
                    if request is None:
                        self._round()
                        return
                    request()
        except RuntimeError:  # The store is gone: so is its server, and others say that.
            self.heard_at = -math.inf

    def _round(self) -> bool:
        """Tell, and hear; returns whether there is something to answer."""
        store = self._store
        state = self._compose(self.calls)
        store.set(f"state/{state.rank}", state.pack())
        calls = int(store.add("calls", 0))
        has_news, self.calls = calls > self.calls, calls
        if self._gathers:
            keys = {rank: f"state/{rank}" for rank in self._ranks}
            there = {rank: key for rank, key in keys.items() if store.check([key])}
            self.states = {rank: WorkerState.unpack(store.get(key)) for rank, key in there.items()}
        elif calls and store.check(["report"]):
            text = store.get("report").decode()
            if text != self.report[0]:
                self.report = (text, time.monotonic())
        return has_news
