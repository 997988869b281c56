"""The simulation of a step: what must hold of any step, and steps that can be computed by hand."""

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.plan import simulation
from lockstep.plan.simulation import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, StepInputs, message_seconds, simulate

PLAIN = StepInputs(
    workers=4,
    per_host=4,
    forward_s=1.0,
    backward_s=2.0,
    optimizer_s=0.5,
    bucket_bytes=[100.0, 100.0, 100.0, 100.0],
    bucket_ready=[0.25, 0.5, 0.75, 1.0],
    gather_bytes=[100.0, 100.0, 100.0, 100.0],
    algorithm="ring",
    intra_bytes_per_s=1000.0,
)


def inputs():
    def build(sizes, cuts, **others):
        count = min(len(sizes), len(cuts))
        return StepInputs(
            forward_s=1.0,
            backward_s=2.0,
            optimizer_s=0.1,
            bucket_bytes=sizes[:count],
            gather_bytes=sizes[:count],
            bucket_ready=[*sorted(cuts[:count])[:-1], 1.0],
            intra_bytes_per_s=100.0,
            inter_bytes_per_s=50.0,
            **others,
        )

    return st.builds(
        build,
        st.lists(st.floats(0.1, 100), min_size=1, max_size=6),
        st.lists(st.floats(0.01, 1), min_size=1, max_size=6),
        workers=st.integers(1, 64),
        per_host=st.integers(1, 8),
        accumulation=st.integers(1, 7),
        reduces_each=st.booleans(),
        zero=st.integers(0, 3),
        algorithm=st.sampled_from(["ring", "tree", "hierarchical", "shm", "auto"]),
        intra_latency_s=st.floats(0, 0.01),
        inter_latency_s=st.floats(0, 0.1),
        contention=st.sampled_from([0.0, 0.3, 1.0]),
        jitter=st.floats(0, 0.1),
        straggler=st.sampled_from([1.0, 1.5]),
        loader_s=st.sampled_from([0.0, 5.0]),
    )


@given(inputs())
@settings(max_examples=150, deadline=None)
def test_parts_add_up_and_nothing_is_faster_than_its_parts(step):
    times = simulate(step)
    parts = times.compute_s + times.wait_s + times.exposed_s + times.optimizer_s + times.data_s
    assert times.step_s == pytest.approx(parts, rel=1e-9)
    assert times.step_s >= (step.forward_s + step.backward_s) * step.accumulation - 1e-9
    assert times.step_s >= step.loader_s * step.accumulation - 1e-9
    # Messages are hidden, or exposed: what is exposed is at most all of them, and what computing lost beside them.
    hidden = (step.forward_s + step.backward_s) * step.accumulation + times.wait_s
    assert times.exposed_s <= times.network_s + step.contention * hidden + 1e-6 + step.launch_s


@given(inputs())
@settings(max_examples=60, deadline=None)
def test_passes_that_are_not_simulated_are_as_if_they_were(step):
    step = replace(step, jitter=0.0, accumulation=6)
    whole, short = simulation._simulate(step), simulate(step)
    assert short.step_s == pytest.approx(whole.step_s, rel=1e-6)
    assert short.sent_bytes == pytest.approx(whole.sent_bytes, rel=1e-6)


@given(inputs())
@settings(max_examples=60, deadline=None)
def test_a_lane_does_one_thing_at_a_time(step):
    spans = simulate(step).spans
    for lane in ("compute", "network"):
        ends = 0.0
        for span in [span for span in spans if span.lane == lane]:
            assert span.begin >= ends - 1e-9 and span.end >= span.begin
            ends = span.end


def test_a_step_by_hand():
    # A ring of four moves 2 * 3/4 of each bucket: 0.15 s. Three hide behind the backward pass, the last one does not.
    times = simulate(PLAIN)
    assert times.exposed_s == pytest.approx(0.15)
    assert times.step_s == pytest.approx(1 + 2 + 0.15 + 0.5)
    assert times.sent_bytes == pytest.approx(2 * 3 / 4 * 400)
    assert [span.index for span in times.spans if span.lane == "network"] == [0, 1, 2, 3]


def test_what_cannot_overlap_is_exposed_whole():
    assert simulate(replace(PLAIN, contention=1.0)).exposed_s == pytest.approx(4 * 0.15)
    assert simulate(replace(PLAIN, bucket_ready=[1.0] * 4)).exposed_s == pytest.approx(4 * 0.15)


def test_a_slow_link_is_never_idle():
    times = simulate(replace(PLAIN, intra_bytes_per_s=100.0))
    assert times.step_s == pytest.approx(1 + 0.5 + 4 * 1.5 + 0.5)  # Messages begin when the first bucket is full.


def test_splits_move_what_they_should():
    whole, two, three = (simulate(replace(PLAIN, zero=zero)) for zero in (0, 2, 3))
    assert two.sent_bytes == pytest.approx(whole.sent_bytes)
    # Gathered forward and backward, but for the block that the forward pass used last.
    assert three.sent_bytes == pytest.approx(whole.sent_bytes / 2 * 3 - 75)
    assert two.optimizer_s == pytest.approx(whole.optimizer_s / 4)
    assert simulate(replace(PLAIN, zero=3, regathers=False)).sent_bytes == pytest.approx(whole.sent_bytes)


