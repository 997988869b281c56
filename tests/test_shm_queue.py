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

from lockstep.comm.shm.queue import Queue, ShmWork, Turn, await_all, waited_for
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
def test_a_waiter_carries_it_out_and_any_other_look_wakes_the_thread(look):
    queue, log = make_queue(), Log()
    with waited_for():
        work = queue.submit("submit", log.operation(0), [])
    look(work)
    until(lambda: log.done)
    assert log.threads == {"MainThread" if look in BLOCKING else "lockstep-test"}
    queue.close()


def test_the_thread_takes_what_nobody_waits_for():
    queue, log = make_queue(), Log()
    for number in range(6):
        queue.submit("submit", log.operation(number), [])
    until(lambda: len(log.done) == 6)
    assert log.done == list(range(6)) and log.threads == {"lockstep-test"}
    queue.close()


def test_what_is_called_at_the_end_runs_in_a_thread_of_its_own():
    """It may want a lock that a waiter has."""
    queue, log, lock, called = make_queue(), Log(), threading.Lock(), []

    def call(_):
        called.append((threading.current_thread().name, lock.acquire(timeout=5)))

    with waited_for():
        first, second = (queue.submit("submit", log.operation(number), []) for number in range(2))
    end = first.get_future().then(call)
    with lock:
        second.wait()
        assert log.done == [0, 1]
    end.wait()
    assert called == [("lockstep-shm-called", True)]
    queue.close()


def test_one_thread_carries_out_whatever_is_called_at_the_end():
    queue, log = make_queue(), Log()
    for number in range(40):
        work = queue.submit("submit", log.operation(number), [])
        work.get_future().then(lambda _: queue.submit("submit", log.operation("more"), []).wait()).wait()
    assert sum(thread.name == "lockstep-test" for thread in threading.enumerate()) == 1
    queue.close()
    assert log.done == [value for number in range(40) for value in (number, "more")]


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

    queue = Queue("lockstep-test", lambda error: LockstepError("broken"), Turn())
    with waited_for():
        work = queue.submit("submit", interrupt, [])
    with pytest.raises(KeyboardInterrupt):
        work.help(lambda: None)
    with pytest.raises(LockstepError, match="broken"):
        work.wait()


def test_what_a_signal_handler_raises_comes_out_as_it_is():
    queue = Queue("lockstep-test", lambda error: LockstepError("broken"), Turn())
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
    queue, log = Queue("lockstep-test", lambda error: LockstepError(f"broken: {error!r}"), Turn()), Log()
    with waited_for():
        failing, fine = queue.submit("submit", lambda: 1 / 0, []), queue.submit("submit", log.operation(1), [])
    fine.wait()
    assert (log.done, log.threads) == ([1], {"MainThread"})
    with pytest.raises(LockstepError, match="broken: ZeroDivisionError"):
        failing.wait()


def test_who_helps_takes_nothing_behind_what_it_waits_for():
    queue, log = make_queue(), Log()
    with waited_for():
        first, second = (queue.submit("submit", log.operation(number), []) for number in range(2))
    queue.help(first)
    queue.help(first)  # It was done by another thread, just before this one could take it.
    assert log.done == [0]
    queue.help(second)
    assert log.done == [0, 1]


def test_an_interrupt_as_an_operation_begins_leaves_nobody_waiting(monkeypatch):
    failures = []
    queue = Queue("lockstep-test", lambda error: failures.append(error) or LockstepError("broken"), Turn())
    with waited_for():
        work = queue.submit("submit", lambda: None, [])
    rightly = queue._begin

    def interrupted(**how):
        rightly(**how)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "_begin", interrupted)
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    assert len(failures) == 1, "the group is broken"
    work.wait()  # It was not taken yet.
    queue.run("run", lambda: None, [])


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
    calls, turn = [], Turn()
    queue = Queue("lockstep-test", lambda error: error, turn)

    def operate():
        assert turn.is_callers, "a waiter has nothing else to do"
        turn.between()
        turn.between()

    with waited_for():
        work = queue.submit("submit", operate, [])
    work.help(lambda: calls.append(1))
    turn.between()
    assert len(calls) == 2


def test_only_what_is_carried_out_by_its_caller_may_look_before_it_sleeps():
    """Elsewhere the core is wanted for something else."""
    found, turn = [], Turn()
    queue = Queue("lockstep-test", lambda error: error, turn)
    queue.submit("submit", lambda: found.append(turn.is_callers), [])
    until(lambda: found)
    queue.run("run", lambda: found.append(turn.is_callers), [])
    assert found == [False, True]
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
