"""Spares of an elastic run: started processes that wait to take the place of a worker that is lost."""

import json

import pytest

from lockstep.elastic.coordinator import PREFIX, Coordinator
from lockstep.errors import UsageError
from lockstep.start.elastic import Elastic


class Keys(dict):
    """The keys of a run, in this process."""

    def set(self, key, value):
        self[key] = value

    def forget(self, prefix):
        for key in [key for key in self if key.startswith(prefix)]:
            del self[key]


@pytest.fixture
def run():
    """A run of two workers and a spare, all of which have joined; the spare waits to be let in."""
    keys = Keys({f"{PREFIX}card/{member}": "card" for member in range(3)} | {f"{PREFIX}source": "0"})
    coordinator = Coordinator(keys, wanted=2, most=2)
    coordinator.attend(alive(0, 1, 2))
    keys.set(f"{PREFIX}ready/2/0", "1")
    return coordinator


def alive(*members):
    return dict.fromkeys(members, True)


def generation(coordinator):
    return json.loads(coordinator.keys[f"{PREFIX}generation/{coordinator.number}"])["members"]


def test_the_first_generation_has_as_many_as_were_asked_for(run):
    assert generation(run) == [0, 1]


def test_a_spare_that_waits_calls_nobody(run):
    run.attend(alive(0, 1, 2))
    assert f"{PREFIX}call/1" not in run.keys


def test_a_spare_takes_the_place_of_a_lost_worker_in_the_next_generation(run):
    run.keys.set(f"{PREFIX}report/1/1", json.dumps({"calls": 3, "call": "step", "why": "worker 0 ended"}))
    run.attend(alive(1, 2))
    assert generation(run) == [1, 2]
    assert json.loads(run.keys[f"{PREFIX}admit/2/0"]) == {"generation": 2}


def test_a_newcomer_for_whom_there_is_room_calls_the_others(run):
    run.most = 3
    run.attend(alive(0, 1, 2))
    assert f"{PREFIX}call/1" in run.keys


def test_fewer_than_no_spares_are_refused():
    with pytest.raises(UsageError, match="spares=-1"):
        Elastic(spares=-1).check(2)


def test_members_that_have_reported_and_then_died_leave_it_to_the_launcher_to_start_anew(run):
    run.keys.set(f"{PREFIX}report/1/1", json.dumps({"calls": 3, "call": "step", "why": "worker 0 does not answer"}))
    run.attend(alive(0))
    assert run.attend(alive()) == [] and not run.stopped and run.number == 1


def test_who_leaves_and_alone_has_the_state_hands_it_over_to_a_newcomer_first(run):
    for member, leaves in ((0, True), (1, False)):
        run.keys.set(f"{PREFIX}report/1/{member}", json.dumps({"calls": 3, "call": "step", "leaves": leaves}))
    run.keys.pop(f"{PREFIX}ready/2/0")
    run.attend(alive(0, 2))  # Worker 1 has died after it had reported; the newcomer is still starting.
    assert run.number == 1 and not run.stopped
    run.keys.set(f"{PREFIX}ready/2/0", "1")
    run.attend(alive(0, 2))
    assert generation(run) == [0, 2]
    run.keys.set(f"{PREFIX}report/2/0", json.dumps({"calls": 4, "call": "step", "leaves": True}))
    run.keys.set(f"{PREFIX}report/2/2", json.dumps({"calls": 4, "call": "step"}))
    run.attend(alive(0, 2))
    assert generation(run) == [2]


def test_members_that_have_all_left_end_the_run(run):
    run.keys.set(f"{PREFIX}report/1/0", json.dumps({"calls": 3, "call": "step", "leaves": True}))
    run.keys.set(f"{PREFIX}report/1/1", json.dumps({"calls": 3, "call": "step", "leaves": True}))
    run.attend(alive(0, 1))
    assert run.stopped == "all workers have left."


def test_who_has_not_joined_within_the_deadline_of_the_others_is_ended_and_a_late_starter_is_not(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    coordinator = Coordinator(Keys({f"{PREFIX}card/0": "card", f"{PREFIX}deadline/0": "7.0"}), wanted=2)
    assert coordinator.attend(alive(0, 1)) == []
    now[0] += 6.9
    assert coordinator.attend(alive(0, 1)) == []
    now[0] += 0.2
    assert coordinator.attend(alive(0, 1)) == [1]
    assert coordinator.attend(alive(0, 2)) == []  # In its place.
    now[0] += 7.1
    assert coordinator.attend(alive(0, 2)) == [2]
    coordinator.keys.set(f"{PREFIX}card/2", "card")
    assert coordinator.attend(alive(0, 2)) == [] and coordinator.members == (0, 2)


def test_nobody_is_ended_before_the_first_has_joined(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    coordinator = Coordinator(Keys(), wanted=2)
    for _ in range(3):
        assert coordinator.attend(alive(0, 1)) == []
        now[0] += 1000
