"""Work under way: what a caller gets for an operation that a queue carries out, see queue.py."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.comm.shm.queue import Queue

NO_TIMEOUT = timedelta(0)
"""What torch passes for 'no timeout of its own'."""


NOW, NEVER = 0.0, math.inf
"""When a thread is to see to a work; else a time on `time.monotonic`'s clock."""
_SETTLING = threading.Lock()
"""Orders the end of a work and the asking for its future; held for a moment only, so one for all of them will do."""
_ALWAYS = threading.Event()
_ALWAYS.set()
_CALLER = threading.local()


@contextlib.contextmanager
def waited_for() -> Iterator[None]:
    """What this thread starts in here it will wait for next, by `Peers.wait`: no other thread need be woken for it."""
    before, _CALLER.will_wait = will_wait(), True
    try:
        yield
    finally:
        _CALLER.will_wait = before


@contextlib.contextmanager
def beside_the_pass() -> Iterator[None]:
    """What this thread starts in here is never left for the end of a backward pass."""
    before, _CALLER.is_beside = is_beside(), True
    try:
        yield
    finally:
        _CALLER.is_beside = before


def will_wait() -> bool:
    """Whether this thread has said that it will wait for what it starts."""
    return getattr(_CALLER, "will_wait", False)


def is_beside() -> bool:
    """Whether this thread has said that nothing is to be left."""
    return getattr(_CALLER, "is_beside", False)


def settles() -> bool:
    """Whether this thread is in what somebody wanted to be called at the end of a work."""
    return getattr(_CALLER, "settles", False)


class ShmWork(dist.Work):
    """One operation, under way or done. Done by the thread that calls `finish`, waited for by any."""

    def __init__(
        self, name: str, outputs: object, before: Callable[[], None] | None = None, *, done: bool = False
    ) -> None:
        super().__init__()
        self.name = name
        self._before = before
        """What is left to do before others may see the outputs."""
        self._outputs = outputs
        self._error: BaseException | None = None
        self._source = -1
        self._is_done = _ALWAYS if done else threading.Event()
        self._end: torch.futures.Future[None] | None = None
        """Settled at the end of the work,"""
        self._future: torch.futures.Future[object] | None = None
        """and what follows from it: the outputs, or the error."""
        self._queue: Queue | None = None
        """Where it waits for its turn;"""
        self.due = NOW
        """when one of the queue's threads is to see to it, if nobody else has;"""
        self.is_left = False
        """whether that is never, since it is left for the end of a backward pass."""

    def wait_in(self, queue: "Queue", *, due: float, is_left: bool) -> None:
        """It waits for its turn in `queue`."""
        self._queue, self.due, self.is_left = queue, due, is_left

    def leave_queue(self) -> None:
        """It has been carried out, and is about to be marked as done."""
        self._queue = None

    @property
    def is_queued(self) -> bool:
        """Whether it waits for its turn, or is being carried out."""
        return self._queue is not None

    @property
    def is_asked(self) -> bool:
        """Whether somebody has asked for its future, and may want to be called at its end."""
        return self._end is not None

    def help(self, between: Callable[[], None]) -> None:
        """Carry it out here, if nobody is at it or at one before it; `between` is called while others do not come."""
        queue = self._queue
        if queue is not None:
            queue.help(self, between)

    def _hurry(self) -> None:
        """Have a thread of the queue's see to it at once."""
        queue = self._queue
        if self.due != NOW and queue is not None:
            self.due = NOW
            queue.wake()

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Mark as done, well or with `error`; `source` is the rank that a message came from."""
        end = self.conclude(error, source)
        if end is not None:
            self.settle(end)

    def conclude(self, error: BaseException | None = None, source: int = -1) -> "torch.futures.Future[None] | None":
        """As `finish`, but for those who want to be called: returns what is to be settled for them, if any do."""
        if error is None and self._before is not None:
            self._before()
        self._before = None
        with _SETTLING:
            self._error, self._source = error, source
            self._is_done.set()
            self._queue = None
            return self._end

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when done; raise the operation's error, or LockstepError when `timeout` is over."""
        queue = self._queue
        if queue is not None:
            queue.require_another_thread(self.name)
            if timeout <= NO_TIMEOUT:
                queue.help(self)
        self._hurry()
        seconds = timeout.total_seconds() if timeout > NO_TIMEOUT else None
        if not (self._is_done.wait(seconds) if queue is None else queue.block(self._is_done, seconds)):
            raise LockstepError(f"{self.name}: not done after {timeout}.")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    @property
    def is_over(self) -> bool:
        """As `is_completed`, but hurries nobody."""
        return self._is_done.is_set()

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or badly."""
        self._hurry()
        return self._is_done.is_set()

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Why the operation failed."""
        return self._error

    def source_rank(self) -> int:
        """The rank in the group that a received message came from."""
        return self._source

    _source_rank = source_rank

    def result(self) -> Any:
        """The output tensors."""
        self.wait()
        return self._outputs

    def get_future(self) -> "torch.futures.Future[object]":
        """A future that gets the output tensors, or the error.

        torch's DDP waits for it in C++, where what Python's `Future.set_exception` sets is a result like any other.
        What a callback raises is an error there too. In both languages it is raised as a RuntimeError that quotes it.
        """
        if not self.is_left:
            self._hurry()
        with _SETTLING:
            asked_before = self._future is not None
            if self._end is None or self._future is None:
                self._end = torch.futures.Future()
                self._future = self._end.then(self._answer)
            end, future = self._end, self._future
            settle = self._is_done.is_set() and not asked_before
        if settle:  # Not under the lock: it calls whoever waits for the future.
            self.settle(end)
        return future

    def _answer(self, _: object) -> object:
        if self._error is not None:
            raise self._error
        return self._outputs

    def settle(self, end: "torch.futures.Future[None]") -> None:
        """Say by `end` what has come of the work, and so call who wants to be called."""
        before, _CALLER.settles = settles(), True
        try:
            end.set_result(None)
        finally:
            _CALLER.settles = before


def await_all(works: Sequence[ShmWork]) -> None:
    """Return when all of `works` are done; raise the first one's error."""
    for work in works:
        work.wait()
