"""The queue of a group in shared memory: one operation at a time, in order, whoever carries it out."""

import contextlib
import random
import signal
import sys
import threading
import time
from datetime import timedelta

import pytest
from queue_log import Log, make_queue

from lockstep.comm.shm.queue import Queue
from lockstep.comm.shm.work import ShmWork, await_all, waited_for
from lockstep.errors import LockstepError, UsageError

NUM_OPERATIONS = 150


def until(condition):
    give_up = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)


@pytest.mark.parametrize("seed", range(4))
def test_operations_are_carried_out_once_and_in_order(seed):
    queue, log, draw = make_queue(), Log(), random.Random(seed)
    works, is_over = [], threading.Event()

    def look():
        """Wait for works in one way or another, from another thread."""
        own = random.Random(threading.get_ident())
        while not is_over.is_set():
            for work in works[-3:]:
                own.choice((lambda w: w.help(lambda: None), lambda w: w.is_completed(), lambda w: w.wait()))(work)
            time.sleep(0.0002)

    others = [threading.Thread(target=look, daemon=True) for _ in range(3)]
    for other in others:
        other.start()
    for number in range(NUM_OPERATIONS):
        operation = log.operation(number, draw.choice((0.0, 0.0, 0.0005)))
        with waited_for() if draw.random() < 0.5 else contextlib.nullcontext():
            if draw.random() < 0.2:
                queue.run("run", operation, [])
            else:
                works.append(queue.submit("submit", operation, []))
        if works and draw.random() < 0.3:
            works[-1].help(lambda: None)
    for work in works:
        work.wait()
    is_over.set()
    for other in others:
        other.join(5)
        assert not other.is_alive()
    queue.close()
    assert log.done == list(range(NUM_OPERATIONS))


def test_who_waits_carries_it_out():
    queue, log = make_queue(), Log()
    with waited_for():
        works = [queue.submit("submit", log.operation(number), []) for number in range(3)]
    time.sleep(0.05)
    assert log.done == [], "nobody has waited"
    works[1].help(lambda: None)
    assert log.done == [0, 1]
    works[2].help(lambda: None)
    assert (log.done, log.threads) == ([0, 1, 2], {"MainThread"})


def wait_for_a_second(work):
    work.wait(timedelta(seconds=1))


BLOCKING = [ShmWork.wait, ShmWork.result, ShmWork.synchronize]
LOOKS = [wait_for_a_second, ShmWork.is_completed, ShmWork.is_success, ShmWork.get_future]


@pytest.mark.parametrize("look", [*BLOCKING, *LOOKS])
@pytest.mark.parametrize("says_so", [True, False])
def test_who_waits_carries_it_out_and_any_other_look_wakes_a_thread(look, says_so, monkeypatch):
    monkeypatch.setattr("lockstep.comm.shm.queue.GRACE_S", 60.0)
    queue, log = make_queue(), Log()
    with waited_for() if says_so else contextlib.nullcontext():
        work = queue.submit("submit", log.operation(0), [])
    look(work)
    until(lambda: log.done)
    assert log.threads == {"MainThread" if look in BLOCKING else "lockstep-test"}
    queue.close()


def test_a_thread_takes_what_nobody_waits_for(monkeypatch):
    monkeypatch.setattr("lockstep.comm.shm.queue.GRACE_S", 0.05)
    queue, log = make_queue(), Log()
    for number in range(3):
        begin = time.monotonic()
        queue.submit("submit", log.operation(2 * number), [])
        queue.submit("submit", log.operation(2 * number + 1), [])
        until(lambda number=number: len(log.done) == 2 * number + 2)
        assert 0.04 < time.monotonic() - begin < 1
    assert log.threads == {"lockstep-test"}
    queue.close()


def test_who_starts_and_waits_over_and_over_does_not_wake_a_thread_each_time(monkeypatch):
    monkeypatch.setattr("lockstep.comm.shm.queue.GRACE_S", 0.2)
    queue, log = make_queue(), Log()
    queue.submit("submit", log.operation(0), []).wait()
    time.sleep(0.05)  # The thread has come too late, and rests for a moment.
    monkeypatch.setattr(queue, "_wake", lambda: pytest.fail("woken"))
    for number in range(1, 100):
        queue.submit("submit", log.operation(number), []).wait()
    monkeypatch.undo()
    queue.submit("submit", log.operation(100), [])
    until(lambda: len(log.done) == 101)
    assert log.done == list(range(101))
    queue.close()


def test_a_wait_in_what_is_called_at_the_end_of_a_work_carries_nothing_out():
    queue, log = make_queue(), Log()
    first = queue.submit("submit", log.operation(0), [])
    second = queue.submit("submit", log.operation(1), [])
    called = []
    future = first.get_future().then(lambda _: (second.wait(), called.append(threading.current_thread().name)))
    future.wait()
    assert log.done == [0, 1] and log.threads == {"lockstep-test"} and called == ["lockstep-test"]
    queue.close()


