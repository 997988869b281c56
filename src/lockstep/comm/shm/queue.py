"""The queue in which the operations of a group wait for their turn, and the works that callers get for them.

One operation at a time is carried out, in the order in which they were given, by one of three:

    the queue's thread     what was submitted
    a caller of `run`      its own operation, if nothing is before it
    a waiter (`help`)      what it waits for, and all that is before it, if no thread is at any of it

Between two threads an operation costs two switches, more than a small message. So a caller that will wait next says so
(`waited_for`): what it submits is asleep, and the thread leaves it to the waiter. It is woken by an operation behind it
that is awake, or by a look of a caller that cannot carry it out (`is_completed`, `get_future`, a wait with a limit).

`_owner` is the thread that is at an operation. It changes under the lock, and the thread that has set it takes it back,
wakes the queue's thread if there is more to do, and only then marks the work as done. So an operation is taken once,
and in its turn. An operation may wait for one before it (a coalesced call does), which at that moment may be carried
out and not yet marked: the work has left the queue before `_owner` is taken back, so that such a wait is not taken for
one that waits for itself, and a waiter for that work takes none behind it.

What is called at the end of a work (`get_future().then`) may start another operation of the group and wait for it, as
torch's PowerSGD does. So it runs in a thread of its own: the thread that has carried the operation out goes on.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import LockstepError, UsageError

NO_TIMEOUT = timedelta(0)
"""What torch passes for 'no timeout of its own'."""
CLOSING_S = 2.0
"""How long `close` waits for the thread."""

_SETTLING = threading.Lock()
"""Orders the end of a work and the asking for its future; held for a moment only, so one for all of them will do."""
_CALLER = threading.local()

Operation = Callable[[], object]


@contextlib.contextmanager
def waited_for() -> Iterator[None]:
    """What this thread starts in here it will wait for next, by `Peers.wait`: no other thread need be woken for it."""
    before, _CALLER.will_wait = _will_wait(), True
    try:
        yield
    finally:
        _CALLER.will_wait = before


def _will_wait() -> bool:
    """Whether this thread has said that it will wait for what it starts."""
    return getattr(_CALLER, "will_wait", False)


KEPT_BYTES, NUM_KEPT = 64, 256
"""Works on so few bytes are kept until so many others have come: see Queue."""


class ShmWork(dist.Work):
    """One operation, under way or done. Done by the thread that calls `finish`, waited for by any."""

    def __init__(
        self,
        name: str,
        outputs: object,
        before: Callable[[], None] | None = None,
        queue: "Queue | None" = None,
        *,
        is_awake: bool = True,
    ) -> None:
        super().__init__()
        self.name = name
        self._before = before
        """What is left to do before others may see the outputs."""
        self._outputs = outputs
        self._error: BaseException | None = None
        self._source = -1
        self._is_done = threading.Event()
        self._end: torch.futures.Future[None] | None = None
        """A future that is settled at the end of the work."""
        self._future: torch.futures.Future[object] | None = None
        """What callers get, which follows from `_end`: the outputs, or the error."""
        self._queue = queue
        """The queue in which it waits for its turn, or whose thread is at it."""
        self.is_awake = is_awake
        """Whether the queue's thread is to carry it out if no waiter has by then."""

    def leave_queue(self) -> None:
        """It has been carried out, and is about to be marked as done."""
        self._queue = None

    @property
    def is_queued(self) -> bool:
        """Whether it waits for its turn, or is being carried out."""
        return self._queue is not None

    def help(self, between: Callable[[], None]) -> None:
        """Carry it out here, if no thread is at it or at one before it; `between` is called during its waits."""
        queue = self._queue
        if queue is not None:
            queue.help(self, between)

    def _hurry(self) -> None:
        """Have the queue's thread carry it out."""
        queue = self._queue
        if not self.is_awake and queue is not None:
            self.is_awake = True
            queue.wake()

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Mark as done, well or with `error`; `source` is the rank that a message came from."""
        if error is None and self._before is not None:
            self._before()
        self._before = None
        with _SETTLING:
            self._error, self._source = error, source
            self._is_done.set()
            end = self._end
        if end is not None:
            threading.Thread(target=end.set_result, args=(None,), name="lockstep-shm-called", daemon=True).start()

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when done; raise the operation's error, or LockstepError when `timeout` is over."""
        queue = self._queue
        if queue is not None:
            queue.require_another_thread(self.name)
            if timeout <= NO_TIMEOUT:
                queue.help(self)
        self._hurry()
        if not self._is_done.wait(timeout.total_seconds() if timeout > NO_TIMEOUT else None):
            raise LockstepError(f"{self.name}: not done after {timeout}.")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

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
        self._hurry()
        with _SETTLING:
            if self._future is not None:
                return self._future
            end = self._end = torch.futures.Future()
            future = self._future = end.then(self._answer)
            is_late = self._is_done.is_set()
        if is_late:  # Not under the lock: it calls whoever waits for the future.
            end.set_result(None)
        return future

    def _answer(self, _: object) -> object:
        if self._error is not None:
            raise self._error
        return self._outputs


def await_all(works: Sequence[ShmWork]) -> None:
    """Return when all of `works` are done; raise the first one's error."""
    for work in works:
        work.wait()


class Turn:
    """How the operation at hand is waited for: told by the queue, asked by the operation while it waits for others."""

    def __init__(self) -> None:
        self.is_callers = False
        """Whether the thread that carries the operation out has nothing else to do."""
        self._duty: Callable[[], None] | None = None

    def begin(self, *, is_callers: bool, duty: Callable[[], None] | None = None) -> None:
        """The next operation begins, or there is none now. duty: what its thread has to do now and then."""
        self.is_callers, self._duty = is_callers, duty

    def between(self) -> None:
        """Called by the operation now and then, in the thread that carries it out."""
        if self._duty is not None:
            self._duty()


