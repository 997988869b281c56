"""What backend shm does when workers disagree, die, leave or are late: it names them, and nobody waits for ever."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm import shm
from lockstep.errors import LockstepError, UsageError, WorkerLost


def group(timeout=30):
    shm.register()
    return dist.new_group(backend="shm", timeout=timedelta(seconds=timeout))


def disagree(world, kind):
    pg = group()
    dist.barrier(group=pg)
    tensor = torch.ones(10)
    with pytest.raises(UsageError) as raised:
        if world.rank == 0:
            dist.all_reduce(tensor, group=pg)
        elif kind == "collective":
            dist.broadcast(tensor, 0, group=pg)
        elif kind == "size":
            dist.all_reduce(torch.ones(11), group=pg)
        elif kind == "dtype":
            dist.all_reduce(tensor.double(), group=pg)
        else:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, group=pg)
    assert bool((tensor == 1).all())
    with pytest.raises(UsageError, match="broken by an earlier error"):
        dist.all_reduce(tensor, group=pg)
    with pytest.raises(LockstepError):
        dist.send(tensor, 1 - world.rank, group=pg)
    return str(raised.value)


@pytest.mark.parametrize(
    "kind, words",
    [("collective", "broadcast(10 x float32, root 0)"), ("size", "11 x"), ("dtype", "float64"), ("op", "MAX")],
)
def test_different_calls_are_an_error_on_every_worker(pool, kind, words):
    first, second = pool.run(2, disagree, kind)
    assert first == second
    assert "worker 0 all_reduce(10 x float32, SUM); worker 1" in first and words in first


def is_late(world):
    pg = group(timeout=1)
    dist.barrier(group=pg)
    if world.rank == 1:
        # Not in the group's call: what it is told comes with its next one.
        time.sleep(1.5)
    begin = time.monotonic()
    with pytest.raises(WorkerLost) as raised:
        dist.all_reduce(torch.ones(200_000), group=pg)
        dist.all_reduce(torch.ones(200_000), group=pg)
    assert time.monotonic() - begin < 10
    assert raised.value.ranks == (1,)
    return str(raised.value)


def test_who_is_late_is_named_at_the_deadline(pool):
    texts = pool.run(3, is_late)
    assert all("worker 1 (pid" in text and "did not come within 0:00:01" in text for text in texts), texts
    assert any("all_reduce(200000 x float32, SUM)" in text for text in texts)


def leaves(world):
    pg = group()
    dist.barrier(group=pg)
    if world.rank == 1:
        dist.destroy_process_group(pg)
        return ""
    with pytest.raises(WorkerLost, match=r"worker 1 .* left the group") as raised:
        dist.recv(torch.ones(2), 1, group=pg)
    return str(raised.value)


def test_who_left_is_named(pool):
    assert "recv" in pool.run(2, leaves)[0]


def dies(world, doing):
    pg = group()
    held = shm.allocate(pg, 1000, torch.float32)
    dist.barrier(group=pg)
    child = os.fork() if world.rank == 1 else -1
    del held
    if child == 0:
        os._exit(0)  # A forked child that ends is no loss to the group.
    if world.rank == 1:
        os.waitpid(child, 0)
    dist.all_reduce(torch.ones(3), group=pg)
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    work = None
    with pytest.raises(WorkerLost) as raised:
        if doing == "all_reduce":
            dist.all_reduce(torch.ones(3), group=pg)
        elif doing == "asynchronous":
            work = dist.all_reduce(torch.ones(3), group=pg, async_op=True)
            work.wait()
        elif doing == "send":
            dist.send(torch.ones(2_000_000), 1, group=pg)
        elif doing == "allocate":
            shm.allocate(pg, 1000, torch.float32)
        else:
            dist.recv(torch.ones(3), group=pg)
    assert work is None or (work.is_completed() and not work.is_success() and work.exception() is not None)
    return raised.value.ranks, time.monotonic() - begin


class Survivor(Pool):
    """Two workers, of which only the first answers."""

    def _collect(self, workers, deadline):
        return [self._workers[0][1].recv()]


@pytest.mark.parametrize("doing", ("all_reduce", "asynchronous", "send", "receive", "allocate"))
def test_a_killed_worker_is_named_within_two_seconds(doing):
    pool = Survivor(2)
    try:
        ((ranks, seconds),) = pool.run(2, dies, doing)
    finally:
        pool.stop()
    assert ranks == (1,)
    assert seconds < 2 + 3, "two seconds, and some for a busy machine"


def wrap(way, pg):
    """A model under torch's own DDP or FSDP2."""
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
    if way == "fsdp":
        return fully_shard(model, mesh=DeviceMesh.from_group(pg, "cpu"))
    options = {"static_graph": True} if way == "static_graph" else {}
    cap_mb = 25 if way == "power_sgd" else 0.3  # One bucket: see docs/shared_memory.md.
    model = DistributedDataParallel(model, process_group=pg, bucket_cap_mb=cap_mb, **options)
    if way == "hook":
        model.register_comm_hook(pg, default_hooks.allreduce_hook)
    elif way == "power_sgd":  # Whose callbacks start operations of their own, and wait for them.
        state = powerSGD_hook.PowerSGDState(pg, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif way == "builtin":
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return model


def torch_loses_a_worker(world, way):
    """A worker is killed at its sixth step; when and how the other one's step fails."""
    model = wrap(way, group())
    with pytest.raises(RuntimeError) as raised:
        for step in range(100):
            begin = time.monotonic()
            if step == 5 and world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.ones(4, 256)).sum().backward()
    return step, str(raised.value), time.monotonic() - begin


