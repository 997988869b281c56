"""Every stage of splitting on a CUDA device, over NCCL: the same weights as with nothing split."""

import contextlib
import random

import pytest
import torch
import torch.nn.functional as F
from test_cuda import CUDA, join
from torch import nn

import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))

    def forward(self, x):
        return x + self.layers(x)


def begin(zero, name="AdamW"):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(20, 48), nn.Sequential(*(Block() for _ in range(3))), nn.Linear(48, 5)).double()
    net = net.to(CUDA)
    kind = getattr(torch.optim, name)
    options = {"fused": True} if name == "AdamW" else {}
    optimizer = kind([{"params": [p for p in net.parameters() if p.dim() > 1]}, {"params": [
        p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0}], lr=1e-2, **options)  # fmt: skip
    return lockstep.DataParallel(net, optimizer=optimizer, zero=zero, bucket_cap_mb=0.02), optimizer


def go_on(world, model, optimizer, first, last):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(7, 20, generator=generator, dtype=torch.double)
        y = torch.randint(5, (7,), generator=generator)
        part = slice(0, 4) if world.rank == 0 else slice(4, 7)
        loss = F.cross_entropy(model(x[part].to(CUDA)), y[part].to(CUDA))
        lockstep.backward(loss, weight=len(x[part]))
        model.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def train(name, folder):
    world = join()
    results = {}
    for zero in (0, 1, 2, 3):
        model, optimizer = begin(zero, name)
        go_on(world, model, optimizer, 0, 6)
        if zero == 3:
            lockstep.save(folder, model, optimizer, step=6)
        go_on(world, model, optimizer, 6, 10)
        results[zero] = [value.cpu() for value in model.state_dict().values()]
    model, optimizer = begin(2, name)
    lockstep.load(folder, model, optimizer)
    go_on(world, model, optimizer, 6, 10)
    results["resumed"] = [value.cpu() for value in model.state_dict().values()]
    return results


@pytest.mark.parametrize("name", ["AdamW", "Adagrad", "Adafactor"])
def test_every_stage_gives_the_same_weights(name, tmp_path):
    for results in lockstep.launch(train, workers=2, args=(name, str(tmp_path))):
        for stage, weights in results.items():
            for got, expected in zip(weights, results[0], strict=True):
                assert torch.allclose(got, expected, rtol=1e-12, atol=1e-13), stage


class Routed(nn.Module):
    """Runs the blocks that it is told to run."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(48))
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, path):
        for number in path:
            x = self.experts[number](x)
        return x * self.scale


def routed():
    """Workers run different blocks, in different orders, and evaluate differently often."""
    world = join()
    results = {}
    for zero in (0, 3):
        torch.manual_seed(3)
        net = Routed().double().to(CUDA)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
        for step in range(8):
            dice = random.Random(10 * step + world.rank)
            for is_last in (False, True):
                with contextlib.nullcontext() if is_last else model.no_sync():
                    path = [dice.randrange(4) for _ in range(dice.randrange(5))]
                    generator = torch.Generator().manual_seed(10 * step + world.rank)
                    x = torch.randn(3, 48, generator=generator, dtype=torch.double).to(CUDA)
                    model(x, path).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for _ in range(world.rank):
                    model(x, [step % 4])
            assert world.sum(1) == world.size
        results[zero] = [value.cpu() for value in model.state_dict().values()]
    return results


def test_workers_may_run_different_blocks():
    for results in lockstep.launch(routed, workers=2):
        for got, expected in zip(results[3], results[0], strict=True):
            assert torch.allclose(got, expected, rtol=1e-12, atol=1e-13)
