"""The parts of Async that need no other process: the ledger, the owner, permits, what remains to be claimed."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep.train.claims import Remainder, Standing
from lockstep.train.ledger import Ledger
from lockstep.train.owner import Gradient, Owner
from lockstep.train.permits import Permits


@given(st.integers(0, 6), st.integers(1, 6), st.data())
@settings(max_examples=200, deadline=None)
def test_no_gradient_is_staler_than_the_bound_and_none_is_stuck(bound, workers, data):
    """Workers read, compute and arrive in any order, as many at a time as permits allow."""
    ledger, computing, arrived, ends = Ledger(bound), [], [], 0
    for _ in range(data.draw(st.integers(1, 60))):
        idle = [worker for worker in range(workers) if worker not in computing + arrived]
        can_read = idle if len(computing) + len(arrived) <= bound else []
        actions = [("read", worker) for worker in can_read] + [("arrive", worker) for worker in computing]
        action, worker = data.draw(st.sampled_from(actions))
        if action == "read":
            ledger.read(worker)
            computing.append(worker)
        else:
            computing.remove(worker)
            arrived.append(worker)
        while (ready := next(filter(ledger.may_apply, arrived), None)) is not None:
            arrived.remove(ready)
            assert ledger.apply(ready) <= bound
            ends += 1
        assert computing or not arrived, "only gradients that are still computed can be waited for"
    assert ledger.version == ends


def test_a_reading_that_is_withdrawn_is_not_waited_for():
    ledger = Ledger(1)
    ledger.read(0)
    ledger.read(1)
    assert ledger.apply(1) == 0
    ledger.read(1)
    assert not ledger.may_apply(1)
    ledger.withdraw(0)
    assert ledger.apply(1) == 0


def owner_of(bound, lr=1.0):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    return Owner([], optimizer, None, 2, bound)


def test_an_owner_keeps_what_older_readings_cannot_bear():
    owner = owner_of(1)
    owner.read(0, [], is_counted=True)
    for number in (1, 2):
        owner.read(1, [], is_counted=True)
        owner.submit(1, Gradient(number, b"", []))
        if number == 1:
            assert owner.wait_applied(1, 0.0) == 0
    assert owner.wait_applied(1, 0.05) is None and owner.version == 1
    owner.read(1, [], is_counted=False)  # Looking is always allowed.
    owner.submit(0, Gradient(1, b"", []))
    assert (owner.wait_applied(0, 0.0), owner.wait_applied(1, 0.0), owner.version) == (1, 1, 3)


def test_an_owner_takes_every_step_once():
    owner = owner_of(4)
    owner.read(0, [], is_counted=True)
    owner.submit(0, Gradient(1, b"", []))
    owner.read(0, [], is_counted=True)
    for number in (1, 3):
        with pytest.raises(AssertionError, match="after 1 of worker 0"):
            owner.submit(0, Gradient(number, b"", []))


def test_an_update_that_fails_is_told_to_all():
    owner = owner_of(4)
    owner._optimizer.step = lambda: 1 / 0
    owner.read(0, [], is_counted=True)
    with pytest.raises(lockstep.UsageError, match="worker 0 failed: ZeroDivisionError"):
        owner.submit(0, Gradient(1, b"", []))
    with pytest.raises(lockstep.UsageError, match="worker 0 failed"):
        owner.wait_applied(1, 0.0)


def test_permits_are_given_in_turn():
    permits, got = Permits(1), []

    def take(worker):
        assert permits.get(worker, 10.0)
        got.append(worker)
        permits.give_back()

    permits.ask(0)
    assert permits.get(0, 0.0)
    for worker in (2, 1, 3):
        permits.ask(worker)
    assert not permits.get(2, 0.01)
    threads = [threading.Thread(target=take, args=(worker,)) for worker in (1, 2, 3)]
    for thread in threads:
        thread.start()
    permits.give_back()
    for thread in threads:
        thread.join(10)
    assert got == [2, 1, 3]


class Claimers:
    """Some workers who claim, one of them at a time, until they are stopped: what `ClaimedPicks` does."""

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
        standings = [
            Standing(state["epoch"], state["claimed"], tuple(state["pending"])) if state["began"] else Standing()
            for state in self.states
        ]
        return self.remainder.after(standings)


@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 3), st.data())
@settings(max_examples=200, deadline=None)
def test_every_shard_is_given_out_once_however_often_a_run_is_stopped(total, epochs, ahead, data):
    remainder, given_out = Remainder(), []
    for _ in range(data.draw(st.integers(0, 3))):
        workers = data.draw(st.integers(1, 4))
        run = Claimers(remainder, workers, total, ahead)
        for number in data.draw(st.lists(st.integers(0, workers - 1), max_size=12)):
            given_out.append(run.claim(number, epochs))
        remainder = Remainder.from_json(run.stop().to_json())
    last = Claimers(remainder, 1, total, 0)
    for _ in range(total * epochs + 5):
        given_out.append(last.claim(0, epochs))
    found = sorted(claim for claim in given_out if claim is not None)
    assert found == [(epoch, number) for epoch in range(epochs) for number in range(total)]


@pytest.mark.parametrize("staleness", [-1, 1.5, True, None])
def test_the_bound_is_a_number_of_updates(staleness):
    with pytest.raises(lockstep.UsageError, match="0 or more"):
        lockstep.Async(staleness=staleness)
