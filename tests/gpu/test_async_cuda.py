"""Async on a GPU: gradients and parameters by way of pinned memory, updates in a stream of their own."""

import os

import pytest
import torch
from torch import nn

import lockstep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


class Counting(nn.Module):
    """Its gradients are sums of samples, whole numbers: what has been applied is known exactly."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000, 300))
        self.narrow = nn.Parameter(torch.zeros(50, dtype=torch.bfloat16))

    def forward(self, x):
        return x.sum() * self.weight.sum() + 0 * self.narrow.sum()


def count(staleness, optimizer):
    os.environ["NCCL_HOSTID"] = os.environ.get("RANK", "0")  # Workers share the device.
    world = lockstep.join(seed=0, timeout=60)
    net = Counting().to(world.device)
    optimizer = optimizer(net.parameters(), lr=1.0)
    trainer = lockstep.Trainer(
        net, optimizer, lambda model, x: model(x), shards=4, strategy=lockstep.Async(staleness=staleness)
    )
    samples = torch.arange(1.0, 81.0)
    worst = 0
    for batch in trainer.batches(samples, batch_size=8, epochs=2):
        worst = max(worst, trainer.step(batch).staleness)
    values = net.weight.detach().unique().tolist()
    state = trainer.state_dict()["tensors"]
    return worst, values, state["model/weight"].unique().tolist(), net.weight.is_cuda


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("staleness", [0, 4])
def test_every_update_is_applied_once(workers, staleness):
    for worst, values, saved, on_device in lockstep.launch(
        count, workers=workers, args=(staleness, torch.optim.SGD), timeout=120
    ):
        assert worst <= staleness and on_device
        assert values == saved == [-2.0 * 80 * 81 / 2]
