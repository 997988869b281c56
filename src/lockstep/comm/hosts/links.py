"""The messages between workers of different hosts: sends and receives over gloo, in the thread that is at an operation.

gloo names no ranks in its errors, and has no call that ends the waits of another thread. Both are made up for here.
"""

import contextlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm.segment import as_bytes
from lockstep.errors import LockstepError

TAG, CLOSING_TAG = 2**31 - 1, 2**31 - 2
"""Those of users are expected to be smaller."""

Message = tuple[int, Tensor]
"""The rank of the other worker, and a flat tensor."""
Posted = list[tuple[int, Tensor, Any]]
"""Messages under way: rank, tensor, and what to wait for."""


class Links:
    """The connections of one worker. One thread at a time, but for `close`."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, look: Callable[[], None]) -> None:
        """`look`: raises if a worker of this host has broken the group."""
        self.gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore("links", store), rank, size, timeout)
        self.timeout = timeout
        """The deadline of every wait."""
        self.num_bytes_sent = 0
        """To other workers, by operations of the group."""
        self._look = look
        self._other = (rank + 1) % size

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Posted:
        """Start sending and receiving; what is empty does not travel. Returns what to wait for.

        Between two workers, what is sent first is received first.
        """
        posted = [(rank, part, self.gloo.recv([as_bytes(part)], rank, TAG)) for rank, part in receives if part.numel()]
        for rank, part in sends:
            if part.numel():
                posted.append((rank, part, self.gloo.send([as_bytes(part)], rank, TAG)))
                self.num_bytes_sent += part.nbytes
        return posted

    def wait(self, posted: Posted) -> None:
        """Return when all has been sent and received."""
        for rank, _, work in posted:
            try:
                work.wait(self.timeout)
            except RuntimeError as error:
                self._look()  # A worker of this host may know better.
                raise LockstepError(f"the connection to worker {rank} of the group broke: {error}") from error

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive."""
        self.wait(self.post(sends, receives))

    def close(self) -> None:
        """Close all connections: who waits at one, here or at the other end, is told at once.

        gloo's own `abort` leaves them open. But a wait that times out closes all of its group.
        """
        with contextlib.suppress(RuntimeError):
            never = self.gloo.recv([torch.empty(1, dtype=torch.uint8)], self._other, CLOSING_TAG)
            never.wait(timedelta(milliseconds=1))
