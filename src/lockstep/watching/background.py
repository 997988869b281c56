"""The thread of a watched worker: takes closed steps from the recorder, and sees that worker 0 gets them.

Once a second: read the steps that are over, send them (or, on worker 0, collect everybody's), and learn or say what the
verdict is. No collective operations and no waits without a deadline: see mail.py for why it can neither hang nor hold
anybody up. It is a daemon, and ends with the world; if it fails, it says so once, and the training goes on.
"""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lockstep.watching import timeline
from lockstep.watching.clock import Clock
from lockstep.watching.collector import Collector
from lockstep.watching.mail import Mail
from lockstep.watching.pace import Pace
from lockstep.watching.probes import Probes
from lockstep.watching.recorder import Raw, Recorder
from lockstep.watching.stamps import Stamps
from lockstep.watching.summary import Summary

_EVERY_S = 1.0
_GRACE_S = 3.0
"""How long worker 0 waits at its end for the others' last letters, and they for its last word."""


class Background:
    """The thread, and what it knows."""

    def __init__(
        self,
        recorder: Recorder,
        stamps: Stamps,
        mail: Mail | None,
        collector: Collector | None,
        probes: Probes | None,
        each_time: Callable[[], None],
    ) -> None:
        self._recorder, self._stamps = recorder, stamps
        self._mail, self._collector, self._probes = mail, collector, probes
        self._each_time = each_time
        """Called in the thread, before what it does once a second."""
        self._unread: list[Raw] = []
        self._pace = Pace()
        self._known = Summary()
        self._is_over = threading.Event()
        self._waits_at_end = True
        self._thread = threading.Thread(target=self._run, name="lockstep-watching", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, *, waits: bool) -> None:
        """Send what is left, and end; `waits`: until worker 0 has said its last word."""
        self._waits_at_end = waits
        self._is_over.set()
        self._thread.join(2 * _GRACE_S + 4.0)

    @property
    def summary(self) -> Summary:
        """The newest that is known here."""
        return self._known

    def _run(self) -> None:
        try:
            while not self._is_over.wait(_EVERY_S):
                self._tick(at_end=False)
            self._tick(at_end=True)
            self._say_goodbye()
        except Exception as error:
            if not self._is_over.is_set():  # Else the store went first, with whoever served it.
                print(f"lockstep: watching has ended, training goes on: {error}", file=sys.stderr)
        finally:
            if self._probes is not None:
                self._probes.close()

    def _tick(self, *, at_end: bool) -> None:
        self._each_time()
        letter = self._letter(at_end=at_end)
        if self._collector is None:
            assert self._mail is not None
            self._mail.send(letter)
            self._learn()
            return
        self._collector.add(0, letter)
        self._collect()
        self._pace.see(time.monotonic(), time.thread_time())

    def _collect(self, *, at_end: bool = False) -> None:
        assert self._collector is not None
        for rank, letter in self._mail.receive() if self._mail is not None else ():
            self._collector.add(rank, letter)
        self._collector.settle(self._pace, at_end=at_end)
        self._known = self._collector.summary()
        if self._mail is not None:
            self._mail.publish({**self._collector.state(), "every": self._pace.every, "is_last": at_end})

    def _learn(self) -> bool:
        """Read what worker 0 knows; returns whether that is its last word."""
        assert self._mail is not None
        state = self._mail.state()
        if state:
            self._known, self._pace.every = Summary.from_json(state["summary"]), state["every"]
        return bool(state.get("is_last"))

    def _say_goodbye(self) -> None:
        give_up = time.monotonic() + (_GRACE_S if self._waits_at_end else 0.0)
        if self._collector is not None:
            while not self._collector.all_have_ended and time.monotonic() < give_up:
                time.sleep(0.02)
                self._collect()
            self._collect(at_end=True)
        elif self._mail is not None:
            while not self._learn() and time.monotonic() < give_up:
                time.sleep(0.05)

    def _letter(self, *, at_end: bool) -> dict[str, Any]:
        self._unread.extend(self._recorder.take(all_of_them=at_end))
        letter: dict[str, Any] = {"records": [], "clock": Clock.mine().to_json()}
        raw: Raw | None = None
        while self._unread and self._is_past(self._unread[0], at_end):
            raw = self._unread.pop(0)
            if self._pace.keeps(raw.step):
                letter["records"].append(self._read(raw))
            # The last stamp is also the begin of the next step, which has still to be read.
            self._stamps.done([stamp for _, stamp in raw.heard[:-1]])
        letter["newest"] = raw.step if raw is not None else 0
        if self._probes is not None:
            letter["trips"], letter["ahead"] = self._probes.delays(), self._probes.ahead(0)
        if at_end:
            letter["end"] = True
        return letter

    def _is_past(self, raw: Raw, at_end: bool) -> bool:
        """Whether the device has come to the end of the step; at the end of the run it is waited for, briefly."""
        give_up = time.monotonic() + (1.0 if at_end else 0.0)
        while not self._stamps.is_past(raw.heard[-1][1]):
            if time.monotonic() >= give_up:
                return False
            time.sleep(0.01)
        return True

    def _read(self, raw: Raw) -> list[Any]:
        begin = self._stamps.read(raw.begin)
        moments = [timeline.Moment(event, self._stamps.read(stamp)) for event, stamp in raw.heard]
        noted = {name: float(value) for name, value in raw.noted.items()}
        return timeline.record(raw.step, begin, moments, noted, raw.taken_ns).to_json()
