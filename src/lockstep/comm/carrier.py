"""Carries out operations of several messages each beside the backward pass, one operation after the other.

Some reductions are more than one collective: what is sent second depends on what the first one brought. They cannot be
launched and waited for as one message can. So on the CPU a thread goes through them, on a GPU they are queued in a
stream of their own. Operations are carried out in the order in which they were given, which must be the same on all
workers, over a group that nobody else uses at the same time: so the n-th message of the group is the n-th for all.

A thread ends with the process (it is a daemon), or when it is closed. What an operation raises is raised where it is
waited for; a connection that breaks ends every wait in gloo, and so the operation.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from lockstep.comm.shm.queue import Queue


class Carrier(Protocol):
    """Carries out operations."""

    def carry_out(self, operate: Callable[[], object]) -> Any:
        """Start an operation; returns what to wait for."""

    def close(self) -> None:
        """No more will come."""


def carrier_of(device: torch.device, name: str) -> Carrier:
    """A carrier for tensors of `device`."""
    return StreamCarrier(device) if device.type == "cuda" else ThreadCarrier(name)


class ThreadCarrier:
    """A thread."""

    def __init__(self, name: str) -> None:
        self._queue = Queue(f"lockstep-{name}", lambda error: error)

    def carry_out(self, operate: Callable[[], object]) -> Any:
        """See Carrier."""

        def operation() -> None:
            operate()

        return self._queue.submit("a reduction", operation, [])

    def close(self) -> None:
        """See Carrier."""
        self._queue.close()


class StreamCarrier:
    """A stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def carry_out(self, operate: Callable[[], object]) -> "StreamEvent":
        """Queue it behind what the current stream has; returns what a stream is to wait for."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            operate()
            return StreamEvent(self._stream.record_event())

    def close(self) -> None:
        """Nothing: a stream ends by itself."""


class StreamEvent:
    """The end of an operation in a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        """Let the current stream wait for it."""
        self._event.wait()
