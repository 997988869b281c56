"""Workers that are stuck: a report says in time who, where and for which parameters. All of them hang at once."""

import ctypes
import json
import os
import re
import signal
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from amount import some
from processes import fork_context, wait_until

import lockstep

WORKERS, DEADLINE_S, MARGIN_S, VICTIM, STEP = 3, 2.0, 2.0, 1, 5

FAULTS = ["stopped", "looping", "frozen", "branched", "apart", "serving"]
"""What happens to the victim, each in a world of its own."""
EVERYWHERE = [(fault, backend) for fault in FAULTS for backend in ("shm", "gloo")]
SELECTION = [
    ("stopped", "gloo"), ("looping", "shm"), ("frozen", "gloo"), ("branched", "shm"), ("apart", "gloo"),
]  # fmt: skip
"""Not `serving`: its workers end at their deadline, which must leave time to start eighteen processes on two cores."""


def train(environ, folder, backend, fault, victim):
    """Worker: ten steps; the victim has its fault in step 5."""
    import torch
    import torch.distributed as dist

    from lockstep.watching.hangs import Hangs

    os.environ.update(environ)
    os.dup2(os.open(folder / f"words-{environ['RANK']}", os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    world = lockstep.join(timeout=20 if fault == "serving" else 40, backend=backend)
    net = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
    model = lockstep.DataParallel(net, bucket_cap_mb=0.1)
    hangs = Hangs(world, model, folder, timedelta(seconds=DEADLINE_S))
    hangs.start()
    for step in range(10):
        loss = model(torch.ones(2, 200)).square().mean()
        if step == STEP and world.rank == victim:
            fail(fault, net, dist)
        loss.backward()
    hangs.close()


def fail(fault, net, dist):
    if fault in ("stopped", "serving"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "looping":
        net[1].weight.register_hook(lambda grad: loop_without_end())
    elif fault == "frozen":
        ctypes.PyDLL(None).sleep(1000)  # A foreign call that keeps the interpreter's lock.
    elif fault == "branched":
        evaluate_without_end()
    elif fault == "apart":
        dist.barrier()


def loop_without_end():
    while True:
        pass


def evaluate_without_end():
    while True:
        time.sleep(0.01)


@dataclass
class Hung:
    """A world that hangs, and where it reports to."""

    folder: Path
    processes: list

    @property
    def report_path(self):
        return self.folder / "hangs" / "hang.json"

    def report(self):
        wait_until(self.report_path.exists, "a report")
        return json.loads(self.report_path.read_text())

    def words(self, rank):
        return (self.folder / f"words-{rank}").read_text()

    def await_stack(self, rank, place, *, is_printed=True):
        """Until the worker has written, and printed, that it is there: it may do so after the report."""
        stacks = self.folder / "hangs" / f"worker-{rank}.txt"
        wait_until(lambda: place in stacks.read_text(), f"the stack of worker {rank}")
        if is_printed:
            wait_until(lambda: place in self.words(rank), f"worker {rank} to print its stack")

    def end(self):
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    context = fork_context()
    worlds = {}
    for fault, backend in some(SELECTION, EVERYWHERE):
        folder = tmp_path_factory.mktemp(f"{fault}-{backend}")
        worlds[fault, backend] = Hung(folder, start(context, folder, backend, fault))
    yield worlds
    for world in worlds.values():
        world.end()


def start(context, folder, backend, fault):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    victim = 0 if fault == "serving" else VICTIM  # Worker 0 serves the store: without it, nobody can be asked anything.
    processes = []
    for rank in range(WORKERS):
        environ = {
            "RANK": str(rank),
            "WORLD_SIZE": str(WORKERS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        processes.append(context.Process(target=train, args=(environ, folder, backend, fault, victim)))
        processes[-1].start()
    return processes


def check(world, report, victim=VICTIM):
    """What every report has to say, and when."""
    words = [world.words(rank) for rank in range(WORKERS)]
    assert min(map(float, re.findall(r"hangs since ([\d.]+) s", "".join(words)))) <= DEADLINE_S + MARGIN_S
    assert any(report["text"] in printed for printed in words)
    assert report["missing"] == [victim]
    assert report["step"] == STEP
    assert f"worker {victim} (pid {world.processes[victim].pid} on" in report["text"]
    for rank in range(WORKERS):
        if rank != victim:
            world.await_stack(rank, "in backward")


def backends(fault):
    return [backend for found, backend in some(SELECTION, EVERYWHERE) if found == fault]


@pytest.mark.parametrize("backend", backends("stopped"))
def test_a_stopped_worker_is_named_and_may_go_on(hung, backend):
    world = hung["stopped", backend]
    report = world.report()
    check(world, report)
    assert "worker 1: stopped (process state T)" in report["text"]
    assert (report["bucket"], report["params"]) == (0, ["3.bias"])
    os.kill(world.processes[VICTIM].pid, signal.SIGCONT)
    for process in world.processes:  # A report is a warning: nothing was ended by it.
        process.join(30)
        assert process.exitcode == 0


@pytest.mark.parametrize("backend", backends("looping"))
def test_a_loop_in_mid_backward_is_named_with_the_gradients_that_lack(hung, backend):
    world = hung["looping", backend]
    report = world.report()
    check(world, report)
    assert report["params"] == ["1.weight"]
    assert "in the backward pass of step 5, 5 of 8 buckets sent" in report["text"]
    assert "in loop_without_end" in report["text"] and "lacks the gradients of '1.weight'" in report["text"]
    world.await_stack(VICTIM, "in loop_without_end")
    world.end()  # Since it keeps a core busy.


@pytest.mark.parametrize("backend", backends("frozen"))
def test_native_code_with_the_lock_has_its_stack_written_from_outside(hung, backend):
    world = hung["frozen", backend]
    report = world.report()
    check(world, report)
    assert "worker 1: frozen: no heartbeat for" in report["text"] and "process state S" in report["text"]
    assert report["params"] == ["3.bias"]
    world.await_stack(VICTIM, "in fail", is_printed=False)


@pytest.mark.parametrize("backend", backends("branched"))
def test_a_worker_that_took_another_branch_is_named_with_its_line(hung, backend):
    world = hung["branched", backend]
    report = world.report()
    check(world, report)
    assert "worker 1: in the forward pass of step 5, or behind it without loss.backward()" in report["text"]
    assert "in evaluate_without_end" in report["text"]
    world.await_stack(VICTIM, "in evaluate_without_end")
    assert report["params"] == ["3.bias"]


@pytest.mark.parametrize("backend", backends("apart"))
def test_a_worker_in_another_collective_is_the_odd_one(hung, backend):
    world = hung["apart", backend]
    report = world.report()
    check(world, report)
    assert "in different operations" in report["text"]
    assert re.search(r"worker 1: waiting in torch\.distributed\.barrier since .* in fail", report["text"])
    assert report["params"] == ["3.bias"]


def slow(world, folder):
    """A run with a step of a second and a half on one worker, and watched waits of torch.distributed's own."""
    import torch
    import torch.distributed as dist

    from lockstep.watching.hangs import Hangs

    model = lockstep.DataParallel(torch.nn.Linear(4, 4))
    hangs = Hangs(world, model, Path(folder), timedelta(seconds=4))
    hangs.start()
    begun = time.monotonic()
    for step in range(4):
        if step == 2 and world.rank == 1:
            time.sleep(1.5)
        model(torch.ones(2, 4)).sum().backward()
        dist.all_reduce(torch.ones(1))
    hangs.close()
    world.barrier()
    return time.monotonic() - begun


def test_a_slow_but_healthy_run_reports_nothing(started_pool, tmp_path):
    assert all(took > 1.4 for took in started_pool.run(2, slow, str(tmp_path)))
    assert not (tmp_path / "hangs").exists()


def stuck(world, folder):
    """One worker never comes to the sum; the other's error says what was found of it."""
    import torch

    from lockstep.watching.hangs import Hangs

    model = lockstep.DataParallel(torch.nn.Linear(4, 4))
    hangs = Hangs(world, model, None, timedelta(seconds=1))
    hangs.start()
    has_failed = Path(folder) / "failed"
    try:
        if world.rank == 0:
            return evaluate_until(has_failed)
        world.sum(1)
    except lockstep.WorkerLost as error:
        has_failed.touch()
        return str(error)
    finally:
        hangs.close()


def evaluate_until(path):
    while not path.exists():
        time.sleep(0.01)


def test_the_error_at_the_deadline_tells_what_the_watch_found(started_pool, tmp_path):
    said = started_pool.run(2, stuck, str(tmp_path), timeout=3, backend="shm")[1]
    assert "worker 0 (pid" in said and "What the watch found:" in said and "in evaluate_until" in said


@pytest.mark.parametrize("backend", backends("serving"))
def test_a_stopped_worker_that_serves_the_store_is_named_too_and_ends_the_others_at_their_deadline(hung, backend):
    world = hung["serving", backend]
    report = world.report()
    check(world, report, victim=0)
    assert "the place where the workers met does not answer" in report["text"]
    assert "worker 0: stopped (process state T)" in report["text"]
    assert report["params"] == ["3.bias"]
    for rank in (1, 2):
        world.processes[rank].join(40)
        assert world.processes[rank].exitcode == 1
        last = world.words(rank).strip().splitlines()[-1]
        assert last.startswith("lockstep.errors.WorkerLost") and f"worker 0 (pid {world.processes[0].pid} on" in last
