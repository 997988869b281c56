"""The parts of watching: shares of a step, who is late and why, clocks, scaling, the noise scale, contention."""

import hashlib
import itertools
import os
import random
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.events import Event, Events, Kind
from lockstep.watching.collector import Pace, Summary, _Means
from lockstep.watching.efficiency import SpeedTracker, StepSpeed
from lockstep.watching.network import HostClock, SlowLink, slow_link
from lockstep.watching.noise import NoiseScale, own_squares
from lockstep.watching.recorder import Contention
from lockstep.watching.step_record import (
    SHARES,
    SYNC,
    Flight,
    StepRecord,
    TimeSpan,
    combine,
    is_recorded,
    record_step,
)
from lockstep.watching.stragglers import Stragglers, last_of

MS = 1_000_000


def moments(*heard):
    return [(Event(kind, time, 0, *rest), time) for kind, time, *rest in heard]


def a_step(begin=0, data=10, forward=20, backward=40, waits=30, optimizer=5, reduced=25):
    """One step over two buckets; the closing one is launched when the backward pass has ended."""
    at = list(itertools.accumulate([begin, data, forward, backward, waits, optimizer]))
    return moments(
        (Kind.LOADING, at[0]),
        (Kind.LOADED, at[1]),
        (Kind.FORWARD, at[1], -1, 0, 8),
        (Kind.FORWARDED, at[2] - 5),
        (Kind.BACKWARD, at[2]),
        (Kind.FULL, at[2] + 9, 0, 100),
        (Kind.LAUNCHED, at[2] + 10, 0, 100),
        (Kind.REDUCED, at[2] + 20, 0, 100),
        (Kind.WAITING, at[3]),
        (Kind.LAUNCHED, at[3] + 1, 1, 50),
        (Kind.REDUCED, at[3] + reduced, 1, 50),
        (Kind.SYNCED, at[4]),
        (Kind.OPTIMIZER, at[4]),
        (Kind.UPDATED, at[5]),
    )


def record_of(heard, step=9, begin=0, **noted):
    return record_step(step, begin, heard, noted)


def test_shares_of_a_step():
    record = record_of(a_step())
    assert [(span.name, span.length) for span in record.spans] == [
        ("data", 10), ("forward", 20), ("backward", 40), (SYNC, 30), ("optimizer", 5),
    ]  # fmt: skip
    assert record.wall == 105 and combine({0: record}, {}).workers[0].own == 75 and record.num_samples == 8
    assert [(b.place, b.num_bytes, b.ready, b.launched, b.reduced) for b in record.flights] == [
        (0, 100, 39, 40, 50), (1, 50, 71, 71, 95),
    ]  # fmt: skip
    assert StepRecord.from_json(record.to_json()) == record


def test_waiting_is_until_the_last_has_launched():
    """Worker 1 is 15 later with its last bucket: so long worker 0 waits for it, the rest is exposed for both."""
    early, late = record_of(a_step()), record_of(a_step(backward=55, waits=15, reduced=10))
    step = combine({0: early, 1: late}, {})
    first, second = step.workers
    assert (first.shares["waiting"], first.shares["exposed"]) == (16, 14)
    assert (second.shares["waiting"], second.shares["exposed"]) == (1, 14)
    assert first.hidden == second.hidden == 10
    assert step.wall == 105
    for worker in step.workers:
        assert sum(worker.shares.values()) == worker.record.wall
        assert [span.begin for span in worker.spans[1:]] == [span.end for span in worker.spans[:-1]]


def test_offsets_place_workers_on_one_clock():
    ahead = record_of(a_step(begin=1000), begin=1000)
    step = combine({0: record_of(a_step()), 1: ahead}, {1: -1000})
    assert [worker.begin for worker in step.workers] == [0, 0]
    assert all(worker.shares["waiting"] == 1 for worker in step.workers)


@given(st.lists(st.sampled_from(list(Kind)), min_size=1, max_size=60), st.randoms())
def test_shares_add_up_whatever_is_heard(kinds, rng):
    """Passes that fail, loops that load nothing, several models: no gap, no overlap."""
    times = sorted(rng.randrange(1000) for _ in kinds)
    heard = moments(*((kind, time, rng.randrange(3), 10) for kind, time in zip(kinds, times, strict=True)))
    heard.append((Event(Kind.UPDATED, 1001, 0), 1001))
    other = [(event, time + rng.randrange(3)) for event, time in heard]
    other.sort(key=lambda moment: moment[1])
    step = combine({0: record_of(heard), 1: record_of(other)}, {1: rng.randrange(-5, 5)})
    for worker in step.workers:
        assert set(worker.shares) == set(SHARES)
        assert sum(worker.shares.values()) == worker.record.wall
        assert all(share >= 0 for share in worker.shares.values())
        assert 0 <= worker.hidden <= worker.record.wall


def test_loading_tells_only_listeners():
    events = Events()
    assert list(events.loading(iter([1, 2]))) == [1, 2]
    heard = []
    events.subscribe(lambda event: heard.append(event.kind))
    assert list(events.loading(iter([1]))) == [1]
    assert heard == [Kind.LOADING, Kind.LOADED] * 2


