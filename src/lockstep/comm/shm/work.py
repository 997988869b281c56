"""Work under way: what a caller gets for an operation, and the queue in which operations wait for their turn.

One operation at a time is carried out, in the order in which they were given, by one of three:

    the queue's thread     what was submitted
    who calls `run`        its own operation, if nothing is before it
    who calls `help`       what it waits for, and all that is before it, if nobody is at any of it

`_busy` says that somebody is at one; it changes under the lock, and whoever has set it takes it back, wakes the thread
if it has to see to more, and only then marks the work as done. So an operation is taken once, and in its turn.

Between two threads an operation costs two switches, more than a small message. So whoever will wait at once says so by
`waited_for`, and the thread is left asleep: the operation is carried out where it is waited for. Nothing is lost by
that: any other look at the work (`wait`, `is_completed`, `get_future`) wakes the thread first, as does the next
operation that is submitted without the word.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import LockstepError, UsageError

NO_TIMEOUT = timedelta(0)
"""What torch passes for 'no timeout of its own'."""


_SETTLING = threading.Lock()
"""Orders the end of a work and the asking for its future; held for a moment only, so one for all of them will do."""
_ALWAYS = threading.Event()
_ALWAYS.set()
_CALLER = threading.local()


@contextlib.contextmanager
def waited_for() -> Iterator[None]:
    """What this thread starts in here it will wait for next, by `Peers.wait`: no other thread need be woken for it."""
    before = getattr(_CALLER, "will_wait", False)
    _CALLER.will_wait = True
    try:
        yield
    finally:
        _CALLER.will_wait = before


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
        self._future: torch.futures.Future[object] | None = None
        self._queue: Queue | None = None
        """Where it waits for its turn;"""
        self.sleeps = False
        """without the queue's thread knowing of it."""

    def wait_in(self, queue: "Queue", *, sleeps: bool) -> None:
        """It waits for its turn in `queue`, whose thread knows of it unless it `sleeps`."""
        self._queue, self.sleeps = queue, sleeps

    def help(self, between: Callable[[], None]) -> None:
        """Carry it out here, if nobody is at it or at one before it; `between` is called while others do not come."""
        queue = self._queue
        if queue is not None:
            queue.help(self, between)

    def _wake(self) -> None:
        queue = self._queue
        if self.sleeps and queue is not None:
            self.sleeps = False
            queue.wake()

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Mark as done, well or with `error`; `source` is the rank that a message came from."""
        if error is None and self._before is not None:
            self._before()
        self._before = None
        with _SETTLING:
            self._error, self._source = error, source
            self._is_done.set()
            self._queue = None
            future = self._future
        if future is not None:
            self._settle(future)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when done; raise the operation's error, or LockstepError when `timeout` is over."""
        queue = self._queue
        if queue is not None:
            queue.require_another_thread(self.name)
        self._wake()
        seconds = timeout.total_seconds()
        if not self._is_done.wait(seconds if seconds > 0 else None):
            raise LockstepError(f"{self.name}: not done after {timeout}.")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    @property
    def is_over(self) -> bool:
        """As `is_completed`, but wakes nobody."""
        return self._is_done.is_set()

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or badly."""
        self._wake()
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
        """A future that gets the output tensors, or the error."""
        self._wake()
        with _SETTLING:
            asked_before = self._future is not None
            future = self._future = self._future or torch.futures.Future()
            settle = self._is_done.is_set() and not asked_before
        if settle:  # Not under the lock: it calls whoever waits for the future.
            self._settle(future)
        return future

    def _settle(self, future: "torch.futures.Future[object]") -> None:
        if self._error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self._error)


def await_all(works: Sequence[ShmWork]) -> None:
    """Return when all of `works` are done; raise the first one's error."""
    for work in works:
        work.wait()


Operation = Callable[[bool], None]
"""Carries out an operation; its argument says whether a caller waits for it right now."""


