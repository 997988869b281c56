"""Who gets how many shards: functions of times."""

import random

from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.tree import ShardTree
from lockstep.elastic.balance import GAIN, REST, Balance, even, plan, takes

TIMES = st.lists(st.floats(0.001, 10.0), min_size=1, max_size=8)


@given(TIMES, st.integers(0, 24))
def test_a_plan_gives_everybody_at_least_one_and_no_plan_is_faster(times, more):
    shards = len(times) + more
    counts = plan(times, shards)
    assert sum(counts) == shards and min(counts) >= 1
    best = takes(counts, times)
    assert best <= takes(even(len(times), shards), times)
    for source in range(len(times)):  # Moving any one shard makes it no faster.
        for target in range(len(times)):
            if counts[source] > 1 and source != target:
                moved = [count - (rank == source) + (rank == target) for rank, count in enumerate(counts)]
                assert takes(moved, times) >= best * (1 - 1e-12)


def test_a_worker_three_times_as_slow_gets_fewer():
    assert plan([1.0, 3.0, 1.0, 1.0], 16) == [5, 1, 5, 5]
    assert plan([1.0, 1.0], 8) == [4, 4]


def test_a_change_has_to_pay_and_comes_after_a_rest():
    balance, members, counts = Balance(8), [4, 7], [4, 4]
    dice = random.Random(0)
    for _ in range(3 * REST):
        balance.see(members, [0.1 * dice.uniform(1 - GAIN / 3, 1 + GAIN / 3) for _ in members])
        assert not balance.is_due(members, counts)
    balance = Balance(8)
    for step in range(REST):
        assert not balance.is_due(members, counts), step
        balance.see(members, [0.1, 0.3])
    assert balance.is_due(members, counts)
    assert balance.counts(members) == [6, 2]
    assert not balance.is_due(members, [6, 2])


def test_a_newcomer_counts_as_fast_as_the_others_are_on_average():
    balance = Balance(8)
    balance.see([0, 1], [0.1, 0.3])
    assert balance.counts([0, 1, 2]) == plan([0.1, 0.3, 0.2], 8)
    assert balance.counts([5, 6]) == [4, 4]  # Nothing is known of them.


def test_a_tree_is_cut_where_the_counts_say():
    tree = ShardTree(8, 3, [5, 1, 2])
    assert tree.runs == [(0, 5), (5, 6), (6, 8)]
    assert sorted(shard for roots in tree.roots for begin, end in roots for shard in range(begin, end)) == [*range(8)]
