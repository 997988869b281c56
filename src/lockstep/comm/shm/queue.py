"""The queue in which the operations of a group wait for their turn.

One operation at a time is carried out, in the order in which they were given, by one of four:

    a thread of the queue's        what was submitted
    who calls `run`                its own operation, if nothing is before it
    who waits (`help`)             what it waits for, and all that is before it, if nobody is at any of it
    a backward pass, at its end    what was started in it, where that is left for the end

`_busy` says that somebody is at one; it changes under the lock, and whoever has set it takes it back, wakes a thread
if there is more to see to (one of the queue's looks by itself), and only then marks the work as done. So an operation
is taken once, and in its turn. An operation may wait for one before it, which at that moment may be carried out and not
yet marked: the work has left the queue before `_busy` is taken back, so that such a wait is not taken for one that
waits for itself; and who has come to help with that work takes none behind it.

**When a thread takes it.** Between two threads an operation costs two switches, more than a small message; and two
workers' threads that have just been woken are often put on one core, where they take turns although another is free.
So every work has a time when it is `due`: from then on a thread takes it, and all before it. That is

    after GRACE_S    as a rule: who waits by then carries it out itself
    now              once somebody looks who cannot do that: by `is_completed` or `get_future`, by a wait with a limit,
                     by one that finds another thread at it, or in what is called at the end of another work
    never            where the caller has said by `waited_for` that it will wait for it next, or it is left for the end
                     of a pass (below), unless somebody looks at it, or another that is due comes behind it

Nothing is forgotten. Somebody who gives an operation, or ends one, sees to it that a thread looks when the next is due:
one that is on its way already (`_looks_at`), or one that it wakes. A thread that finds nothing due rests until that
time; one that finds nothing at all rests for the grace of the last operation, so that a caller who starts and waits,
over and over, does not wake it each time.

**Left for the end of the pass.** Where workers of one thread each take all cores, an operation that is carried out
beside a backward pass only takes turns with it, and leaves its caches cold. There, what is started inside a pass (by
torch's DDP, for one) sleeps until the pass ends. The pass's own thread then carries it out, before DDP's finalizer,
which was queued later. Here a future may be asked for without waking anybody, since DDP does so at once, and waits for
it in that finalizer. Somebody else may wait for a future inside the pass, which cannot be seen from here: so after
PATIENCE_S a thread carries out what is there, and nothing more is left in this pass; after MOST_LATE such passes
nothing ever is. A pass that takes that long has the same effect. One that fails never ends, and leaves its operations
to whatever comes next. Lockstep's own buckets are not left (`beside_the_pass`): it knows by itself when to send them.

**What is called at the end of a work** (`Future.then`) runs in the thread that has carried it out, and may start
another operation and wait for it, as torch's PowerSGD does. Such a wait carries nothing out, since what that calls at
its end might wait for this one. So before a thread calls such, it wakes another one if operations wait; one that is
started meanwhile finds a thread asleep, or gets a new one. At the end of a pass all is carried out before the first of
these is called: what they start follows in the same order on all workers. Elsewhere, and where a thread has been woken
inside the pass, those of several works may be called side by side, in any order.
"""

import threading
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.comm.shm.work import NEVER, NOW, ShmWork, is_beside, settles, will_wait
from lockstep.errors import UsageError

PATIENCE_S = 2.0
"""How long something may be left for the end of a pass,"""
TICK_S = 0.5
"""how often somebody looks,"""
MOST_LATE = 3
"""and in how many passes that may be too long: the first ones of a training are slow, but others are not."""
GRACE_S = 1e-3
"""How long a thread leaves an operation to its caller, who carries it out if it waits for it by then."""
SPARE = 2
"""How many threads stay when there is nothing to do."""

Operation = Callable[[], None]
Taken = tuple[ShmWork, Operation]


