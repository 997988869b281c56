"""Watched steps on a GPU: times are the device's, add up, and name the slow worker; nothing changes a bit."""

import json
import os
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CYCLES_PER_S = 1.5e9
"""About what a GPU's clock makes."""


class Slowed(nn.Module):
    """Takes its time on worker 1: the host's, or the device's."""

    def __init__(self, rank, host_s, device_s):
        super().__init__()
        self.host_s, self.device_s = (host_s, device_s) if rank == 1 else (0.0, 0.0)

    def forward(self, x):
        time.sleep(self.host_s)
        if self.device_s:
            torch.cuda._sleep(int(self.device_s * CYCLES_PER_S))
        return x


def train(folder, steps, host_s=0.0, device_s=0.0):
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_HOSTID=os.environ.get("RANK", "0"))
    world = lockstep.join(seed=0, timeout=120)
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(256, 1024),
        Slowed(world.rank, host_s, device_s),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.Linear(1024, 10),
    ).to(world.device)
    model = lockstep.DataParallel(net, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    watcher = lockstep.watch(model, folder, progress=False) if folder else None
    for number in range(steps):
        x = torch.full((16, 256), number / steps, device=world.device)
        loss = F.cross_entropy(model(x), torch.full((16,), number % 10, device=world.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if watcher is not None:
            watcher.log(loss=loss)
    if watcher is not None:
        watcher.close()
    said = watcher.verdict() if watcher is not None else None
    return said, [param.detach().cpu() for param in net.parameters()]


@pytest.mark.parametrize("workers", [1, 2])
def test_shares_add_up(tmp_path, workers):
    watched = lockstep.launch(train, workers=workers, args=(str(tmp_path), 30))
    unwatched = lockstep.launch(train, workers=workers, args=(None, 30))
    assert all(map(torch.equal, watched[0][1], unwatched[0][1]))
    steps = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert len(steps) == 30 and steps[-1]["loss"] > 0
    for step in steps:
        for worker in step["workers"]:
            assert sum(worker["shares_ms"].values()) == pytest.approx(worker["wall_ms"], rel=0.03)
            assert worker["shares_ms"]["forward"] > 0 and worker["shares_ms"]["backward"] > 0


@pytest.mark.parametrize("where", [(0.1, 0.0), (0.0, 0.1)], ids=["host", "device"])
def test_straggler_is_named(tmp_path, where):
    for verdict, _ in lockstep.launch(train, workers=2, args=(str(tmp_path), 30, *where)):
        assert verdict.startswith("worker 1 holds everyone up") and verdict.endswith("in the forward pass")
