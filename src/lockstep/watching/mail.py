"""How what workers saw gets to worker 0, and what that makes of it back to them: through the world's store.

Who writes what, one writer per key:

    letter/R/N   by worker R: its N-th letter, some records of steps. Worker 0 deletes it once read.
    state        by worker 0: the verdict, the summary, and how many letters of each worker it has read.
    probe/R      by worker R, once: where its probes are answered.

Why nothing can hang. The store is asked by a connection of this thread's own, so it never waits for the training
thread, nor that for it. Keys are looked for (`check`) before they are read, so no read waits for a writer; what is left
are round trips to the store's server, with a deadline. Nobody waits for anybody else's letter: worker 0 reads what is
there, letters of one worker in the order of N, and a worker that is stuck or dead just sends none. If worker 0 is dead
nobody reads; a worker then sees by `state` that its letters pile up, and drops what it would send instead of filling
the store's memory. If the store is gone, with the launcher or the worker that served it, sending fails; the watcher
ends and the training goes on.
"""

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.comm.peers import Peers

_DEADLINE = timedelta(seconds=10)
_MOST_UNREAD = 30
"""Letters of one worker that may wait in the store."""


class Mail:
    """One worker's letter box."""

    def __init__(self, peers: Peers, rank: int) -> None:
        assert peers.store is not None
        store: dist.Store = peers.store.clone()  # type: ignore[attr-defined]  # Not in torch's stubs.
        store.set_timeout(_DEADLINE)
        # Several groups of workers, each watched by itself, may share the store.
        whole = ",".join(str(peer.rank) for peer in peers.all)
        self._store = dist.PrefixStore(f"watching/{whole}", store)
        self.rank, self._size = rank, len(peers.all)
        self._sent = 0
        self._read = [0] * self._size
        """How many letters of each worker have been read, on worker 0."""
        self._state: dict[str, Any] = {}
        self.dropped = 0
        """How many letters were not sent, since too many lay unread."""

    def send(self, letter: dict[str, Any]) -> None:
        """To worker 0."""
        known: list[int] = self._state.get("read", [])
        if self._sent - (known[self.rank] if known else 0) >= _MOST_UNREAD:
            self.dropped += 1
            return
        self._store.set(f"letter/{self.rank}/{self._sent}", json.dumps(letter))
        self._sent += 1

    def receive(self) -> list[tuple[int, dict[str, Any]]]:
        """On worker 0: letters that have come since, each with its sender."""
        letters = []
        for rank in range(1, self._size):
            while self._store.check([key := f"letter/{rank}/{self._read[rank]}"]):
                letters.append((rank, json.loads(self._store.get(key))))
                self._store.delete_key(key)
                self._read[rank] += 1
        return letters

    def publish(self, state: dict[str, Any]) -> None:
        """On worker 0: say what is known."""
        self._store.set("state", json.dumps({**state, "read": self._read}))

    def state(self) -> dict[str, Any]:
        """What worker 0 published last; empty before that."""
        if self._store.check(["state"]):
            self._state = json.loads(self._store.get("state"))
        return self._state

    def announce(self, address: str) -> None:
        """Say where this worker's probes are answered."""
        self._store.set(f"probe/{self.rank}", address)

    def address(self, rank: int) -> str | None:
        """Where those of `rank` are, if it has said so."""
        key = f"probe/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None
