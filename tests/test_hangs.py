"""Who is stuck, as judged and said: the parts that need no other process."""

import dataclasses
import gc
import json
import multiprocessing
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep.comm.peers import Peer
from lockstep.replica.bucket import Bucket
from lockstep.replica.step_state import PassPhase
from lockstep.watching.hang_report import Account, HangKind, Waited, judge, make_report
from lockstep.watching.hang_state import QueuedCall, WorkerState, all_stacks, main_thread_spot, parse_calls
from lockstep.watching.hangs import HangWriter
from lockstep.watching.heartbeats import Heartbeats

WAITED = Waited(12, 5.0, 3, 7, 4_200_000, ("h.2.fc.weight", "h.2.fc.bias", "h.1.fc.weight", "h.1.fc.bias"))


def state(rank, **changes):
    """A worker that waits for bucket 3 of step 12, but for `changes`."""
    told = WorkerState(
        rank=rank, clock_s=100.0, time_s=1e9, answers=1, step=12, phase=PassPhase.REDUCING, phase_s=5.0,
        launched=7, num_buckets=7, bucket=3, waits="reducing bucket 3 of step 12", waits_s=5.0, lacking=(),
        num_lacking=0, at="train.py:57 in main", calls={"0/cpu": 40},
    )  # fmt: skip
    return dataclasses.replace(told, **changes)


def away(rank, phase=PassPhase.FORWARD, **changes):
    """A worker that does not wait."""
    return state(rank, phase=phase, waits="", waits_s=0.0, bucket=-1, launched=0, **changes)


def account(told, *, rank=None, silent_s=0.0, process="S"):
    rank = told.rank if rank is None else rank
    return Account(Peer(rank, "hostA/1/1", 4700 + rank, 1), told, silent_s, process)


def text_of(accounts, *, hears=True, folder=None):
    return make_report(WAITED, judge(accounts, hears=hears), accounts, folder)[1]


def test_a_state_survives_its_journey():
    told = state(3, lacking=("a", "b"), phase=PassPhase.BACKWARD, queued=queue(8, "barrier"))
    assert WorkerState.unpack(told.pack()) == told


def test_who_does_not_wait_is_missing():
    accounts = [account(state(0)), account(away(1)), account(state(2))]
    assert (judge(accounts, hears=True).kind, judge(accounts, hears=True).missing) == (HangKind.ABSENT, (1,))
    text = text_of(accounts, folder=Path("run/hangs"))
    assert text.startswith(
        "lockstep: step 12 hangs since 5.0 s: worker 1 (pid 4701 on hostA) has not arrived.\n"
        "  waited for: bucket 3 of 7 (4.2 MB): 'h.2.fc.weight', 'h.2.fc.bias', 'h.1.fc.weight' and 1 more\n"
        "  worker 1: in the forward pass of step 12, or behind it without loss.backward() since 5.0 s, at train.py:57"
    )
    assert "run/hangs/worker-RANK.txt" in text and "what to do: look at the line" in text


def test_a_silent_worker_is_missing_even_if_it_waited_when_last_heard_of():
    accounts = [account(state(0)), account(state(1), silent_s=5.1, process="T")]
    assert judge(accounts, hears=True).missing == (1,)
    assert "worker 1: stopped (process state T); last heard of 5.1 s ago" in text_of(accounts)
    assert "kill -CONT" in text_of(accounts)


@pytest.mark.parametrize(
    ("process", "words"),
    [("R", "while it computes"), ("D", "cannot be interrupted"), ("", "on another host"), ("X", "worker 1: ended")],
)
def test_silence_is_explained_by_what_the_kernel_knows(process, words):
    assert words in text_of([account(state(0)), account(away(1), silent_s=5.1, process=process)])


def test_nothing_was_ever_heard_of_a_worker():
    accounts = [account(state(0)), account(None, rank=1)]
    assert judge(accounts, hears=True).missing == (1,)
    assert "worker 1: nothing heard of it" in text_of(accounts)


def test_the_minority_is_elsewhere():
    barrier = {"waits": "torch.distributed.barrier", "bucket": -1, "phase": PassPhase.BETWEEN, "launched": 0}
    accounts = [account(state(0)), account(state(1, **barrier)), account(state(2))]
    assert (judge(accounts, hears=True).kind, judge(accounts, hears=True).missing) == (HangKind.APART, (1,))
    assert "worker 1: waiting in torch.distributed.barrier since 5.0 s" in text_of(accounts)
    most = [account(state(0)), account(state(1, **barrier)), account(state(2, **barrier))]
    assert judge(most, hears=True).missing == (0,)