def test_the_next_operation_takes_those_before_it_along():
    queue, log = make_queue(), Log()
    with waited_for():
        queue.submit("submit", log.operation(0), [])
    queue.submit("submit", log.operation(1), []).wait()
    with waited_for():
        queue.submit("submit", log.operation(2), [])
    queue.run("run", log.operation(3), [])
    assert log.done == [0, 1, 2, 3]
    queue.close()


def test_nobody_helps_while_another_is_at_it():
    queue, log = make_queue(), Log()
    first = queue.submit("submit", log.operation(0, seconds=0.3), [])
    time.sleep(0.1)
    with waited_for():
        second = queue.submit("submit", log.operation(1), [])
    second.help(lambda: None)
    assert log.done == []
    second.wait()
    assert log.done == [0, 1] and first.is_completed()
    queue.close()


def test_errors_come_where_they_are_waited_for():
    queue, log = make_queue(), Log()

    def fail():
        raise LockstepError("it failed")

    with waited_for():
        failing = queue.submit("submit", fail, [])
        fine = queue.submit("submit", log.operation(1), [])
    fine.help(lambda: None)
    assert log.done == [1]
    with pytest.raises(LockstepError, match="it failed"):
        failing.wait()
    assert fine.is_success() and not failing.is_success()


def test_an_interrupt_is_the_callers_own():
    def interrupt():
        raise KeyboardInterrupt

    queue = Queue("lockstep-test", lambda error: LockstepError("broken"), can_be_helped=True)
    with waited_for():
        work = queue.submit("submit", interrupt, [])
    with pytest.raises(KeyboardInterrupt):
        work.help(lambda: None)
    with pytest.raises(LockstepError, match="broken"):
        work.wait()


def test_what_a_signal_handler_raises_comes_out_as_it_is():
    queue = Queue("lockstep-test", lambda error: LockstepError("broken"), can_be_helped=True)
    before = signal.signal(signal.SIGALRM, lambda *_: 1 / 0)
    try:
        with waited_for():
            work = queue.submit("submit", lambda: signal.raise_signal(signal.SIGALRM), [])
        with pytest.raises(ZeroDivisionError):
            work.help(lambda: None)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(LockstepError, match="broken"):
        work.wait()


def test_a_plain_wait_gets_errors_from_the_work_alone():
    """Whoever has carried it out."""
    queue, log = Queue("lockstep-test", lambda error: LockstepError(f"broken: {error!r}"), can_be_helped=True), Log()
    with waited_for():
        failing, fine = queue.submit("submit", lambda: 1 / 0, []), queue.submit("submit", log.operation(1), [])
    fine.wait()
    assert (log.done, log.threads) == ([1], {"MainThread"})
    with pytest.raises(LockstepError, match="broken: ZeroDivisionError"):
        failing.wait()


def test_what_is_to_be_called_at_the_end_is_not_called_by_a_plain_wait():
    """It may want a lock that who waits has."""
    queue, log, lock, called = make_queue(), Log(), threading.Lock(), []

    def call(_):
        called.append((threading.current_thread().name, lock.acquire(timeout=5)))

    first, second = (queue.submit("submit", log.operation(number), []) for number in range(2))
    end = first.get_future().then(call)
    with lock:
        second.wait()
        assert log.done == [0, 1]
    end.wait()
    assert called == [("lockstep-test", True)]
    queue.close()


def test_who_helps_takes_nothing_behind_what_it_waits_for():
    queue, log = make_queue(), Log()
    with waited_for():
        first, second = (queue.submit("submit", log.operation(number), []) for number in range(2))
    queue.help(first)
    queue.help(first)  # It was done by another thread, just before this one could take it.
    assert log.done == [0]
    queue.help(second)
    assert log.done == [0, 1]


@pytest.mark.parametrize("where", ["_carry_out", "_begin_next", "_make_way"])
def test_an_interrupt_between_two_lines_leaves_nobody_waiting(where, monkeypatch):
    failures = []
    queue = Queue("lockstep-test", lambda error: failures.append(error) or LockstepError("broken"), can_be_helped=True)
    with waited_for():
        work = queue.submit("submit", lambda: None, [])
    rightly, calls = getattr(queue, where), []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) > 1:
            return rightly(*arguments)
        if where == "_begin_next":
            rightly(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, where, interrupted)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    monkeypatch.undo()
    assert len(failures) == 1
    with pytest.raises(LockstepError, match="broken"):
        work.wait()
    queue.run("run", lambda: None, [])


def test_a_thread_that_ends_as_there_are_enough_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr("lockstep.comm.shm.queue.GRACE_S", 0.05)
    queue, log, may_end = make_queue(), Log(), threading.Event()
    queue.submit("submit", lambda: may_end.wait(5), [])
    until(lambda: queue._busy)
    for _ in range(2):
        with queue._lock:
            queue._start_thread()
    until(lambda: queue._num_idle == 2)
    time.sleep(0.1)  # Nobody looks by itself any more.
    queue.submit("submit", log.operation(0), [])
    may_end.set()
    until(lambda: log.done)
    queue.close()


