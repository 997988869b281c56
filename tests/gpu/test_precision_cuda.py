"""Master weights and optimizers that look at whole tensors, in bfloat16 on a CUDA device, over NCCL."""

import itertools

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

PARTS = (slice(0, 5), slice(5, 8))


def build():
    torch.manual_seed(3)
    layers = [nn.Linear(32, 64), *(nn.Sequential(nn.GELU(), nn.Linear(64, 64)) for _ in range(3)), nn.Linear(64, 5)]
    return nn.Sequential(*layers).to(CUDA)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 32, generator=generator), torch.randint(5, (8,), generator=generator)
    return x.to(CUDA), y.to(CUDA)


def loss_of(net, x, y):
    return F.cross_entropy(net(x.bfloat16()).float(), y)


def by_hand():
    """Each part's gradients in bfloat16, added in float32, updating float32 masters that the model is rounded from."""
    net = build()
    masters = [p.detach().clone() for p in net.parameters()]
    net.bfloat16()
    optimizer = torch.optim.SGD(masters, lr=0.05, momentum=0.9)
    for step in range(12):
        x, y = batch(step)
        for master in masters:
            master.grad = torch.zeros_like(master)
        for part in PARTS:
            net.zero_grad()
            loss_of(net, x[part], y[part]).backward()
            for master, param in zip(masters, net.parameters(), strict=True):
                master.grad += param.grad.float() * (len(x[part]) / len(x))
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, net.parameters(), strict=True):
                param.copy_(master)
    return [master.cpu() for master in masters]


def with_masters(zero):
    world = join()
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, precision=lockstep.Precision())
    for step in range(12):
        x, y = (each[PARTS[world.rank]] for each in batch(step))
        lockstep.backward(loss_of(model, x, y), weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
    dtypes = {param.dtype for param in net.parameters()}
    owned = [(part.own.dtype, part.own.cpu()) for part in model._engine.parts]
    names = {param: number for number, param in enumerate(net.parameters())}
    places = [(names[part.param], part.offset) for part in model._engine.parts]
    return dtypes, owned, places


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_bfloat16_with_float32_masters(zero):
    expected = by_hand()
    found = [torch.zeros_like(each).view(-1) for each in expected]
    for dtypes, owned, places in lockstep.launch(with_masters, workers=2, args=(zero,)):
        assert dtypes == {torch.bfloat16}
        for (dtype, own), (number, offset) in zip(owned, places, strict=True):
            assert dtype is torch.float32
            found[number][offset : offset + own.numel()] = own.view(-1)
    for got, wanted in zip(found, expected, strict=True):
        # The same but for parameters that are rounded to the other side.
        torch.testing.assert_close(got.view_as(wanted), wanted, rtol=1e-3, atol=1e-4)


def with_muon():
    world = join()
    results = {}
    for zero in (0, 1, 2, 3):
        torch.manual_seed(3)
        sizes = [32, 64, 48, 64, 5]
        layers = [nn.Linear(*two, bias=False) for two in itertools.pairwise(sizes)]
        net = nn.Sequential(*layers).to(CUDA)
        start = [p.detach().clone() for p in net.parameters()]
        optimizer = torch.optim.Muon(net.parameters(), lr=1e-2)
        model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, bucket_cap_mb=0.02)
        for step in range(6):
            x, y = (each[PARTS[world.rank]] for each in batch(step))
            lockstep.backward(F.cross_entropy(model(x), y), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
        results[zero] = [value.cpu() for value in model.state_dict().values()]
        assert all(not torch.equal(was.cpu(), now) for was, now in zip(start, results[zero], strict=True))
    return results


def test_muon_gives_the_same_weights_at_every_stage():
    for results in lockstep.launch(with_muon, workers=2):
        for zero in (1, 2, 3):
            for got, expected in zip(results[zero], results[0], strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
