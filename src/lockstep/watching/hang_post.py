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
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from lockstep.watching.hang_stack import THREAD_NAME
from lockstep.watching.hang_state import State

HURRY_S = 0.15
"""Time between two rounds while a report is being made."""

Compose = Callable[[int, int], State]
"""Makes this worker's state of the number of the beat and of the last call that was heard."""


class Post:
    """One worker's exchange with the others. `round` runs in its own thread; the rest is read from another one."""

    def __init__(self, store: Any, rank: int, ranks: Sequence[int], compose: Compose, beat_s: float) -> None:
        # Several groups of workers may watch apart from each other.
        self._store: Any = dist.PrefixStore(f"hangs/{min(ranks)}/{len(ranks)}", store.clone())
        self._rank, self._ranks = rank, ranks
        self._compose = compose
        self._beat_s = beat_s
        self._beat = 0
        self._wakes = threading.Event()
        self._has_ended = False
        self._wants_call = False
        self._outgoing = ""
        self._thread = threading.Thread(target=self._serve, name=f"{THREAD_NAME}-post", daemon=True)
        self.calls = int(self._store.add("calls", 0))
        """How many calls have been heard."""
        self.heard_at = time.monotonic()
        """When the store answered last."""
        self.claimed = 0
        """The number of the call that this worker made last, where it is the one to write the report."""
        self.is_lost = False
        """Whether the store is gone for good."""
        self.wants_states = False
        """Whether to read everybody's state, and to hurry."""
        self.states: dict[int, State] = {}
        self.report = ""
        """The last report in short, whoever wrote it."""
        self.report_at = 0.0
        """When it came, on the monotonic clock."""

    def start(self) -> None:
        """Begin to tell of this worker."""
        self._thread.start()

    def close(self) -> bool:
        """Tell of this worker for the last time; returns whether the thread has ended."""
        self._has_ended = True
        self._wakes.set()
        self._thread.join(timeout=2)
        return not self._thread.is_alive()

    def call(self) -> None:
        """Call everybody for a report, as soon as the store answers; `claimed` then tells who writes it."""
        self.claimed, self.states = 0, {}
        self._wants_call = self.wants_states = True
        self._wakes.set()

    def publish(self, report: str) -> None:
        """Let everybody have the report."""
        self._outgoing = report
        self.wants_states = False
        self._wakes.set()

    def is_silent(self, for_s: float) -> bool:
        """Whether the store has not answered for so long."""
        return self.is_lost or time.monotonic() - self.heard_at > self._beat_s + for_s

    def _serve(self) -> None:
        with contextlib.suppress(RuntimeError):  # The store is gone: so is its server, and others say that.
            while not self._has_ended:
                hears_more = self._round()
                self.heard_at = time.monotonic()
                if not hears_more:
                    self._wakes.wait(HURRY_S if self.wants_states else self._beat_s)
                    self._wakes.clear()
            self._round()
            return
        self.is_lost = True

    def _round(self) -> bool:
        """Tell, and hear; returns whether there is something to answer."""
        store = self._store
        self._beat += 1
        store.set(f"state/{self._rank}", self._compose(self._beat, self.calls).pack().decode())
        if self._wants_call:
            self._wants_call = False
            number = int(store.add("calls", 1))
            self.claimed = number if number == self.calls + 1 else 0
        if self._outgoing:
            store.set("report", self._outgoing)
            self._outgoing = ""
        calls = int(store.add("calls", 0))
        has_news, self.calls = calls > self.calls, calls
        if self.wants_states:
            self.states = self._read_states()
        elif calls and store.check(["report"]):
            self._take_report(store.get("report").decode())
        return has_news

    def _take_report(self, text: str) -> None:
        if text != self.report:
            self.report, self.report_at = text, time.monotonic()

    def _read_states(self) -> dict[int, State]:
        """Of those who have told of themselves."""
        keys = {rank: f"state/{rank}" for rank in self._ranks}
        if self._store.check(list(keys.values())) and self._store.has_extended_api():
            values = self._store.multi_get(list(keys.values()))
            return {rank: State.unpack(value) for rank, value in zip(keys, values, strict=True)}
        return {rank: State.unpack(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
