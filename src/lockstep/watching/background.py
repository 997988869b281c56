"""The thread of a watched worker: takes closed steps from the recorder, and sees that worker 0 gets them.

Once a second: read the steps that are over, send them (or, on worker 0, collect everybody's), and learn or say what the
verdict is. It is a daemon, and ends with the world; if it fails, it says so once, and the training goes on.

Letters go through the world's store. Who writes what, one writer per key:

    letter/R/N   by worker R: its N-th letter, some records of steps. Worker 0 deletes it once read.
    state        by worker 0: the verdict, the summary, and how many letters of each worker it has read.

Why nothing can hang. There are no collective operations. The store is asked by a connection of this thread's own, so
it never waits for the training thread, nor that for it. Keys are looked for (`check`) before they are read, so no read
waits for a writer; what is left are round trips to the store's server, with a deadline. Nobody waits for anybody else's
letter: worker 0 reads what is there, letters of one worker in the order of N, and a worker that is stuck or dead just
sends none. If worker 0 is dead nobody reads; a worker then sees by `state` that its letters pile up, and drops what it
would send instead of filling the store's memory. If the store is gone, with the launcher or the worker that served it,
sending fails; the watcher ends and the training goes on.
"""

import dataclasses
import json
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.comm.peers import Peers
from lockstep.watching.collector import Collector, Known
from lockstep.watching.network import HostClock, Probes
from lockstep.watching.recorder import Recorder

_EVERY_S = 1.0
_CATCH_UP_S = 1.5
"""How long `catch_up` waits for letters of the others, who write every second."""
_GRACE_S = 3.0
"""How long worker 0 waits at its end for the others' last letters, and they for its last word."""
_STORE_DEADLINE = timedelta(seconds=10)
_MOST_UNREAD = 30
"""Letters of one worker that may wait in the store."""


class StoreMail:
    """One worker's letter box in the store."""

    def __init__(self, peers: Peers, rank: int) -> None:
        assert peers.store is not None
        store: dist.Store = peers.store.clone()  # type: ignore[attr-defined]  # Not in torch's stubs.
        store.set_timeout(_STORE_DEADLINE)
        # Several groups of workers, each watched by itself, may share the store.
        whole = ",".join(str(peer.rank) for peer in peers.all)
        self._store = dist.PrefixStore(f"watching/{whole}", store)
        self._rank = rank
        self._num_sent = self._num_unread = 0
        self._num_read = [0] * len(peers.all)
        """How many letters of each worker have been read, on worker 0."""

    def send(self, letter: dict[str, Any]) -> None:
        """To worker 0; dropped if too many lie unread."""
        if self._num_unread < _MOST_UNREAD:
            self._store.set(f"letter/{self._rank}/{self._num_sent}", json.dumps(letter))
            self._num_sent += 1
            self._num_unread += 1

    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        """On worker 0: letters that have come since, each with its sender."""
        letters = []
        for rank in range(1, len(self._num_read)):
            while self._store.check([key := f"letter/{rank}/{self._num_read[rank]}"]):
                letters.append((rank, json.loads(self._store.get(key))))
                self._store.delete_key(key)
                self._num_read[rank] += 1
        return letters

    def publish(self, known: Known) -> None:
        """On worker 0: say what is known."""
        self._store.set("state", json.dumps({"known": dataclasses.asdict(known), "read": self._num_read}))

    def published(self) -> Known:
        """What worker 0 published last."""
        if not self._store.check(["state"]):
            return Known()
        state = json.loads(self._store.get("state"))
        self._num_unread = self._num_sent - state["read"][self._rank]
        return Known.from_json(state["known"])