class Queue:
    """Carries out operations one at a time, in the order in which they were given."""

    def __init__(
        self, name: str, fail: Callable[[BaseException], BaseException], *, can_be_helped: bool = False
    ) -> None:
        """can_be_helped: operations call `between` while they wait for others."""
        self._name = name
        self._fail = fail
        """Turns what an operation raised into what its caller gets."""
        self._can_be_helped = can_be_helped
        self._between: Callable[[], None] | None = None
        """What who helps has to do now and then."""
        self._waiting: deque[tuple[ShmWork, Operation]] = deque()
        self._busy = False
        self._busy_thread: int | None = None
        """Who is at an operation."""
        self._closed = False
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)
        self._done = ShmWork(name, [], done=True)
        self._thread: threading.Thread | None = None

    def run(self, name: str, operation: Operation, outputs: "list[Tensor]") -> ShmWork:
        """Carry `operation` out now, in this thread if nothing is before it; return when it is done.

        What it returns is done, and says nothing of the outputs: the caller has them.
        """
        self.require_another_thread(name)
        with self._lock:
            alone = not self._busy and not self._waiting
            if alone:
                self._busy, self._busy_thread = True, threading.get_ident()
        if not alone:
            work = self.submit(name, operation, outputs)
            work.wait()
            return work
        try:
            operation(True)
        except Exception as error:
            failure = self._fail(error)
            if failure is error:
                raise
            raise failure from error
        except BaseException as error:
            self._fail(error)  # An interrupt in mid-operation leaves the group broken, and is the caller's own.
            raise
        finally:
            self._make_way()
        return self._done

    def help(self, work: ShmWork, between: Callable[[], None]) -> None:
        """Carry out, in this thread, what is before `work` and `work` itself, if nobody is at any of it."""
        while self._can_be_helped and not work.is_over:
            with self._lock:
                if self._busy or not self._waiting:
                    return
                first, operation = self._waiting.popleft()
                self._busy, self._busy_thread = True, threading.get_ident()
                self._between = between
            error: BaseException | None = None
            try:
                operation(True)
            except BaseException as raised:
                error = self._fail(raised)
                if error is not raised:
                    raise  # The caller's own: an interrupt, or what a handler of a signal has raised.
            finally:
                self._between = None
                self._make_way()
                first.finish(error)

    def require_another_thread(self, name: str) -> None:
        """Raise UsageError if this thread is at an operation: it would wait for itself."""
        if self._busy_thread == threading.get_ident():
            raise UsageError(
                f"{name}: called by code that has interrupted another operation of the same group, such as a signal "
                "handler, and that would wait for ever. Let the handler set a flag, and look at it between steps."
            )

    def between(self) -> None:
        """Called by an operation that waits for others, now and then, in the thread that carries it out."""
        if self._between is not None:
            self._between()

    def _make_way(self) -> None:
        with self._lock:
            self._busy, self._busy_thread = False, None
            if not all(work.sleeps for work, _ in self._waiting):
                self._wake()

    def wake(self) -> None:
        """Let the thread see what is waiting."""
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._change.notify()

    def submit(self, name: str, operation: Operation, outputs: object) -> ShmWork:
        """Have `operation` carried out by the queue's own thread, or where it is waited for; return at once."""
        work = ShmWork(name, outputs)
        sleeps = self._can_be_helped and getattr(_CALLER, "will_wait", False)
        work.wait_in(self, sleeps=sleeps)
        with self._lock:
            self._waiting.append((work, operation))
            if not sleeps:
                self._wake()
        return work

    def close(self) -> None:
        """Let the thread end once it has nothing left to do, and wait a moment for it."""
        with self._change:
            self._closed = True
            self._change.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=2)

    def _serve(self) -> None:
        while True:
            with self._change:
                while self._busy or not self._waiting:
                    if self._closed and not self._waiting:
                        return
                    self._change.wait()
                work, operation = self._waiting.popleft()
                self._busy, self._busy_thread = True, threading.get_ident()
            error: BaseException | None = None
            try:
                operation(False)
            except BaseException as raised:
                error = self._fail(raised)
            with self._change:
                self._busy, self._busy_thread = False, None
            work.finish(error)
            del work, operation
