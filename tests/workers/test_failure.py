"""Workers that die, stop or leave: the others end soon, naming them. These tests start processes of their own."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from amount import some
from processes import fork_context

import lockstep

BACKENDS = ["shm", "gloo"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def train(environ, words, backend, timeout, fault, victim, zero=0, cap_mb=0.1):
    """Worker: steps without end; the victim has its fault in step 5."""
    import torch

    os.environ.update(environ)
    errors = os.open(words, os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    torch.set_num_threads(1)
    world = lockstep.join(timeout=timeout, backend=backend)
    net = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    model = lockstep.DataParallel(net, bucket_cap_mb=cap_mb, optimizer=optimizer, zero=zero)
    for step in range(100000):
        loss = model(torch.ones(2, 200)).square().mean()
        if step == 5 and world.rank == victim:
            fail(fault, net)
        loss.backward()
        if zero:
            optimizer.step()


def fail(fault, net):
    if fault == "killed":
        net[1].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))  # In mid-backward.
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "left":
        sys.exit(0)
    elif fault == "raised":
        raise ValueError("the data is bad")


@pytest.fixture
def start(tmp_path):
    context = fork_context()
    processes = []

    def start(workers, *args):
        port = free_port()
        for rank in range(workers):
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": str(workers),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            }
            words = tmp_path / f"words-{rank}"
            processes.append(context.Process(target=train, args=(environ, str(words), *args)))
            processes[-1].start()
        return processes, [tmp_path / f"words-{rank}" for rank in range(workers)]

    yield start
    for process in processes:
        process.kill()
        process.join()


def wait_for_fault(process, fault):
    """Until the victim is gone, or stopped."""
    if fault != "stopped":
        process.join(60)
        assert not process.is_alive()
        return
    give_up = time.monotonic() + 60
    while open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < give_up
        time.sleep(0.01)


def last_words(processes, words, victim, fault, within_s):
    """The last line of each survivor, all of which must have ended in time."""
    wait_for_fault(processes[victim], fault)
    give_up = time.monotonic() + within_s
    lines = []
    for rank, process in enumerate(processes):
        if rank != victim:
            process.join(max(0.0, give_up - time.monotonic()))
            assert process.exitcode == 1, f"worker {rank} has not ended by itself"
            lines.append(words[rank].read_text().strip().splitlines()[-1])
    return lines


@pytest.mark.parametrize(
    ("fault", "victim", "backend"),
    some(
        [("killed", 0, "gloo"), ("killed", 2, "shm"), ("raised", 0, "shm"), ("left", 2, "gloo")],
        itertools.product(["killed", "raised", "left"], [0, 2], BACKENDS),
    ),
)
def test_a_dead_worker_ends_the_others_within_ten_seconds_by_name(start, fault, victim, backend):
    processes, words = start(3, backend, 600, fault, victim)
    for line in last_words(processes, words, victim, fault, within_s=10):
        assert line.startswith("lockstep.errors.WorkerLost")
        assert f"worker {victim} (pid {processes[victim].pid}" in line
        assert re.search(r"reducing bucket \d+ of step 5 \('\d\.(weight|bias)'", line)


@pytest.mark.parametrize(("backend", "zero"), [("gloo", 3)])
def test_the_same_where_something_is_split(start, backend, zero):
    processes, words = start(3, backend, 600, "killed", 1, zero)
    for line in last_words(processes, words, 1, "killed", within_s=10):
        assert line.startswith("lockstep.errors.WorkerLost")
        assert f"worker 1 (pid {processes[1].pid}" in line


@pytest.mark.parametrize(
    ("backend", "cap_mb"),  # One bucket is reduced by the thread that waits for it, over shared memory.
    some([("gloo", 0.1), ("shm", 25)], itertools.product(BACKENDS, [0.1, 25])),
)
def test_a_stopped_worker_is_named_at_the_deadline(start, backend, cap_mb):
    processes, words = start(3, backend, 2, "stopped", 1, 0, cap_mb)
    for line in last_words(processes, words, 1, "stopped", within_s=15):
        assert f"worker 1 (pid {processes[1].pid}" in line and "did not answer" in line


def test_missing_workers_are_named_when_joining():
    environ = os.environ | {
        "RANK": "0",
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    code = "import lockstep; lockstep.join(timeout=2)"
    result = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "missing: 1, 2" in result.stderr.splitlines()[-1]