class Background:
    """The thread. Phases: start; catch_up, whenever somebody wants to know; close.

    collector: on worker 0. mail: where there are several workers.
    """

    def __init__(
        self, recorder: Recorder, collector: Collector | None, mail: StoreMail | None, probes: Probes | None
    ) -> None:
        self._recorder, self._collector, self._mail, self._probes = recorder, collector, mail, probes
        self._known = Known()
        """The newest that worker 0 has found out, as far as this worker has heard."""
        self._newest = 0
        """The last step that this worker has told of."""
        self._is_over = threading.Event()
        self._requests: queue.SimpleQueue[threading.Event] = queue.SimpleQueue()
        """Set once it is found out what is known now; `_is_over` among them wakes the thread."""
        self._caught_up_at = 0.0
        self._waits_at_end = True
        self._thread = threading.Thread(target=self._run, name="lockstep-watching", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, *, waits: bool) -> None:
        """Send what is left, and end; `waits`: until worker 0 has said its last word."""
        self._waits_at_end = waits
        self._is_over.set()
        self._requests.put(self._is_over)
        self._thread.join(2 * _GRACE_S + 4.0)

    def catch_up(self) -> Known:
        """What is known of the run, with what has happened by now; the others are waited for briefly, if at all.

        At once where all workers call this; else when those who do not have written their next letter. Not more than
        once a second: what was found out then counts for so long.
        """
        has_ended = self._is_over.is_set() or not self._thread.is_alive()
        if not has_ended and time.monotonic() - self._caught_up_at >= _EVERY_S:
            is_known = threading.Event()
            self._requests.put(is_known)
            is_known.wait(2 * _CATCH_UP_S)
        return self._known

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                try:
                    self._answer(self._requests.get(timeout=_EVERY_S))
                except queue.Empty:
                    self._tell(is_last=False)
            self._tell(is_last=True)
            self._say_goodbye()
        except Exception as error:
            if not self._is_over.is_set():  # Else the store went first, with whoever served it.
                print(f"lockstep: watching has ended, training goes on: {error}", file=sys.stderr)
        finally:
            while not self._requests.empty():
                self._requests.get().set()
            if self._probes is not None:
                self._probes.close()

    def _tell(self, *, is_last: bool) -> None:
        """Worker 0 hears of this worker's steps, and this worker of what is known."""
        records, newest = self._recorder.take(self._known.every, is_last=is_last)
        self._newest = newest or self._newest
        letter: dict[str, Any] = {
            "records": [record.to_json() for record in records],
            "newest": self._newest,
            "clock": dataclasses.astuple(HostClock.mine()),
            "end": is_last,
        }
        if self._probes is not None:
            letter |= {"trips": self._probes.delays(), "ahead": self._probes.ahead(0)}
        if self._collector is not None:
            self._collector.add(0, letter)
        elif self._mail is not None:
            self._mail.send(letter)
        self._learn()

    def _learn(self, *, at_end: bool = False) -> None:
        """Worker 0 puts together what has come, and publishes what it says; the others read that."""
        if self._collector is not None:
            for rank, letter in self._mail.receive() if self._mail is not None else ():
                self._collector.add(rank, letter)
            self._known = self._collector.settle(at_end=at_end)
            if self._mail is not None:
                self._mail.publish(self._known)
        elif self._mail is not None:
            self._known = self._mail.published()

    def _answer(self, request: threading.Event) -> None:
        """Let who has asked what is known now go on, once everybody has come as far as this worker has."""
        if request is self._is_over:
            return
        try:
            self._tell(is_last=False)
            self._learn_until(lambda: self._known.num_complete >= self._newest or self._is_over.is_set(), _CATCH_UP_S)
        finally:
            self._caught_up_at = time.monotonic()
            request.set()

    def _say_goodbye(self) -> None:
        """Worker 0 settles what is left, whoever has not told of it, when all have said their last or time is up."""
        collector = self._collector
        have_ended = (lambda: self._known.is_last) if collector is None else (lambda: collector.all_have_ended)
        self._learn_until(have_ended, _GRACE_S if self._waits_at_end else 0.0)
        if collector is not None:
            self._learn(at_end=True)

    def _learn_until(self, is_known: Callable[[], bool], within_s: float) -> None:
        give_up = time.monotonic() + within_s
        while not is_known() and time.monotonic() < give_up:
            time.sleep(0.02)
            self._learn()