def test_of_two_the_one_that_has_come_less_far_is_named():
    barrier = {"waits": "torch.distributed.barrier", "bucket": -1, "phase": PassPhase.BETWEEN, "launched": 0}
    accounts = [account(state(0, **barrier)), account(state(1))]
    assert judge(accounts, hears=True).missing == (0,)
    equal = [account(state(0, **barrier)), account(state(1, **barrier | {"at": "train.py:60 in main"}))]
    assert judge(equal, hears=True).missing == (0, 1)
    assert "it cannot be told who is right" in text_of(equal)


def test_different_buckets_of_one_step_are_one_operation():
    accounts = [account(state(0)), account(state(1, bucket=4, waits="reducing bucket 4 of step 12"))]
    assert judge(accounts, hears=True).kind is HangKind.TOGETHER
    assert "all workers have arrived" in text_of(accounts)


def test_the_same_line_with_fewer_calls():
    same = {"waits": "torch.distributed.all_reduce", "phase": PassPhase.BETWEEN, "bucket": -1}
    accounts = [account(state(0, **same)), account(state(1, **same, calls={"0/cpu": 39}))]
    assert (judge(accounts, hears=True).kind, judge(accounts, hears=True).missing) == (HangKind.BEHIND, (1,))


def queue(*whats, first=30, at="train.py:9 in main"):
    """The last calls of a worker: names of collectives, or sizes of buckets."""
    after = [isinstance(what, int) for what in whats]
    return tuple(
        QueuedCall("0", first + place, f"all_reduce of {what} x float", "a bucket", sum(after[place + 1 :]))
        if isinstance(what, int)
        else QueuedCall("0", first + place, what, at, -1)
        for place, what in enumerate(whats)
    )


def test_the_first_call_that_was_not_the_same_tells_who_is_out_of_step():
    steps = (8, 4, "barrier", 8, 4, "barrier")
    reads = {"waits": "a read of what the device has not come to", "bucket": -1, "phase": PassPhase.BETWEEN}
    right = state(0, **reads, queued=queue(*steps, 8, 4, "barrier", 8))
    more = state(1, **reads, queued=queue(*steps, "gather", 8, 4, "barrier"))
    verdict = judge([account(right), account(more)], hears=True)
    assert (verdict.kind, verdict.missing) == (HangKind.APART, (1,))
    assert (
        "out of step: as collective 36 of their group, worker 1 called gather, at train.py:9 in main; "
        "worker 0 called all_reduce of 8 x float, at a bucket\n"
    ) in text_of([account(right), account(more)])
    less = state(1, **reads, queued=queue(*steps, 8, 4, 8, 4))
    assert judge([account(right), account(less)], hears=True).missing == (1,)
    ahead = state(1, **reads, queued=queue(*steps[2:], 8, 4, "barrier", 8, first=32))
    assert judge([account(right), account(ahead)], hears=True).kind is HangKind.TOGETHER


def test_without_a_precedent_nobody_is_named_alone_but_a_majority_counts():
    ways = [state(0, queued=queue("broadcast", 8)), state(1, queued=queue("broadcast", "gather"))]
    assert judge([account(way) for way in ways], hears=True).missing == (0, 1)
    ways.append(state(2, queued=queue("broadcast", "gather")))
    assert judge([account(way) for way in ways], hears=True).missing == (0,)


def test_what_torch_keeps_of_calls_is_read():
    frames = [
        {"filename": torch.__file__, "line": 3, "name": "all_reduce"},
        {"filename": "t.py", "line": 7, "name": "f"},
    ]
    sends = [{"filename": Bucket.launch.__code__.co_filename, "line": 40, "name": "launch"}]
    entry = {"process_group": ("0", "default_pg"), "collective_seq_id": 4, "is_p2p": False, "frames": frames}
    sized = {"profiling_name": "nccl:all_reduce", "input_sizes": [[2, 3]], "input_dtypes": ["Float"]}
    entries = [
        entry | sized,
        entry | sized | {"collective_seq_id": 5, "frames": sends},
        entry | sized | {"is_p2p": True},
        entry | {"profiling_name": "nccl:gather", "input_sizes": [[5]], "collective_seq_id": 6},
    ]
    kept = {"entries": entries, "pg_config": {"0": {"ranks": "[0, 1]"}}}
    assert parse_calls(kept) == [
        QueuedCall("0 of [0, 1]", 4, "all_reduce of 6 x float", "t.py:7 in f", -1),
        QueuedCall("0 of [0, 1]", 5, "all_reduce of 6 x float", "a bucket of gradients", 0),
        QueuedCall("0 of [0, 1]", 6, "gather", "t.py:7 in f", -1),
    ]


def test_without_the_store_only_this_host_is_known():
    accounts = [account(None, rank=0, process="T"), account(state(1)), account(None, rank=2, process="S")]
    assert judge(accounts, hears=False).missing == (0,)
    assert "does not answer. worker 0 (pid 4700 on hostA) is stopped or gone." in text_of(accounts, hears=False)