class Queue:
    """Carries out operations one at a time, in the order in which they were given."""

    def __init__(self, name: str, fail: Callable[[BaseException], BaseException], turn: Turn | None = None) -> None:
        """turn: what operations ask while they wait for others; with it, a waiter may carry them out."""
        self._name = name
        self.fail = fail
        """Turns what an operation raised into what its caller gets."""
        self._turn = turn or Turn()
        self._can_be_helped = turn is not None
        self._waiting: deque[tuple[ShmWork, Operation]] = deque()
        self._owner: int | None = None
        """The thread that is at an operation."""
        self._closed = False
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        # torch's DDP leaves the count of a pass (under `join`) to its reducer in C++ and drops it here: without its
        # Python half a work of Python's class never ends there.
        self._kept: deque[ShmWork] = deque(maxlen=NUM_KEPT)
        self._done = ShmWork(name, [])
        self._done.finish()

    def run(self, name: str, operation: Operation, outputs: object) -> ShmWork:
        """Carry `operation` out now, in this thread if nothing is before it; return when it is done.

        What it returns is done, and says nothing of the outputs: the caller has them.
        """
        self.require_another_thread(name)
        try:
            with self._change:
                is_free = self._owner is None and not self._waiting
                if is_free:
                    self._begin(is_callers=True)
            if is_free:
                operation()
                return self._done
        except BaseException as error:
            if not self._is_here():
                raise
            failure = self.fail(error)
            if failure is error or not isinstance(error, Exception):
                raise  # An interrupt in mid-operation leaves the group broken, and is the caller's own.
            raise failure from error
        finally:
            if self._is_here():
                self._make_way()
        work = self.submit(name, operation, outputs)
        work.wait()
        return work

    def submit(self, name: str, operation: Operation, outputs: object) -> ShmWork:
        """Have `operation` carried out in its turn; return at once."""
        work = ShmWork(name, outputs, queue=self, is_awake=not (self._can_be_helped and _will_wait()))
        if isinstance(outputs, list) and sum(getattr(each, "nbytes", KEPT_BYTES) for each in outputs) < KEPT_BYTES:
            self._kept.append(work)
        with self._change:
            self._waiting.append((work, operation))
            if work.is_awake:
                self._wake()
        return work

    def help(self, work: ShmWork, between: Callable[[], None] | None = None) -> None:
        """Carry out, in this thread, what is before `work` and `work` itself, if no thread is at any of it.

        between: what this thread has to do now and then. Without it, this is the wait of a torch program, which expects
        errors from the work alone.
        """
        while self._can_be_helped and self._carry_out_next(work, between):
            pass

    def wake(self) -> None:
        """Let the thread see what is waiting: a work has been woken."""
        with self._change:
            self._wake()

    def require_another_thread(self, name: str) -> None:
        """Raise UsageError if this thread is at an operation: it would wait for itself."""
        if self._is_here():
            raise UsageError(
                f"{name}: called by code that has interrupted another operation of the same group, such as a signal "
                "handler, and that would wait for ever. Let the handler set a flag, and look at it between steps."
            )

    def close(self) -> None:
        """Let the thread end once nothing is left to do, and wait a moment for it."""
        with self._change:
            self._closed = True
            self._change.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=CLOSING_S)

    def _carry_out_next(self, wanted: ShmWork | None = None, between: Callable[[], None] | None = None) -> bool:
        """Carry out the next operation, if no thread is at one and, for a waiter, `wanted` is not behind it.

        Returns whether there was one. Its error is the work's; a waiter also gets an interrupt, and with `between` what
        a handler of a signal has raised, as it is.
        """
        work: ShmWork | None = None
        raised: BaseException | None = None
        error: BaseException | None = None
        try:
            with self._change:
                # A work leaves the queue before `_owner` is taken back: what is next then comes behind it.
                if self._owner is not None or not self._waiting or (wanted is not None and not wanted.is_queued):
                    return False
                self._begin(is_callers=wanted is not None, duty=between)
                work, operation = self._waiting.popleft()
            operation()
        except BaseException as caught:
            if not self._is_here():
                raise  # Nothing was begun.
            error = self.fail(caught)
            if error is not caught and wanted is not None:
                raised = caught if between is not None or not isinstance(caught, Exception) else None
        finally:
            if self._is_here():
                if work is not None:
                    work.leave_queue()
                self._make_way()
        if work is not None:
            work.finish(error)
        if raised is not None:
            raise raised
        return True

    def _begin(self, *, is_callers: bool, duty: Callable[[], None] | None = None) -> None:
        self._owner = threading.get_ident()
        self._turn.begin(is_callers=is_callers, duty=duty)

    def _make_way(self) -> None:
        with self._change:
            self._owner = None
            self._turn.begin(is_callers=False)
            if self._has_turn():
                self._change.notify()

    def _is_here(self) -> bool:
        """Whether this thread is at an operation."""
        return self._owner == threading.get_ident()

    # The queue's thread

    def _wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        elif self._owner is None:
            self._change.notify()

    def _serve(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(self._has_turn)
                if not self._waiting:
                    return  # Closed.
            self._carry_out_next()

    def _has_turn(self) -> bool:
        """Whether the thread is to take the next operation, or to end."""
        return self._owner is None and (self._closed or any(work.is_awake for work, _ in self._waiting))
