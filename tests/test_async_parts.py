"""The parts of Async that need no other process: bound, owner, semaphore, what remains to be claimed."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep.train.asynchronous.owner import Owner, PushedGradient, StalenessBound
from lockstep.train.asynchronous.shard_queue import QueuePosition, QueueRemainder


@given(st.integers(0, 6), st.integers(1, 6), st.data())
@settings(max_examples=200, deadline=None)
def test_no_gradient_is_staler_than_the_bound_and_none_is_stuck(bound, workers, data):
    """Workers read, compute and arrive in any order, as many at a time as the bound allows."""
    staleness_bound, computing, arrived, ends = StalenessBound(bound), [], [], 0
    for _ in range(data.draw(st.integers(1, 60))):
        idle = [worker for worker in range(workers) if worker not in computing + arrived]
        can_read = idle if staleness_bound.may_read else []
        actions = [("read", worker) for worker in can_read] + [("arrive", worker) for worker in computing]
        action, worker = data.draw(st.sampled_from(actions))
        if action == "read":
            staleness_bound.read(worker)
            computing.append(worker)
        else:
            computing.remove(worker)
            arrived.append(worker)
        while (ready := next(filter(staleness_bound.may_apply, arrived), None)) is not None:
            arrived.remove(ready)
            assert staleness_bound.apply(ready) <= bound
            ends += 1
        assert computing or not arrived, "only gradients that are still computed can be waited for"
    assert staleness_bound.version == ends


def test_a_reading_that_is_withdrawn_is_not_waited_for():
    staleness_bound = StalenessBound(1)
    staleness_bound.read(0)
    staleness_bound.read(1)
    assert staleness_bound.apply(1) == 0
    staleness_bound.read(1)
    assert not staleness_bound.may_apply(1)
    staleness_bound.withdraw(0)
    assert staleness_bound.apply(1) == 0


def owner_of(bound):
    return Owner([], torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), None, bound)


GRADIENT = PushedGradient(b"", [])


def test_an_owner_keeps_what_older_readings_cannot_bear():
    owner = owner_of(1)
    assert owner.read(0, [], 0.0)
    for number in (1, 2):
        assert owner.read(1, [], 0.0)
        owner.submit(1, GRADIENT)
        if number == 1:
            assert owner.wait_applied(1, 0.0) == 0
    assert owner.wait_applied(1, 0.05) is None and owner.bound.version == 1
    owner.look([])  # Looking is always allowed.
    owner.submit(0, GRADIENT)
    assert (owner.wait_applied(0, 0.0), owner.wait_applied(1, 0.0), owner.bound.version) == (1, 1, 3)


def test_an_update_that_fails_is_told_to_all():
    owner = owner_of(4)
    owner._optimizer.step = lambda: 1 / 0
    assert owner.read(0, [], 0.0)
    with pytest.raises(lockstep.UsageError, match="worker 0 failed: ZeroDivisionError"):
        owner.submit(0, GRADIENT)
    with pytest.raises(lockstep.UsageError, match="worker 0 failed"):
        owner.wait_applied(1, 0.0)


def test_an_owner_lets_read_in_turn_as_many_as_the_bound_allows():
    owner, got = owner_of(0), []

    def take(worker):
        assert owner.read(worker, [], 10.0)
        got.append(worker)
        owner.submit(worker, GRADIENT)

    assert owner.read(0, [], 0.0)
    for worker in (2, 1, 3):
        assert not owner.read(worker, [], 0.01)
    threads = [threading.Thread(target=take, args=(worker,)) for worker in (1, 2, 3)]
    for thread in threads:
        thread.start()
    owner.withdraw(0)
    for thread in threads:
        thread.join(10)
    assert got == [2, 1, 3]


class Claimers:
    """Some workers who claim, one of them at a time, until they are stopped: what `QueuedPicks` does."""

    def __init__(self, remainder, workers, total, ahead):
        self.remainder, self.total, self.ahead = remainder, total, ahead
        first = min([remainder.epoch, *(epoch for epoch, _ in remainder.pending)])
        self.states = [{"epoch": first, "claimed": 0, "began": False, "pending": []} for _ in range(workers)]
        self.counters = {}

    def claim(self, number, epochs):
        """One claim; what is given out for it, if anything."""
        state = self.states[number]
        while state["epoch"] < epochs:
            place = self.counters.get(state["epoch"], 0)
            self.counters[state["epoch"]] = place + 1
            state["claimed"], state["began"] = place + 1, True
            shard = self.remainder.shard(state["epoch"], place, self.total)
            if shard is not None:
                state["pending"].append((state["epoch"], shard))
                return state["pending"].pop(0) if len(state["pending"]) > self.ahead else None
            if state["pending"]:  # A loader gives out the rest of an epoch before the next one begins.
                return state["pending"].pop(0)
            state["epoch"] += 1
        return state["pending"].pop(0) if state["pending"] else None

    def stop(self):
        positions = [
            QueuePosition(state["epoch"], state["claimed"], tuple(state["pending"]))
            if state["began"]
            else QueuePosition()
            for state in self.states
        ]
        return self.remainder.after(positions)


@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 3), st.data())
@settings(max_examples=200, deadline=None)
def test_every_shard_is_given_out_once_however_often_a_run_is_stopped(total, epochs, ahead, data):
    remainder, given_out = QueueRemainder(), []
    for _ in range(data.draw(st.integers(0, 3))):
        workers = data.draw(st.integers(1, 4))
        run = Claimers(remainder, workers, total, ahead)
        for number in data.draw(st.lists(st.integers(0, workers - 1), max_size=12)):
            given_out.append(run.claim(number, epochs))
        remainder = QueueRemainder.from_json(run.stop().to_json())
    last = Claimers(remainder, 1, total, 0)
    for _ in range(total * epochs + 5):
        given_out.append(last.claim(0, epochs))
    found = sorted(claim for claim in given_out if claim is not None)
    assert found == [(epoch, number) for epoch in range(epochs) for number in range(total)]


@pytest.mark.parametrize("staleness", [-1, 1.5, True, None])
def test_the_bound_is_a_number_of_updates(staleness):
    with pytest.raises(lockstep.UsageError, match="0 or more"):
        lockstep.Async(staleness=staleness)