def test_accumulation_sends_once():
    assert simulate(replace(PLAIN, accumulation=5)).sent_bytes == simulate(PLAIN).sent_bytes
    assert simulate(replace(PLAIN, accumulation=5, reduces_each=True)).sent_bytes == 5 * simulate(PLAIN).sent_bytes


def test_a_loader_that_is_too_slow_is_waited_for():
    assert simulate(replace(PLAIN, loader_s=10.0)).step_s == pytest.approx(10.0)
    assert simulate(replace(PLAIN, loader_s=1.0)).data_s == 0


@pytest.mark.parametrize("kind", [ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER])
def test_costs_of_collectives(kind):
    rounds = 2 if kind == ALL_REDUCE else 1
    base = replace(PLAIN, intra_latency_s=0.001, inter_latency_s=0.01, inter_bytes_per_s=100.0)
    ring = message_seconds(replace(base, algorithm="ring"), kind, 1000.0)
    assert ring == pytest.approx(rounds * (3 * 0.001 + 3 / 4 * 1.0))
    far = replace(base, workers=8)
    hosts = message_seconds(replace(far, algorithm="hierarchical"), kind, 1000.0)
    assert hosts == pytest.approx(rounds * (3 * 0.001 + 3 / 4 * 1.0 + 0.01 + 1 / 2 * 10.0))
    assert message_seconds(replace(far, algorithm="auto"), kind, 1000.0) <= hosts
    assert message_seconds(replace(far, workers=1), kind, 1000.0) == 0
    shared = message_seconds(replace(base, algorithm="shm"), kind, 1000.0)
    assert shared == pytest.approx(0.002 + {ALL_REDUCE: 1.0, REDUCE_SCATTER: 0.625, ALL_GATHER: 0.0}[kind])


def test_fewer_hops_win_where_latency_counts():
    near = replace(PLAIN, intra_latency_s=3e-6, intra_bytes_per_s=1e10)
    many = replace(near, workers=16384, per_host=8, inter_latency_s=1e-5, inter_bytes_per_s=1e9)
    tree, ring = (message_seconds(replace(many, algorithm=name), ALL_REDUCE, 1e4) for name in ("tree", "ring"))
    assert tree < ring / 10


def test_the_slowest_of_many_is_as_many_drawn_say():
    draw = random.Random(7)
    for count in (2, 8, 64):
        drawn = statistics.mean(max(draw.gauss(0, 1) for _ in range(count)) for _ in range(4000))
        assert simulation.expected_max(count) == pytest.approx(drawn, abs=0.06)
    assert simulation.expected_max(1) == 0


def test_luck_evens_out_over_passes_and_lasting_speed_does_not():
    chance = replace(PLAIN, jitter=0.1)
    assert simulation.slowest(replace(chance, accumulation=4)) - 1 == pytest.approx(
        (simulation.slowest(chance) - 1) / 2
    )
    lasting = replace(PLAIN, spread=0.1)
    assert simulation.slowest(replace(lasting, accumulation=4)) == simulation.slowest(lasting)
    assert simulation.slowest(replace(PLAIN, straggler=1.5)) == 1.5


@pytest.mark.parametrize(("write_s", "mtbf_s"), [(10.0, 3600.0), (60.0, 86400.0), (300.0, 7200.0)])
def test_no_other_interval_loses_less(write_s, mtbf_s):
    best = simulation.best_interval(write_s, mtbf_s)
    assert best == pytest.approx(math.sqrt(2 * write_s * mtbf_s), rel=0.25)  # Young's.

    def share(interval):
        return simulation.checkpointed_goodput(interval, write_s, 60.0, mtbf_s)

    assert share(best) >= max(share(best * factor) for factor in (0.5, 0.8, 1.25, 2.0)) - 1e-4


def test_goodput_is_what_faults_drawn_at_random_leave():
    draw = random.Random(3)
    interval, write, restart, mtbf = 600.0, 30.0, 120.0, 3600.0
    done = clock = 0.0
    fault = draw.expovariate(1 / mtbf)
    while done < 4e6:
        need = interval + write
        if fault > need:
            fault -= need
            clock += need
            done += interval
        else:
            clock += fault
            fault = draw.expovariate(1 / mtbf)
            left = restart
            while fault <= left:  # A fault during the restart begins it anew.
                clock += fault
                fault = draw.expovariate(1 / mtbf)
            fault -= left
            clock += left
    assert simulation.checkpointed_goodput(interval, write, restart, mtbf) == pytest.approx(done / clock, rel=0.03)


def test_elastic_loses_less():
    assert simulation.elastic_goodput(64, 1.0, 5.0, 60.0, 7200.0) > 0.99
    assert simulation.elastic_goodput(64, 1.0, 5.0, 60.0, math.inf) == 1.0
    assert simulation.checkpointed_goodput(600.0, 30.0, 60.0, math.inf) == pytest.approx(600 / 630)
    assert simulation.checkpointed_goodput(600.0, 30.0, 60.0, 0.5) == 0.0