def test_what_communication_takes_of_a_backward_pass_is_exposed():
    plain = combine({0: record_of(a_step())}, {}).workers[0]
    for taken, moved in ((15, 15), (1000, 40)):  # No more than the pass has.
        record = StepRecord.from_json(record_step(9, 0, a_step(), {}, taken).to_json())
        worker = combine({0: record}, {}).workers[0]
        assert worker.shares["backward"] == plain.shares["backward"] - moved
        assert worker.shares["exposed"] == plain.shares["exposed"] + moved
        assert sum(worker.shares.values()) == worker.record.wall


# Who is late


def workers_step(*own, step=9, sync=None):
    """A step of workers that need `own` milliseconds each, given as dicts of shares; all end together."""
    longest = max(sum(each.values()) for each in own)
    records = {}
    for rank, each in enumerate(own):
        spans, now = [], 0
        for name, ms in each.items():
            spans.append(TimeSpan(name, now, now + ms * MS))
            now += ms * MS
        launched, end = now, (longest + (sync or 1)) * MS
        spans.append(TimeSpan(SYNC, now, end))
        records[rank] = StepRecord(step, 0, end, spans, [Flight(0, 10, launched, launched, end)], 4.0)
    return combine(records, {})


def test_last_and_why():
    late = last_of(workers_step({"data": 5, "forward": 20}, {"data": 205, "forward": 22}), None)
    assert (late.worker, late.cause, late.where) == (1, "data", "data")
    assert 200 * MS <= late.late_ns <= 203 * MS and late.part > 0.95
    late = last_of(workers_step({"forward": 20}, {"forward": 20}, {"forward": 90, "data": 3}, {"forward": 25}), None)
    assert (late.worker, late.cause, late.where) == (2, "compute", "forward")