@pytest.mark.parametrize("way", ("default", "hook", "power_sgd", "builtin", "static_graph", "fsdp"))
def test_a_killed_worker_is_named_by_what_torch_wraps_too(way):
    pool = Survivor(2)
    try:
        ((step, text, seconds),) = pool.run(2, torch_loses_a_worker, way)
    finally:
        pool.stop()
    assert step == 5, text
    assert "worker 1 (pid" in text and "ended while this worker was in " in text
    assert seconds < 2 + 3, "two seconds, and some for a busy machine"


def leaves_and_ends(world):
    pg = group()
    dist.barrier(group=pg)
    if world.rank == 1:
        dist.destroy_process_group(pg)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(WorkerLost) as raised:
        dist.recv(torch.ones(2), 1, group=pg)
    return str(raised.value)


def test_who_left_before_it_ended_is_said_to_have_left():
    """It was often told of the loss of another, in another group: that one is to be looked for."""
    pool = Survivor(2)
    try:
        (text,) = pool.run(2, leaves_and_ends)
    finally:
        pool.stop()
    assert "worker 1 (pid" in text and "left the group" in text


def hold(world):
    pg = group()
    held = shm.allocate(pg, 1 << 20, torch.float32)
    held.fill_(1)
    dist.all_reduce(held, group=pg)
    maps = [line.split(maxsplit=5)[-1] for line in open("/proc/self/maps") if "lockstep" in line and "memfd" in line]
    listening = [line for line in open("/proc/net/unix") if "@" in line and len(line.rstrip().rpartition("@")[2]) == 32]
    return maps, listening


def test_no_file_has_a_name_and_no_socket_stays(pool):
    for maps, listening in pool.run(2, hold):
        assert maps and all("memfd:lockstep (deleted)" in name for name in maps)
        assert listening == []


def outlive(world):
    """A tensor may outlive its group."""
    pg = group()
    held = shm.allocate(pg, 1000, torch.float32)
    held.fill_(world.rank)
    dist.barrier(group=pg)
    dist.destroy_process_group(pg)
    del pg
    assert bool((held == world.rank).all())


def test_memory_outlives_the_group(pool):
    pool.run(2, outlive)
