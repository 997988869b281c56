"""Workers that are stuck over NCCL: the host waits for the end of the step, or blocks where it reads the device."""

import json
import multiprocessing
import os
import re
import signal
import socket
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORKERS, MARGIN_S, VICTIM, STEP = 2, 2.0, 1, 5
DEADLINE_S = {"apart": 12.0, "more": 12.0, "less": 12.0}
"""By fault, else 4: the lines of calls are known some seconds later."""


def train(environ, folder, fault):
    from lockstep.watching.hangs import Hangs

    os.environ.update(environ)
    os.dup2(os.open(folder / f"words-{environ['RANK']}", os.O_WRONLY | os.O_CREAT), 2)
    world = lockstep.join(seed=0, timeout=60)
    net = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4))).to(world.device)
    model = lockstep.DataParallel(net, bucket_cap_mb=0.1)
    total = torch.ones(1, device=world.device)
    dist.all_reduce(total)
    hangs = Hangs(world, model, folder, timedelta(seconds=DEADLINE_S.get(fault, 4.0)))
    hangs.start()
    for step in range(10):
        loss = model(torch.ones(2, 200, device=world.device)).square().mean()
        if fault == "less" and not (step == STEP and world.rank == VICTIM):
            dist.all_reduce(total)
        if step == STEP and world.rank == VICTIM:
            fail(fault, net)
        elif step == STEP and fault == "reading":
            dist.all_reduce(total)
            read(total)
        loss.backward()
        if fault in ("more", "less"):
            read(loss)
    hangs.close()


def fail(fault, net):
    if fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "looping":
        net[1].weight.register_hook(lambda grad: loop_without_end())
    elif fault in ("branched", "reading"):
        loop_without_end()
    elif fault == "apart":
        dist.barrier()
    elif fault == "more":
        dist.all_reduce(torch.ones(1, device="cuda"))


def loop_without_end():
    while True:
        time.sleep(0.01)


def read(total):
    return total.item()


@pytest.fixture
def hang(tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = []

    def hang(fault):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        for rank in range(WORKERS):
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": str(WORKERS),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(WORKERS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": "1",
                "NCCL_HOSTID": str(rank),  # Lets several workers share one GPU.
            }
            processes.append(context.Process(target=train, args=(environ, tmp_path, fault)))
            processes[-1].start()
        return await_report(tmp_path, processes, DEADLINE_S.get(fault, 4.0))

    yield hang
    for process in processes:
        process.kill()
        process.join()


def await_report(folder, processes, deadline_s):
    path = folder / "hangs" / "hang.json"
    give_up = time.monotonic() + 100
    while not path.exists():
        words = [(folder / f"words-{rank}") for rank in range(WORKERS)]
        said = "\n".join(word.read_text() for word in words if word.exists())
        assert time.monotonic() < give_up and processes[0].is_alive(), said
        time.sleep(0.05)
    report = json.loads(path.read_text())
    assert float(re.search(r"hangs since ([\d.]+) s", report["text"])[1]) <= deadline_s + MARGIN_S
    assert (report["missing"], report["step"]) == ([VICTIM], STEP), report["text"]
    return report


def test_a_stopped_worker(hang):
    report = hang("stopped")
    assert "worker 1: stopped (process state T)" in report["text"]
    assert "3.bias" in report["params"]


def test_a_loop_in_mid_backward(hang):
    report = hang("looping")
    assert "in the backward pass of step 5" in report["text"] and "in loop_without_end" in report["text"]
    assert any(name.startswith("1.") for name in report["params"])


def test_another_branch(hang):
    report = hang("branched")
    assert "in loop_without_end" in report["text"]
    assert "3.bias" in report["params"]


def test_a_host_that_reads_what_the_device_waits_for(hang):
    report = hang("reading")
    assert re.search(r"worker 0: waiting in a read of what the device has not come to .* in read", report["text"])
    assert "in loop_without_end" in report["text"]


def test_another_collective(hang):
    report = hang("apart")
    assert "in different operations" in report["text"]
    assert re.search(r"worker 1: waiting in torch\.distributed\.barrier since .* in fail", report["text"])
    assert report["params"] == ["3.bias"]


def test_one_collective_more(hang):
    report = hang("more")
    assert "in different operations" in report["text"]
    assert re.search(r"worker 1 called all_reduce of 1 x float, at \S+ in fail; worker 0 called", report["text"])
    assert "worker 0 called all_reduce of 224 x float, at a bucket of gradients" in report["text"]
    assert report["params"] == ["3.bias"]


def test_one_collective_less(hang):
    report = hang("less")
    assert "worker 1 called all_reduce of 224 x float, at a bucket of gradients; worker 0 called" in report["text"]
    assert re.search(r"worker 0 called all_reduce of 1 x float, at \S+ in train", report["text"])
    assert report["params"] == ["3.bias"]