class Queue:
    """Carries out operations one at a time, in the order in which they were given."""

    def __init__(
        self,
        name: str,
        fail: Callable[[BaseException], BaseException],
        *,
        can_be_helped: bool = False,
        leaves: bool = False,
    ) -> None:
        """can_be_helped: operations call `between` while they wait for others.

        leaves: workers of one thread each take all cores, so what is started in a backward pass is left for its end;
        only where the queue can be helped.
        """
        self._name = name
        self._fail = fail
        """Turns what an operation raised into what its caller gets."""
        self._can_be_helped = can_be_helped
        self._leaves = leaves and can_be_helped
        self._left_in = -1
        """The backward pass in which something was left last,"""
        self._left_at: float | None = None
        """and since when; None while nothing is."""
        self._late_in = -1
        """The last pass in which that was too long,"""
        self._num_late = 0
        """and how many there have been."""
        self._between: Callable[[], None] | None = None
        """What who helps has to do now and then."""
        self._waiting: deque[Taken] = deque()
        self._busy = False
        self._busy_thread: int | None = None
        """Who is at an operation;"""
        self._at_hand: ShmWork | None = None
        """which, if it has waited in the queue;"""
        self._is_callers = False
        """whether that is one who wants it, or has nothing else to do."""
        self._blocked: set[int] = set()
        """The threads that do nothing until one of the works is done. Changed without the lock, an entry at a time."""
        self._closed = False
        self._lock = threading.Lock()
        self._change = threading.Condition(self._lock)
        self._done = ShmWork(name, [], done=True)
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        """How many of the threads wait for something to do."""
        self._num_coming = 0
        """How many have been started and not yet looked."""
        self._looks_at = NEVER
        """When one of them will look by itself."""
        self._grace_end = NOW
        """When what was last given to be carried out by its caller or a thread is, or would have been, due."""

    def run(self, name: str, operation: Operation, outputs: "list[Tensor]") -> ShmWork:
        """Carry `operation` out now, in this thread if nothing is before it; return when it is done.

        What it returns is done, and says nothing of the outputs: the caller has them.
        """
        self.require_another_thread(name)
        try:
            with self._lock:
                alone = not self._busy and not self._waiting
                if alone:
                    self._begin(is_callers=True)
            if alone:
                operation()
                return self._done
        except BaseException as error:
            if not self._is_here():
                raise
            failure = self._fail(error)
            if failure is error or not isinstance(error, Exception):
                raise  # An interrupt in mid-operation leaves the group broken, and is the caller's own.
            raise failure from error
        finally:
            if self._is_here():
                self._make_way()
        work = self.submit(name, operation, outputs)
        work.wait()
        return work

    def help(self, work: ShmWork, between: Callable[[], None] | None = None) -> None:
        """Carry out, in this thread, what is before `work` and `work` itself, if nobody is at any of it.

        between: what this thread has to do now and then. Without it, this is the wait of a torch program, which expects
        others to call what is to be called at the end of a work, and errors from the work alone.
        """
        is_plain = between is None
        taken: Taken | None = None
        try:
            while self._can_be_helped and not settles():
                taken = self._take(work, between or _nothing, is_plain=is_plain)
                if taken is None:
                    return
                error, own = self._carry_out(*taken)
                taken[0].finish(error)
                if own is not None and not (is_plain and isinstance(own, Exception)):
                    raise own
        except BaseException as interrupt:
            self._give_up(interrupt, taken[0] if taken is not None else None)
            raise

    def _give_up(self, interrupt: BaseException, taken: ShmWork | None) -> None:
        """An interrupt may have come between two lines: let nobody wait for an operation that nobody is at."""
        failure: BaseException = interrupt
        if self._is_here():
            taken, failure = self._at_hand, self._fail(interrupt)
            self._make_way()
        if taken is not None and not taken.is_over:
            taken.finish(failure)

    def _take(self, wanted: ShmWork, between: Callable[[], None], *, is_plain: bool) -> "Taken | None":
        """The next operation, up to `wanted`, for a thread that helps; None if that is done, or somebody is at one."""
        with self._lock:
            # It has left the queue before `_busy` is taken back: what is next then comes behind it.
            if self._busy or not self._waiting or not wanted.is_queued:
                return None
            if is_plain and self._waiting[0][0].is_asked:
                return None
            return self._begin_next(between)

    def _take_left(self) -> "Taken | None":
        """The next operation if it, or one behind it, was left for the end of a pass, and nobody is at one."""
        with self._lock:
            if self._busy or not any(work.is_left for work, _ in self._waiting):
                return None
            return self._begin_next(_nothing)

    def _begin_next(self, between: Callable[[], None]) -> "Taken":
        taken = self._waiting.popleft()
        self._begin(taken[0], is_callers=True)
        self._between = between
        return taken

    def _carry_out(self, work: ShmWork, operation: Operation) -> tuple[BaseException | None, BaseException | None]:
        """Carry out what was taken; returns the error for its caller, and what is to be raised in this thread.

        The latter is an interrupt, or what a handler of a signal has raised.
        """
        try:
            operation()
        except BaseException as raised:
            error = self._fail(raised)
            return error, (None if error is raised else raised)
        finally:
            self._between = None
            work.leave_queue()
            self._make_way()
        return None, None

    def require_another_thread(self, name: str) -> None:
        """Raise UsageError if this thread is at an operation: it would wait for itself."""
        if self._is_here():
            raise UsageError(
                f"{name}: called by code that has interrupted another operation of the same group, such as a signal "
                "handler, and that would wait for ever. Let the handler set a flag, and look at it between steps."
            )

    def between(self) -> None:
        """Called by an operation that waits for others, now and then, in the thread that carries it out."""
        if self._between is not None:
            self._between()

    def is_awaited(self) -> bool:
        """Whether somebody does nothing but wait for the operation at hand, or for one behind it."""
        return self._is_callers or bool(self._blocked)

    def block(self, is_done: threading.Event, seconds: float | None) -> bool:
        """Return when a work is done, or after `seconds`; whether it is done."""
        me = threading.get_ident()
        self._blocked.add(me)
        try:
            return is_done.wait(seconds)
        finally:
            self._blocked.discard(me)

    def submit(self, name: str, operation: Operation, outputs: object) -> ShmWork:
        """Have `operation` carried out by a thread of the queue's, or where it is waited for; return at once."""
        work = ShmWork(name, outputs)
        is_awaited = self._can_be_helped and will_wait() and not settles()
        number = -1 if is_awaited else self._number_of_pass()
        with self._lock:
            is_left = number not in (-1, self._late_in)
            work.wait_in(self, due=NEVER if is_awaited or is_left else self._grace(), is_left=is_left)
            self._waiting.append((work, operation))
            is_first = is_left and self._left_in != number
            if is_left:
                self._left_in = number
                self._left_at = self._left_at or time.monotonic()
            if not is_awaited and not self._busy:
                self._see_to_the_rest()
        if is_first:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        return work

    def _grace(self) -> float:
        """Until when a thread leaves to its caller what is given now."""
        if not self._can_be_helped or settles():
            return NOW
        self._grace_end = time.monotonic() + GRACE_S
        return self._grace_end

    # The end of a backward pass

    def _number_of_pass(self) -> int:
        """The pass that this thread is in, if what it starts may be left for the end of that; else -1."""
        if not self._leaves or self._num_late >= MOST_LATE or settles() or is_beside():
            return -1
        is_computing = torch._C._current_autograd_node() is not None  # It is none at the end of a pass, and in none.
        return torch._C._current_graph_task_id() if is_computing and torch.get_num_threads() == 1 else -1

    def _end_pass(self) -> None:
        """Carry out what was left, then call those who wait for it; a thread's if somebody has woken it."""
        with self._lock:
            self._left_in, self._left_at = -1, None
        ends: list[tuple[ShmWork, torch.futures.Future[None]]] = []
        own: BaseException | None = None
        while own is None and (taken := self._take_left()) is not None:
            error, own = self._carry_out(*taken)
            end = taken[0].conclude(error)
            if end is not None:
                ends.append((taken[0], end))
        self._wake_left()
        for work, end in ends:
            work.settle(end)
        if own is not None:
            raise own

    def _wake_left(self) -> None:
        """Have what is still left carried out by a thread, as somebody is at what is before it."""
        with self._lock:
            self._rouse()
            if not self._busy:
                self._see_to_the_rest()

    def _rouse(self) -> None:
        """Let nothing be left for the end of a pass any longer."""
        for work, _ in self._waiting:
            if work.is_left:
                work.due = NOW

    def _look_at_the_time(self) -> None:
        if not any(work.is_left for work, _ in self._waiting):
            self._left_at = None
        elif self._left_at is not None and time.monotonic() - self._left_at > PATIENCE_S:
            self._late_in, self._left_at = self._left_in, None
            self._num_late += 1
            self._rouse()

    # The queue's threads

    def _begin(self, work: ShmWork | None = None, *, is_callers: bool = False) -> None:
        self._at_hand, self._is_callers = work, is_callers
        self._busy, self._busy_thread = True, threading.get_ident()

    def _is_here(self) -> bool:
        """Whether this thread is at an operation."""
        return self._busy_thread == threading.get_ident()

    def _make_way(self) -> None:
        with self._lock:
            self._stop()
            self._see_to_the_rest()

    def _stop(self) -> None:
        self._busy, self._busy_thread, self._at_hand = False, None, None

    def _see_to_the_rest(self) -> None:
        """Nobody is at an operation: wake a thread if there is anything for it, if only an eye to have on the time."""
        is_watched = self._left_at is None or self._num_idle > 0
        if self._due() < self._looks_at or (self._waiting and not is_watched):
            self._wake()

    def _due(self) -> float:
        """When a thread is to take the next operation."""
        if self._busy or not self._waiting:
            return NEVER
        return NOW if self._closed else min(work.due for work, _ in self._waiting)

    def wake(self) -> None:
        """Let a thread see what is waiting."""
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        if self._num_idle:
            self._change.notify()
        elif self._num_coming == 0 and (not self._busy or not self._threads):  # Who is busy wakes somebody at its end.
            self._start_thread()

    def _start_thread(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=self._serve, name=self._name, daemon=True))
        self._threads[-1].start()
        self._num_coming += 1

    def close(self) -> None:
        """Let the threads end once there is nothing left to do, and wait a moment for them."""
        with self._change:
            self._closed = True
            self._change.notify_all()
            threads = tuple(self._threads)
        give_up = time.monotonic() + 2
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=max(0.0, give_up - time.monotonic()))

    def _serve(self) -> None:
        with self._lock:
            self._num_coming -= 1
        while True:
            with self._change:
                while (due := self._due()) > (now := time.monotonic()):
                    if (self._closed and not self._waiting) or self._num_idle >= SPARE:
                        self._see_to_the_rest()
                        return
                    self._rest(due, now)
                    self._look_at_the_time()
                work, operation = self._waiting.popleft()
                self._begin(work)
            error: BaseException | None = None
            try:
                operation()
            except BaseException as raised:
                error = self._fail(raised)
            work.leave_queue()
            with self._lock:
                self._stop()
            end = work.conclude(error)
            if end is not None:
                with self._lock:
                    if not self._busy:
                        self._see_to_the_rest()  # Who is called at the end of this one may wait for the next.
                work.settle(end)
            del work, operation, end

    def _rest(self, due: float, now: float) -> None:
        """Wait until somebody wakes this thread, or something is due; where nothing is, a moment for what may come.

        Operations that are waited for at once come one after the other: so the thread is not woken for each of them.
        """
        lingers = due == NEVER and self._looks_at == NEVER and self._grace_end > now
        looks_at = self._grace_end if lingers else due
        self._num_idle += 1
        if looks_at < NEVER:
            self._looks_at = looks_at
            self._change.wait(looks_at - now)
            self._looks_at = NEVER
        else:
            self._change.wait(TICK_S if self._leaves else None)
        self._num_idle -= 1


def _nothing() -> None:
    pass
