"""What is started in a backward pass, where all cores compute, is carried out at its end, by its own thread."""

import contextlib
import threading
import time

import pytest
import torch
from queue_log import Log, make_queue

from lockstep.comm.shm import queue as queue_module
from lockstep.comm.shm.work import await_all, beside_the_pass
from lockstep.errors import LockstepError

pytestmark = pytest.mark.usefixtures("one_thread")
ENGINE = torch.autograd.Variable._execution_engine


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(queue_module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(queue_module, "TICK_S", 0.05)


def backward(*hooks):
    """A pass in which `hooks` are called, in their order."""
    with torch.enable_grad():  # Inside another pass it is off.
        value = torch.ones(2, requires_grad=True)
        for hook in reversed(hooks):
            value = value * 2

            def call(_, hook=hook):
                hook()

            value.register_hook(call)
        value.sum().backward()


def test_it_is_carried_out_at_the_end_in_order():
    queue, log, works, futures, seen = make_queue(leaves=True), Log(), [], [], []

    def start():
        works.append(queue.submit("submit", log.operation(len(works)), [len(works)]))
        futures.append(works[-1].get_future())

    def look():
        time.sleep(0.05)
        seen.append(list(log.done))

    for repeat in range(2):
        works.clear()
        backward(start, start, look, start, look)
        assert seen == [[], []], "something was carried out inside the pass"
        assert (log.done, log.threads) == ([0, 1, 2], {"MainThread"})
        assert [future.wait() for future in futures] == [[0], [1], [2]]
        for kept in (log.done, futures, seen):
            kept.clear()
    queue.close()


@pytest.mark.parametrize("why", ["cores are free", "several threads", "no pass", "at a pass's end", "as asked for"])
def test_elsewhere_a_thread_carries_it_out(why):
    queue, log = make_queue(leaves=why != "cores are free"), Log()

    def start():
        with beside_the_pass() if why == "as asked for" else contextlib.nullcontext():
            queue.submit("submit", log.operation(0), []).get_future().wait()

    if why == "several threads":
        torch.set_num_threads(2)
    begin = time.monotonic()
    if why == "no pass":
        start()
    elif why == "at a pass's end":
        backward(lambda: ENGINE.queue_callback(start))
    else:
        backward(start)
    assert (log.done, log.threads) == ([0], {"lockstep-test"})
    assert time.monotonic() - begin < 1
    queue.close()


@pytest.mark.parametrize("look", ["wait", "result", "is_completed"])
def test_a_look_at_the_work_has_it_carried_out_at_once(look):
    queue, log = make_queue(leaves=True), Log()

    def start():
        work = queue.submit("submit", log.operation(0), [])
        while not getattr(work, look)() and look == "is_completed":
            time.sleep(0.001)
        assert log.done == [0]
        assert (log.threads == {"lockstep-test"}) == (look == "is_completed"), "who waits carries it out"

    backward(start)
    assert log.done == [0]
    queue.close()


def test_who_waits_for_a_future_in_the_pass_gets_it_and_soon_nothing_is_left_any_more(impatient):
    queue, log = make_queue(leaves=True), Log()

    def start():
        queue.submit("submit", log.operation(len(log.done)), []).get_future().wait()

    for _ in range(queue_module.MOST_LATE):
        backward(start, start)
    begin = time.monotonic()
    for _ in range(10):
        backward(start, start)
    assert time.monotonic() - begin < 1
    count = 2 * (queue_module.MOST_LATE + 10)
    assert (log.done, log.threads) == (list(range(count)), {"lockstep-test"})
    queue.close()


def test_somebody_has_an_eye_on_the_time_though_another_is_at_an_operation(impatient):
    queue, log, is_in, may_end = make_queue(leaves=True), Log(), threading.Event(), threading.Event()

    def block():
        is_in.set()
        may_end.wait(5)

    other = threading.Thread(target=lambda: queue.run("run", block, []), daemon=True)
    other.start()
    is_in.wait(5)

    def start():
        future = queue.submit("submit", log.operation(0), []).get_future()
        may_end.set()
        future.wait()

    backward(start)
    assert log.done == [0]
    queue.close()


def test_somebody_has_an_eye_on_the_time_though_the_thread_is_called(impatient):
    queue, log, may_end = make_queue(leaves=True), Log(), threading.Event()
    queue.submit("submit", log.operation(0, seconds=0.1), []).get_future().then(lambda _: may_end.wait(5))

    def start():
        queue.submit("submit", log.operation(1), []).get_future().wait()
        may_end.set()

    backward(start)
    assert log.done == [0, 1]
    queue.close()


def test_what_was_left_and_is_done_does_not_count_as_late(impatient):
    queue, log, seen = make_queue(leaves=True), Log(), []
    with pytest.raises(ZeroDivisionError):
        backward(lambda: queue.submit("submit", log.operation(0), []), lambda: 1 / 0)
    queue.run("run", log.operation(1), [])
    time.sleep(0.5)
    log.threads.clear()
    backward(lambda: queue.submit("submit", log.operation(2), []), lambda: seen.append(list(log.done)))
    assert (seen, log.done, log.threads) == ([[0, 1]], [0, 1, 2], {"MainThread"})
    queue.close()


def test_a_pass_that_takes_long_is_not_waited_for_and_the_next_one_is(impatient):
    queue, log = make_queue(leaves=True), Log()

    def start():
        queue.submit("submit", log.operation(len(log.done)), [])

    backward(start, lambda: time.sleep(0.6))
    assert (log.done, log.threads) == ([0], {"lockstep-test"})
    log.threads.clear()
    backward(start, lambda: time.sleep(0.05))
    assert (log.done, log.threads) == ([0, 1], {"MainThread"})
    queue.close()


@pytest.mark.parametrize("then", ["run", "submit", "pass", "patience"])
def test_what_a_failed_pass_has_left_comes_first(then, impatient):
    queue, log = make_queue(leaves=True), Log()

    def start(number):
        return queue.submit("submit", log.operation(number), [])

    with pytest.raises(ZeroDivisionError):
        backward(lambda: start(0), lambda: 1 / 0)
    if then == "run":
        queue.run("run", log.operation(1), [])
    elif then == "submit":
        start(1).wait()
    elif then == "pass":
        backward(lambda: start(1))
    else:
        time.sleep(0.5)
        assert log.done == [0]
        start(1).wait()
    assert log.done == [0, 1]
    queue.close()


def test_who_is_called_at_the_end_follows_after_all_of_the_pass():
    queue, log, ends = make_queue(leaves=True), Log(), []

    def start(number):
        def go_on(_):
            queue.submit("submit", log.operation(number + 10), []).get_future().wait()

        ends.append(queue.submit("submit", log.operation(number), []).get_future().then(go_on))

    backward(*(lambda number=number: start(number) for number in range(3)))
    for end in ends:
        end.wait()
    assert log.done == [0, 1, 2, 10, 11, 12]
    queue.close()


def test_an_operation_may_wait_for_those_before_it():
    """As that does which closes a coalesced call."""
    queue, log = make_queue(leaves=True), Log()

    def start():
        works = [queue.submit("submit", log.operation(number), []) for number in range(2)]
        queue.submit("coalesced", lambda: (await_all(works), log.done.append("all")), [])

    backward(start)
    assert log.done == [0, 1, "all"]
    queue.close()


def test_an_error_goes_to_who_waits():
    queue, futures = make_queue(leaves=True), []

    def fail():
        raise LockstepError("it failed")

    backward(lambda: futures.append(queue.submit("submit", fail, []).get_future()))
    with pytest.raises(RuntimeError, match="it failed"):
        futures[0].wait()
    queue.close()


def test_an_interrupt_comes_out_of_the_pass():
    queue = queue_module.Queue("lockstep-test", lambda _: LockstepError("broken"), can_be_helped=True, leaves=True)
    works = []

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backward(lambda: works.append(queue.submit("submit", interrupt, [])))
    with pytest.raises(LockstepError, match="broken"):
        works[0].wait()
    queue.close()


def test_a_pass_inside_another():
    queue, log = make_queue(leaves=True), Log()

    def start(number):
        return lambda: queue.submit("submit", log.operation(number), [])

    backward(start(0), lambda: backward(start(1)), start(2))
    assert (log.done, log.threads) == ([0, 1, 2], {"MainThread"})
    queue.close()


def test_passes_of_several_threads():
    queue, log = make_queue(leaves=True), Log()
    works = [[] for _ in range(4)]

    def train(mine):
        def start():
            mine.append(queue.submit("submit", log.operation((id(mine), len(mine))), []))

        for _ in range(30):
            backward(start, start)
            mine[-1].get_future().wait()

    threads = [threading.Thread(target=train, args=(mine,), daemon=True) for mine in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for mine in works:
        assert [number for owner, number in log.done if owner == id(mine)] == list(range(60))
    queue.close()
