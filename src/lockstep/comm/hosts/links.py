"""The messages between workers of different hosts: sends and receives over gloo, in the thread that is at an operation.

gloo has no call that ends the waits of others, and its errors do not tell who is lost: when a worker dies, its
neighbours close their connections in turn. So a host that breaks the group writes why to the group's store, and then
closes its connections; who finds one closed looks there before it takes the other end for the cause.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.peers import Peer
from lockstep.comm.shm.queue import NO_TIMEOUT, ShmWork
from lockstep.comm.shm.segment import as_bytes
from lockstep.errors import LockstepError, UsageError, WorkerLost

NEWS_S = 1.0
"""How long the workers of a host may take to find that one of them is dead, and to write it down."""
TAG, CLOSING_TAG = 2**31 - 1, 2**31 - 2
"""Those of users are expected to be smaller."""

Message = tuple[int, Tensor]
"""The rank of the other worker, and a flat tensor."""
Posted = list[tuple[int, Tensor, Any]]
"""Messages under way: rank, tensor, and what to wait for."""


class Links:
    """The connections of one worker. One thread at a time, but for `close`."""

    def __init__(
        self, store: dist.Store, rank: int, peers: tuple[Peer, ...], timeout: timedelta, look: Callable[[], None]
    ) -> None:
        """`peers`: by rank of the group; `look`: raises if a worker of this host has broken the group."""
        self.gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("links", store), rank, len(peers), timeout)
        self.timeout = timeout
        """The deadline of every wait."""
        self._look = look
        self._store, self._peers, self._me = store, peers, peers[rank]
        self._is_closed = False

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Posted:
        """Start sending and receiving; what is empty does not travel. Returns what to wait for.

        Between two workers, what is sent first is received first.
        """
        posted: Posted = []
        for operate, messages in ((self.gloo.recv, receives), (self.gloo.send, sends)):
            for rank, part in messages:
                if part.numel():
                    with self._explaining(rank):
                        posted.append((rank, part, operate([as_bytes(part)], rank, TAG)))
        return posted

    def wait(self, posted: Posted) -> None:
        """Return when all has been sent and received."""
        for rank, _, work in posted:
            with self._explaining(rank):
                work.wait(self.timeout)

    @contextlib.contextmanager
    def _explaining(self, rank: int) -> Iterator[None]:
        """Within it, an error of the connection to a worker is raised in our words, as the loss that it comes from."""
        try:
            yield
        except RuntimeError as error:
            raise self._explained(self._peers[rank], error) from error

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive."""
        self.wait(self.post(sends, receives))

    def close(self, why: LockstepError) -> None:
        """Say why, and close all connections: who waits at one, here or at the other end, is told at once.

        gloo's own `abort` leaves them open. But a wait that times out closes all of its group.
        """
        if self._is_closed:
            return
        self._is_closed = True
        ranks = list(why.ranks) if isinstance(why, WorkerLost) else []
        if ranks or isinstance(why, UsageError):
            said = {"usage": isinstance(why, UsageError), "ranks": ranks, "text": str(why)[:1000]}
            with contextlib.suppress(RuntimeError, OSError):
                self._store.set(f"broken/{self._me.host}", json.dumps(said))
        for other in range(len(self._peers)):
            if self._peers[other] is self._me:
                continue
            try:
                never = self.gloo.recv([torch.empty(1, dtype=torch.uint8)], other, CLOSING_TAG)
                never.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "timed out" in str(error).lower():
                    break  # Else that one was closed already, and others may not be.

    def _explained(self, other: Peer, error: RuntimeError) -> LockstepError:
        """What to raise when the connection to `other` broke, or nothing came."""
        failure = f"the connection to worker {other.rank} broke: {error}"
        if "timed out" in str(error).lower():
            return LockstepError(failure)
        give_up, key = time.monotonic() + NEWS_S, f"broken/{other.host}"
        while time.monotonic() < give_up:
            self._look()  # A worker of this host may know.
            with contextlib.suppress(RuntimeError, OSError):
                if self._store.check([key]):
                    return _told(json.loads(self._store.get(key)))
            time.sleep(0.02)
        return WorkerLost(failure, (other.rank,))


def _told(said: dict[str, Any]) -> LockstepError:
    text = f"another host gave up on this group: {said['text']}"
    return UsageError(str(said["text"])) if said["usage"] else WorkerLost(text, tuple(said["ranks"]))


class UserMessage(dist.Work):
    """A send or receive of the user's. A wait with a limit leaves the connection: one of gloo's would close it."""

    def __init__(self, work: Any, timeout: timedelta) -> None:
        super().__init__()
        self._work, self._timeout = work, timeout
        self._end = ShmWork("message", [])
        self._lock = threading.Lock()
        self._is_awaited = False
        """Whether gloo's wait has begun: it may be called once."""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when it is over; raise its error, or LockstepError when `timeout` is over."""
        if timeout > NO_TIMEOUT:
            self._watch()
        elif self._begins():
            self._await()
        return self._end.wait(timeout)

    def is_completed(self) -> bool:
        """Whether it has ended, well or badly."""
        self._watch()
        return self._end.is_completed()

    def source_rank(self) -> int:
        """The rank in the group that it came from."""
        return int(self._work._source_rank())

    _source_rank = source_rank

    def _watch(self) -> None:
        """Have a thread wait for it."""
        if self._begins():
            threading.Thread(target=self._await, name="lockstep-hosts-p2p", daemon=True).start()

    def _begins(self) -> bool:
        with self._lock:
            begins, self._is_awaited = not self._is_awaited, True
        return begins

    def _await(self) -> None:
        try:
            self._work.wait(self._timeout)
        except RuntimeError as error:
            self._end.finish(error)
        else:
            self._end.finish()