def test_an_operation_inside_another_is_refused_and_does_not_hang():
    queue, log, found = make_queue(), Log(), []

    def operate():
        """As a signal handler that interrupts an operation, and calls a collective."""
        later = queue.submit("submit", log.operation(1), [])
        for attempt in (lambda: queue.run("run", log.operation(2), []), later.wait):
            with pytest.raises(UsageError, match="set a flag"):
                attempt()
        found.append(later)

    with waited_for():
        queue.submit("submit", operate, []).help(lambda: None)
    found[0].wait()
    queue.run("run", operate, [])
    queue.submit("submit", operate, []).wait()
    for later in found:
        later.wait()
    assert log.done == [1, 1, 1]
    queue.close()


def test_one_block_inside_another():
    queue, log = make_queue(), Log()
    with waited_for():
        with waited_for():
            pass
        work = queue.submit("submit", log.operation(0), [])
    time.sleep(0.05)
    assert log.done == []
    work.wait()
    queue.close()


def test_who_helps_does_what_it_has_to_now_and_then():
    calls = []
    queue = make_queue()

    def operate():
        assert queue.is_awaited(), "somebody waits"
        queue.between()
        queue.between()

    with waited_for():
        work = queue.submit("submit", operate, [])
    work.help(lambda: calls.append(1))
    queue.between()
    assert len(calls) == 2


def test_an_operation_is_awaited_while_somebody_blocks_for_it():
    """Only then may it look at a word before it sleeps: elsewhere its core is wanted for something else."""
    queue, is_in, may_end = make_queue(), threading.Event(), threading.Event()

    def operate():
        is_in.set()
        may_end.wait(5)
        until(queue.is_awaited)

    work, behind = queue.submit("submit", operate, []), queue.submit("submit", lambda: None, [])
    is_in.wait(5)
    assert not queue.is_awaited()
    with pytest.raises(LockstepError, match="not done"):
        behind.wait(timedelta(microseconds=1))
    assert not queue.is_awaited()
    may_end.set()
    behind.wait()
    assert work.is_success()
    awaited = []
    queue.run("run", lambda: awaited.append(queue.is_awaited()), [])
    assert awaited == [True]
    queue.close()


@pytest.mark.parametrize("number", [1, 3])
def test_who_is_called_at_the_end_may_start_another_and_wait_for_it(number):
    queue, log = make_queue(), Log()
    works = [queue.submit("submit", log.operation(index, seconds=0.02), []) for index in range(number)]

    def go_on(future):
        queue.submit("submit", log.operation("more"), []).get_future().wait()

    ends = [work.get_future().then(go_on) for work in works]
    for end in ends:
        end.wait()
    assert log.done.count("more") == number
    assert [index for index in log.done if index != "more"] == list(range(number))
    queue.close()


def test_who_is_called_at_the_end_may_wait_for_the_next():
    queue, log = make_queue(), Log()
    first, second = (queue.submit("submit", log.operation(number, seconds=0.05), []) for number in range(2))
    awaited = second.get_future()
    first.get_future().then(lambda _: awaited.wait()).wait()
    assert log.done == [0, 1]
    queue.close()


def test_threads_do_not_pile_up():
    queue, log = make_queue(), Log()
    for number in range(40):
        work = queue.submit("submit", log.operation(number), [])
        work.get_future().then(lambda _: queue.submit("submit", log.operation("more"), []).wait()).wait()
    time.sleep(0.1)
    assert sum(thread.name == "lockstep-test" for thread in threading.enumerate()) <= 3
    queue.close()
    assert log.done == [value for number in range(40) for value in (number, "more")]


def test_an_operation_may_wait_for_one_that_is_about_to_be_done():
    """As that does which closes a coalesced call; the work before it is carried out, and not yet marked as done."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    queue = make_queue()
    try:
        for _ in range(10_000):
            works = [queue.submit("submit", lambda: None, []) for _ in range(3)]
            closing = queue.submit("coalesced", lambda works=works: await_all(works), [])
            closing.help(lambda: None)
            closing.wait()
    finally:
        sys.setswitchinterval(before)
        queue.close()


def test_closing_while_somebody_is_at_an_operation_and_something_sleeps():
    queue, log, is_in = make_queue(), Log(), threading.Event()
    queue.submit("submit", log.operation(0), []).wait()
    other = threading.Thread(target=lambda: queue.run("run", lambda: (is_in.set(), time.sleep(0.2)), []), daemon=True)
    other.start()
    is_in.wait(5)
    with waited_for():
        queue.submit("submit", log.operation(1), [])
    begin = time.monotonic()
    queue.close()
    assert time.monotonic() - begin < 1.5
    assert log.done == [0, 1]
