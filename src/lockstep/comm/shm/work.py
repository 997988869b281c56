"""Work under way: what a caller gets for an operation, and the thread that carries operations out in their order."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import LockstepError

NO_TIMEOUT = timedelta(0)
"""What torch passes for 'no timeout of its own'."""


_SETTLING = threading.Lock()
"""Orders the end of a work and the asking for its future; held for a moment only, so one for all of them will do."""
_ALWAYS = threading.Event()
_ALWAYS.set()


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

    def finish(self, error: BaseException | None = None, source: int = -1) -> None:
        """Mark as done, well or with `error`; `source` is the rank that a message came from."""
        if error is None and self._before is not None:
            self._before()
        self._before = None
        with _SETTLING:
            self._error, self._source = error, source
            self._is_done.set()
            future = self._future
        if future is not None:
            self._settle(future)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Return True when done; raise the operation's error, or LockstepError when `timeout` is over."""
        seconds = timeout.total_seconds()
        if not self._is_done.wait(seconds if seconds > 0 else None):
            raise LockstepError(f"{self.name}: not done after {timeout}.")
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or badly."""
        return self._is_done.is_set()

    def is_success(self) -> bool:
        """Whether the operation has ended well."""
        return self._is_done.is_set() and self._error is None

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

    def __init__(self, name: str, fail: Callable[[BaseException], BaseException]) -> None:
        self._name = name
        self._fail = fail
        """Turns what an operation raised into what its caller gets."""
        self._waiting: deque[tuple[ShmWork, Operation]] = deque()
        self._busy = False
        self._closed = False
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)
        self._done = ShmWork(name, [], done=True)
        self._thread: threading.Thread | None = None

    def run(self, name: str, operation: Operation, outputs: "list[Tensor]") -> ShmWork:
        """Carry `operation` out now, in this thread if nothing is before it; return when it is done.

        What it returns is done, and says nothing of the outputs: the caller has them.
        """
        with self._lock:
            alone = not self._busy and not self._waiting
            if alone:
                self._busy = True
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
            with self._lock:
                self._busy = False
                if self._waiting:
                    self._change.notify()
        return self._done

    def submit(self, name: str, operation: Operation, outputs: object) -> ShmWork:
        """Have `operation` carried out by the queue's own thread; return at once."""
        work = ShmWork(name, outputs)
        with self._change:
            self._waiting.append((work, operation))
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
            self._change.notify()
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
                self._busy = True
            error: BaseException | None = None
            try:
                operation(False)
            except BaseException as raised:
                error = self._fail(raised)
            with self._change:
                self._busy = False
            work.finish(error)
            del work, operation
