"""What wire="auto" chooses, from numbers alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.wire import Auto, BucketShape, Full, Half, Int8, LowRank, Piece, Sign, TopK
from lockstep.wire.auto import Costs, Link, best_of, proposals

BUCKET = BucketShape(1 << 20, (Piece("weight", 0, (1024, 1024)),))
WIRES = Auto(budget=1).wires()


def costs(bytes_per_s, num_buckets=4, per_value=2e-9, latency_s=1e-4):
    link = Link(latency_s, bytes_per_s)
    encode = tuple((0.0 if wire == Full() else per_value * BUCKET.numel,) * num_buckets for wire in WIRES)
    seconds = tuple((link.seconds(wire, BUCKET, 2),) * num_buckets for wire in WIRES)
    return Costs(tuple(0.02 * (b + 1) for b in range(num_buckets)), 0.02 * num_buckets, encode, seconds, steals=True)


def test_the_budget_says_what_may_be_chosen():
    assert Auto(budget=0).wires() == (Full(),)
    assert Auto().wires() == (Full(), Half("bf16"), Int8())
    assert Auto(budget=1).wires() == (Full(), Half("bf16"), Int8(), Sign(), LowRank(4), TopK(0.01))
    assert Auto(candidates=(Full(), Sign())).wires() == (Full(), Sign())


def test_a_fast_link_is_left_alone():
    assert proposals(costs(100e9)) == [(0, 0, 0, 0)]


def test_a_slow_link_is_helped():
    slow = costs(10e6)
    found = proposals(slow)
    assert found[0] == (0, 0, 0, 0) and len(found) == 3
    assert slow.predict(found[1]) < 0.2 * slow.predict(found[0])


def test_buckets_that_travel_unseen_are_left_alone():
    """Of four buckets only the last is not hidden by the backward pass: the encoding of the others would be wasted."""
    found = proposals(costs(0.3e9, per_value=8e-9), most=9)
    best = min(found, key=costs(0.3e9, per_value=8e-9).predict)
    assert best[0] == 0 and best[-1] != 0


@given(st.floats(1e6, 1e11), st.integers(1, 12), st.floats(0, 1e-7), st.floats(0, 1e-2))
def test_what_is_proposed_is_no_worse_than_one_wire_for_all(bytes_per_s, num_buckets, per_value, latency_s):
    found = costs(bytes_per_s, num_buckets, per_value, latency_s)
    best = min(map(found.predict, proposals(found)))
    assert best <= min(found.predict((wire,) * num_buckets) for wire in range(len(WIRES))) + 1e-12
    assert all(found.exposed(each) >= 0 for each in proposals(found))


def test_the_less_lossy_of_equals_is_chosen():
    assert best_of([((0, 0), 1.0), ((2, 2), 0.98), ((1, 1), 0.99)]) == (0, 0)
    assert best_of([((0, 0), 1.0), ((2, 2), 0.5), ((1, 1), 0.51)]) == (1, 1)
    assert best_of([((0, 0), 1.0), ((2, 0), 0.5)]) == (2, 0)


@pytest.mark.parametrize("options", [{"budget": -1}, {"budget": "much"}, {"trial_steps": 0}, {"candidates": ()}])
def test_misuse_is_told(options):
    with pytest.raises(lockstep.UsageError, match="wire Auto got"):
        Auto(**options)
