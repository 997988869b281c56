"""On a CUDA device: a real NCCL world of two (sharing the device if there is one), against plain torch on one worker.

python -m pytest tests/gpu -m gpu
"""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = "cuda"


def join():
    """A worker's place in an NCCL world whose workers may share one GPU."""
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    if int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count():
        os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    torch.use_deterministic_algorithms(False)
    return lockstep.join(seed=0, timeout=60)


def build(kind):
    torch.manual_seed(3)
    if kind == "cnn":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)
        ).double()
    return nn.Sequential(nn.Linear(192, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 5)).double()


def batches(kind):
    generator = torch.Generator().manual_seed(5)
    shape = (7, 3, 8, 8) if kind == "cnn" else (7, 192)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.double), torch.randint(5, (7,), generator=generator))
        for _ in range(10)
    ]


def reference(kind):
    net = build(kind).to(CUDA)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches(kind):
        F.cross_entropy(net(x.to(CUDA)), y.to(CUDA)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in net.state_dict().values()]


def train(kind, weight_is_on_gpu):
    world = join()
    assert world.backend == "nccl" and world.device.type == "cuda"
    net = lockstep.SyncBatchNorm.convert(build(kind)).to(world.device)
    model = lockstep.DataParallel(net, bucket_cap_mb=0.05)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for x, y in batches(kind):
        part = slice(0, 4) if world.rank == 0 else slice(4, 7)
        x, y = x[part].to(world.device), y[part].to(world.device)
        loss = F.cross_entropy(model(x), y)
        weight = torch.tensor(len(x), device=world.device) if weight_is_on_gpu else len(x)
        lockstep.backward(loss, weight=weight)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in net.state_dict().values()]


@pytest.mark.parametrize("weight_is_on_gpu", [False, True])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_equals_one_worker(kind, weight_is_on_gpu):
    expected = reference(kind)
    # A weight on the device is kept in float32.
    tolerance = 1e-6 if weight_is_on_gpu else 1e-10
    results = lockstep.launch(train, workers=2, args=(kind, weight_is_on_gpu))
    for weights in results:
        for own, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, chosen, fails=False):
        x = self.stem(x)
        x = Fails.apply(x) if fails else x
        for number in chosen:
            x = self.branches[number](x)
        return x


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("half-way")


def irregular():
    """Branches that differ per worker, one unfrozen later, half gradients, sparse ones, a pass that fails."""
    world = join()
    net = Branches().to(world.device)
    net.branches[1].requires_grad_(False)
    model = lockstep.DataParallel(net, bucket_cap_mb=0.0001)
    x = torch.full((2, 8), 1.0 + world.rank, device=world.device)
    model(x, [0] if world.rank else []).square().mean().backward()
    used = [p.grad is not None for p in net.parameters()]
    net.branches[1].requires_grad_(True)
    net.zero_grad()
    model(x, [1]).square().mean().backward()
    unfrozen = net.branches[1].weight.grad.sum().item()
    outcome = "none"
    try:
        model(x, [2], fails=world.rank == 1).square().mean().backward()
    except ArithmeticError:
        outcome = "failed"
    except lockstep.StepVoid:
        outcome = "void"
    net.zero_grad()
    model(x, [0, 1, 2]).square().mean().backward()
    half = lockstep.DataParallel(nn.Linear(8, 8).to(world.device, torch.bfloat16))
    half(x.bfloat16()).float().square().mean().backward()
    table = lockstep.DataParallel(nn.Embedding(50, 4, sparse=True).to(world.device))
    table(torch.tensor([world.rank, 7], device=world.device)).sum().backward()
    grads = [p.grad.float().sum().item() for m in (net, half.module) for p in m.parameters()]
    return used, unfrozen, outcome, grads, table.module.weight.grad.to_dense()[:, 0].cpu().nonzero().flatten().tolist()


def test_irregular_passes():
    (used0, unfrozen0, outcome0, grads0, rows0), (used1, unfrozen1, outcome1, grads1, rows1) = lockstep.launch(
        irregular, workers=2
    )
    assert used0 == used1 == [True] * 4 + [False] * 4
    assert unfrozen0 == unfrozen1 != 0
    assert (outcome0, outcome1) == ("void", "failed")
    assert grads0 == grads1
    assert rows0 == rows1 == [0, 1, 7]


def half_precision_training():
    world = join()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(world.device)
    model = torch.compile(lockstep.DataParallel(net))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda")
    losses = []
    for _ in range(20):
        x = torch.randn(32, 64, device=world.device)
        with torch.autocast("cuda", torch.float16):
            loss = (model(x) - x.mean(1, keepdim=True)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(world.mean(loss.detach()).item())
    return losses, [p.detach().cpu() for p in net.parameters()]


def test_autocast_compile_and_scaler():
    (losses, first), (again, second) = lockstep.launch(half_precision_training, workers=2)
    assert losses == again and losses[-1] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def alone():
    world = lockstep.join()
    net = nn.Linear(4, 4).to(world.device)
    model = lockstep.DataParallel(net)
    lockstep.backward(model(torch.ones(2, 4, device=world.device)).sum(), weight=2)
    return (
        str(world.device),
        world.backend,
        net.weight.grad.is_cuda,
        world.sum(torch.ones(1, device=world.device)).item(),
    )


def test_a_world_of_one():
    assert lockstep.launch(alone, workers=1) == [("cuda:0", "nccl", True, 1.0)]