def test_network_is_at_fault_where_all_were_ready():
    step = workers_step({"forward": 20}, {"forward": 21}, sync=400)
    late = last_of(step, SlowLink(0, 200 * MS))
    assert (late.worker, late.cause) == (0, "network") and late.late_ns >= 399 * MS
    assert last_of(workers_step({"forward": 20}, {"forward": 300}), SlowLink(0, 200 * MS)).cause == "compute"


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("direction", ["sends", "receives"])
def test_slow_link(size, direction):
    if size == 2 and direction == "receives":
        pytest.skip("of two, the sender is named")
    slow = size - 1
    delays = {
        pair: [200 * MS if pair[direction == "receives"] == slow else MS // 10] * 5
        for pair in itertools.permutations(range(size), 2)
    }
    found = slow_link(delays, size, are_one_way=True)
    assert found is not None and found.worker == slow and found.excess_ns > 150 * MS
    assert slow_link({pair: [MS] for pair in delays}, size, are_one_way=True) is None


def test_of_two_with_round_trips_only_nobody_can_tell():
    assert slow_link({(0, 1): [100 * MS], (1, 0): [100 * MS]}, 2, are_one_way=False) is None


def judge(steps):
    stragglers = Stragglers()
    for number, own in enumerate(steps, 1):
        step = workers_step(*own, step=number)
        stragglers.see(step, last_of(step, None))
    return stragglers.text


def test_verdict_names_a_steady_straggler():
    rng = random.Random(0)
    steps = [[{"data": 5, "forward": rng.randrange(20, 40)} for _ in range(4)] for _ in range(30)]
    assert judge(steps) == ""
    for own in steps:
        own[1]["data"] += 190
    assert judge(steps[:5]) == ""  # Too few to say.
    text = judge(steps)
    assert text.startswith("worker 1 holds everyone up by 19") and text.endswith("of it in data loading")


def test_verdict_is_dropped_when_it_is_over():
    slow = [[{"forward": 100}, {"forward": 300}]] * 20
    quick = [[{"forward": 100}, {"forward": 101}]] * 30
    assert judge(slow) and not judge(slow + quick)


@pytest.mark.parametrize("size", [2, 4])
def test_noise_names_nobody(size):
    """Steps of 100 ms that scatter by a third, from workers that are all alike."""
    for seed in range(50):
        rng = random.Random(seed)
        steps = [[{"forward": round(rng.gauss(100, 15))} for _ in range(size)] for _ in range(60)]
        assert judge(steps) == ""


# Clocks


def test_clocks():
    here = HostClock("kernel", 5000)
    assert here.offset_of(HostClock("kernel", 9999), 123) == 0
    # The other's monotonic clock stands 300 behind, its calendar is right, or ahead by 40.
    assert here.offset_of(HostClock("another", 5300), 0) == 300
    assert here.offset_of(HostClock("another", 5340), 40) == 300
    assert HostClock.mine().is_same_as(HostClock.mine())


# Speed


def test_scaling():
    speed = SpeedTracker(2, peak_flops=1e11)
    speed.flops_per_sample = 1e9
    found = speed.see(workers_step({"forward": 80}, {"forward": 80}, sync=20))
    assert found.batch == 8 and found.samples_per_s == pytest.approx(80)
    assert found.efficiency == pytest.approx(0.8)
    assert found.bus_gb_per_s == pytest.approx(10 / 20e6)
    assert found.mfu == pytest.approx(80e9 / 2e11)


def test_noise_scale_is_unbiased():
    """Gradients of one sample are normal around a mean, so both numbers are known; parts of different sizes."""
    generator = torch.Generator().manual_seed(0)
    mean, sizes = torch.full((50,), 0.2), [3, 5, 8]
    noise = NoiseScale()
    for _ in range(400):
        parts = [mean + torch.randn(size, 50, generator=generator) for size in sizes]
        whole = torch.cat(parts).mean(0).square().sum().item()
        squares = [part.mean(0).square().sum().item() for part in parts]
        shares = [size / sum(sizes) for size in sizes]
        notes = {rank: {"own": squares[rank] * shares[rank] ** 2, "share": shares[rank]} for rank in range(3)}
        notes[0]["whole"] = whole
        noise.see(notes, dict(enumerate(sizes)))
    assert noise.value == pytest.approx(50 / (50 * 0.04), rel=0.35)


def test_norms_are_of_the_gradient_before_it_was_weighed():
    noted = {0: {"own": 4.0, "share": 0.25}, 1: {"own": 9.0, "share": 0.75}}
    assert own_squares(noted, {0: 1.0, 1: 3.0}) == {0: 64.0, 1: 16.0}
    weighed_before = {rank: {**each, "share": 1.0} for rank, each in noted.items()}
    assert own_squares(weighed_before, {0: 1.0, 1: 3.0}) == {0: 64.0, 1: 16.0}
    assert own_squares(noted, {0: 1.0, 1: 0.0}) == {0: 64.0}


def test_without_all_norms_there_is_no_noise_scale():
    noise = NoiseScale()
    for _ in range(5):
        noise.see({0: {"whole": 1.0}, 1: {"own": 1.0, "share": 1.0}}, {0: 1.0, 1: 1.0})
    assert noise.value is None


def test_pace_keeps_to_what_watching_may_cost():
    pace, used = Pace(), 0.0
    for second in range(1, 41):  # The thread uses 2 % of a core if every step is recorded.
        pace.see(second, used)
        used += 0.02 / pace.every
    assert pace.every in (4, 8)
    assert [step for step in range(1, 40) if is_recorded(step, pace.every)] == list(range(2, 40, pace.every))
    for second in range(41, 90):
        pace.see(second, used)
    assert pace.every == 1 and is_recorded(1, pace.every)


def test_rates_are_those_of_the_mean_step():
    means = _Means()
    for seconds in (0.1, 0.3):
        step = workers_step({"forward": 1e3 * seconds})
        means.see(step, StepSpeed(8, 8 / seconds, 0.1 / seconds, 0, None, None))
    assert means.values()["samples_per_s"] == pytest.approx(16 / 0.4)
    assert means.values()["efficiency"] == pytest.approx(0.5)


def test_summary_in_words():
    summary = Summary(steps=12, wall_ms=100.0, forward_ms=60.0, exposed_ms=40.0, efficiency=0.6, verdict="worker 1 ...")
    assert str(summary) == "12 steps, 100.0 ms each: forward 60 %, exposed 40 %; efficiency 60 %\nworker 1 ..."


# Contention


pytestmark = pytest.mark.skipif(not os.path.exists("/proc/thread-self/schedstat"), reason="needs Linux's schedstat")

BLOCK = bytes(1 << 20)
LASTING_S = 0.6


@pytest.fixture
def one_core():
    """This thread, and whatever it starts, on one core."""
    before = os.sched_getaffinity(0)
    core = min(before)
    os.sched_setaffinity(0, {core})
    yield core
    os.sched_setaffinity(0, before)


def work(until):
    """Work without the interpreter's lock."""
    while not until():
        hashlib.sha256(BLOCK)


def part_taken():
    """What was taken from this thread, in units of what it had of its core."""
    contention = Contention()
    contention.begin()
    begun, had = time.perf_counter(), time.thread_time_ns()
    work(lambda: time.perf_counter() - begun > LASTING_S)
    taken = contention.end()
    contention.close()
    return taken / (time.thread_time_ns() - had)


def test_a_thread_of_this_process(one_core):
    over = threading.Event()
    other = threading.Thread(target=work, args=(over.is_set,))
    other.start()
    try:
        assert 0.25 < part_taken() < 4
    finally:
        over.set()
        other.join()


def test_another_program(one_core):
    program = "import hashlib\nprint(flush=True)\nwhile True: hashlib.sha256(bytes(1 << 20))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        try:
            assert part_taken() < 0.05
        finally:
            other.kill()


def test_nobody(one_core):
    assert part_taken() < 0.05


def test_an_end_without_a_begin():
    contention = Contention()
    assert contention.end() == 0
    contention.begin()
    found = []
    elsewhere = threading.Thread(target=lambda: found.append(contention.end()))
    elsewhere.start()
    elsewhere.join()
    assert found == [0]  # A pass that ends on another thread cannot be told.
    contention.close()