def test_a_worker_in_its_backward_pass_tells_what_lacks():
    told = away(1, PassPhase.BACKWARD, lacking=("h.1.fc.weight",), num_lacking=5)
    assert "its next bucket lacks the gradients of 'h.1.fc.weight' and 4 more" in text_of(
        [account(state(0)), account(told)]
    )


def test_a_report_of_many_workers_is_not_longer_than_a_page():
    accounts = [account(state(rank)) for rank in range(999)] + [account(away(999))]
    lines = text_of(accounts).splitlines()
    assert len(lines) < 40 and lines[2].startswith("  worker 999: in the forward pass")


def test_what_is_kept(tmp_path):
    accounts = [account(state(0)), account(away(1))]
    verdict = judge(accounts, hears=True)
    _, text = make_report(WAITED, verdict, accounts, None)
    HangWriter(tmp_path).report(text, {"step": 12, "missing": verdict.missing})
    kept = json.loads((tmp_path / "hang.json").read_text())
    assert (kept["step"], kept["missing"], kept["text"]) == (12, [1], text)
    assert abs(kept["time"] - time.time()) < 60


def look_while(block, release):
    """What another thread sees while this one is in `block`."""
    seen = []

    def look():
        give_up = time.monotonic() + 10
        while time.monotonic() < give_up and not (seen and seen[-1].awaits_work):
            seen.append(main_thread_spot())
        release()

    thread = threading.Thread(target=look)
    thread.start()
    block()
    thread.join()
    return seen[-1]


def test_a_wait_for_an_operation_is_seen_from_another_thread():
    future = torch.futures.Future()
    spot = look_while(lambda: future.wait(), lambda: future.set_result(None))
    assert spot.awaits_work and "test_hangs.py" in spot.at and not spot.collective


def test_a_wait_for_a_thread_of_the_script_is_none():
    done = threading.Event()
    threading.Timer(0.5, done.set).start()
    seen = []
    looker = threading.Thread(target=lambda: seen.extend(main_thread_spot() for _ in range(20)))
    looker.start()
    done.wait()
    looker.join()
    assert not any(spot.awaits_work for spot in seen)


def test_the_stacks_begin_with_the_main_thread():
    assert all_stacks().startswith("thread MainThread:\n")
    assert "test_the_stacks_begin_with_the_main_thread" in all_stacks()


def test_of_all_who_call_at_once_one_writes():
    store = dist.HashStore()
    posts = [Heartbeats(store, range(4), lambda answers, rank=rank: state(rank, answers=answers), 0.05)
             for rank in range(4)]  # fmt: skip
    try:
        for post in posts:
            post.start()
        for post in posts:
            post.call()
        give_up = time.monotonic() + 10
        while not all(len(post.states) == 4 and min(s.answers for s in post.states.values()) >= 1 for post in posts):
            assert time.monotonic() < give_up
            time.sleep(0.01)
        assert sum(post.claimed > 0 for post in posts) == 1
        assert not any(post.is_silent(1.0) for post in posts)
    finally:
        ended = [post.close() for post in posts]
        assert all(ended)


class Garbage:
    """Lets other threads run while it is collected, as tensors and groups do."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.0005)


def make_function(num_locals):
    """One that calls others in turn, `depth` deep; its frame has a size of its own."""
    names = ", ".join(f"v{i}" for i in range(num_locals))
    values = ", ".join(f"[depth, {i}]" for i in range(num_locals))
    calls = "depth and others[depth % 7](depth - 1, others) + v0[0]"
    scope = {}
    exec(f"def work(depth, others):\n  {names} = {values}\n  return {calls}", scope)
    return scope["work"]


def run_while_watched(seconds):
    """Calls and returns, while another thread looks where this one is and leaves garbage."""
    looks, is_over = [], threading.Event()

    def look():
        while not is_over.is_set():
            looks.append(main_thread_spot().depth)
            Garbage()

    gc.freeze()  # What the test run has made so far would be looked at in each collection.
    gc.set_threshold(30)
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=look)
    thread.start()
    functions = [make_function(num_locals) for num_locals in (2, 3, 4, 5, 7, 8, 11)]
    give_up, count = time.monotonic() + seconds, 0
    while time.monotonic() < give_up or len(looks) < 50:
        assert functions[count % 7](count % 61, functions) == sum(range(count % 61 + 1))
        count += 1
    is_over.set()
    thread.join()


def test_looking_at_a_thread_that_runs_does_it_no_harm():
    process = multiprocessing.get_context("fork").Process(target=run_while_watched, args=(1.5,))
    process.start()
    process.join(60)
    process.kill()  # Where it has hung.
    process.join()
    assert process.exitcode == 0
