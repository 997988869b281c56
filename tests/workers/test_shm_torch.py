"""torch's own users of a process group run on backend shm as they are."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lockstep.comm import shm

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
STEPS = 4


def on_shm(world, function, *args):
    """Run `function` with torch's default group on shm."""
    store = world.peers.store
    dist.destroy_process_group()
    shm.register()
    dist.init_process_group("shm", store=dist.PrefixStore("shm", store), rank=world.rank, world_size=world.size)
    function(world, *args)
    dist.barrier()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 16, generator=generator), torch.randn(12, 4, generator=generator)


def train(model, optimizer, world=None):
    for step in range(STEPS):
        x, y = (part.chunk(world.size)[world.rank] if world else part for part in batch(step))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def expect_like_one(params):
    single = net()
    train(single, torch.optim.AdamW(single.parameters(), lr=0.01))
    for found, wanted in zip(params, single.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def ddp(world):
    model = DistributedDataParallel(net(), bucket_cap_mb=0.01)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), world)
    expect_like_one(model.parameters())
    model = DistributedDataParallel(net())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01), world)
    expect_like_one(model.parameters())


def ddp_options(world):
    for options in ({"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
        model = DistributedDataParallel(net(), bucket_cap_mb=0.01, **options)
        train(model, torch.optim.AdamW(model.parameters(), lr=0.01), world)
        expect_like_one(model.parameters())


def power_sgd(world):
    """Its hook starts a second message at the end of each first one, and waits for it there."""
    model = DistributedDataParallel(net(), bucket_cap_mb=25)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), world)
    mine = nn.utils.parameters_to_vector(model.parameters()).detach()
    everybodys = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everybodys, mine)
    assert all(torch.equal(theirs, mine) for theirs in everybodys)


def fsdp(world, folder):
    mesh = init_device_mesh("cpu", (world.size,))
    model = net()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), world)
    expect_like_one([param.full_tensor() for param in model.parameters()])
    saved = copy.deepcopy(model.state_dict())
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    for param in model.parameters():
        nn.init.zeros_(param)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    for name, value in model.state_dict().items():
        assert torch.equal(value.full_tensor(), saved[name].full_tensor()), name


def dtensor(world):
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(24.0 * world.size).view(4 * world.size, 6)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(sharded.redistribute(mesh, [Replicate()]).to_local(), whole)
    across = sharded.redistribute(mesh, [Shard(1)])
    assert torch.equal(across.full_tensor(), whole)
    partial = DTensor.from_local(whole.clone(), mesh, [Partial()])
    assert torch.equal(partial.redistribute(mesh, [Replicate()]).to_local(), whole * world.size)
    assert torch.equal(partial.redistribute(mesh, [Shard(0)]).full_tensor(), whole * world.size)


@pytest.mark.parametrize("workers", (2, 3))
def test_ddp_and_zero_redundancy_optimizer(pool, workers):
    pool.run(workers, on_shm, ddp)


@pytest.mark.parametrize("workers", (2, 3))
def test_ddp_as_it_may_be_set_up(pool, workers):
    pool.run(workers, on_shm, ddp_options)


def test_power_sgd(pool):
    pool.run(2, on_shm, power_sgd)


def test_fsdp_and_distributed_checkpoint(pool, tmp_path):
    pool.run(2, on_shm, fsdp, str(tmp_path))


@pytest.mark.parametrize("workers", (2, 3))
def test_dtensor(pool, workers):
    pool.run(workers, on_shm, dtensor)


TRAIN = """
import torch, lockstep
world = lockstep.join(timeout=40, backend="shm")
model = lockstep.DataParallel(torch.nn.Linear(3, 3))
model(torch.ones(1, 3) * (1 + world.rank)).sum().backward()
assert world.backend == "shm" and world.sum(1) == world.size
assert model.module.weight.grad[0, 0].item() == 1.5
"""


def test_lockstep_runs_on_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", str(script)]
    assert subprocess.run(command, timeout=90).returncode == 0


def with_uneven_batches(world):
    """Worker 0 has a batch more. What counts those who are still there is waited for in C++ alone."""
    model = DistributedDataParallel(net())
    x, y = batch(0)
    with model.join(divide_by_initial_world_size=False):
        for number in range(3 - world.rank):
            nn.functional.mse_loss(model(x), y).backward()
            grads = [param.grad.clone() for param in model.parameters()]
            model.zero_grad()
            assert all(torch.isfinite(grad).all() for grad in grads), number


def test_ddp_with_uneven_batches_by_the_number_of_those_left(pool):
    pool.run(2, on_shm, with_uneven_batches)
