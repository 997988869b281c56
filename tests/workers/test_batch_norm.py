"""Batch norm over the workers' parts must equal plain batch norm on the whole batch, forward and backward."""

import numpy as np
import pytest
import torch
from torch import nn

import lockstep

SHAPES = {1: (5,), 2: (5, 3, 4), 3: (5, 2, 3, 2), 0: ()}
PLAIN = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def inputs(dims, size):
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(size, 6, *SHAPES[dims][1:], generator=generator, dtype=torch.double) * 3 + 100
    return x, torch.randn(x.shape, generator=generator, dtype=torch.double)


def normalise(norm, x, target, weight):
    """One step of two layers with a norm between; returns everything that could differ."""
    x = x.clone().requires_grad_()
    out = norm(x)
    loss = ((out - target) * torch.sigmoid(out)).square().flatten(1).mean(1)
    loss = loss.sum() / max(1, len(loss))
    weight(loss)
    return out.detach().numpy(), x.grad.numpy()


def state(norm):
    return {k: v.clone().numpy() for k, v in norm.state_dict().items()}


def build(dims, **kwargs):
    torch.manual_seed(0)
    norm = PLAIN[dims](6, **kwargs).double()
    if norm.affine:
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
    return nn.Sequential(norm)


def on_workers(world, dims, sizes, kwargs, how):
    net = lockstep.SyncBatchNorm.convert(build(dims, **kwargs))
    model = lockstep.DataParallel(net) if any(True for _ in net.parameters()) else net
    results = []
    for _ in range(2):
        net.zero_grad()
        x, target = inputs(dims, sum(sizes))
        start = sum(sizes[: world.rank])
        part = slice(start, start + sizes[world.rank])
        if how == "loader":
            weight = lockstep.weight.Weight(sizes[world.rank], sum(sizes))
            lockstep.weight.Walk(world.hand_outs).hand_out(weight, [])
            world.hand_outs.find([], trains=True)  # As a wrapped model does; this one may have nothing to wrap.
            backward = lambda loss: loss.backward()
        else:
            backward = lambda loss: lockstep.backward(loss, weight=sizes[world.rank])
        out, grad = normalise(model, x[part], target[part], backward)
        grads = [p.grad.numpy().copy() for p in net.parameters()]
        # A worker's own input gradient is of its own mean: bring it to that of the whole batch.
        results.append((out, grad * sizes[world.rank] / sum(sizes), grads, state(net)))
    world.hand_outs.find_none()
    net.eval()
    return results, net(x).detach().numpy()


@pytest.mark.parametrize("how", ["loader", "explicit"])
@pytest.mark.parametrize("sizes", [(4, 4), (5, 3, 1), (7, 0, 2)])
@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_equals_the_whole_batch(pool, dims, sizes, how):
    check(pool, dims, sizes, {}, how)


@pytest.mark.parametrize(
    "kwargs", [{"affine": False}, {"momentum": None}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.7}]
)
def test_options(pool, kwargs):
    check(pool, 2, (5, 2), kwargs, "loader")


def check(pool, dims, sizes, kwargs, how):
    net = build(dims, **kwargs)
    expected = []
    for _ in range(2):
        net.zero_grad()
        x, target = inputs(dims, sum(sizes))
        out, grad = normalise(net, x, target, lambda loss: loss.backward())
        expected.append((out, grad, [p.grad.numpy().copy() for p in net.parameters()], state(net)))
    net.eval()
    in_eval = net(x).detach().numpy()
    results = pool.run(len(sizes), on_workers, dims, sizes, kwargs, how)
    for step, (out, grad, grads, stats) in enumerate(expected):
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
        close(np.concatenate([own[step][0] for own, _ in results]), out)
        close(np.concatenate([own[step][1] for own, _ in results]), grad)
        for own, own_eval in results:
            for a, b in zip(own[step][2], grads, strict=True):
                close(a, b)
            assert own[step][3].keys() == stats.keys()
            for key in stats:
                close(own[step][3][key], stats[key])
            close(own_eval, in_eval)


def too_few(world):
    norm = lockstep.SyncBatchNorm(3)
    norm(torch.ones(1 - world.rank, 3))


def test_one_value_in_the_world_is_refused(pool):
    for ok, text in pool.run(2, too_few, expect_failure=True):
        assert not ok and "needs two or more" in text


def test_on_one_worker_it_is_plain_batch_norm():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.BatchNorm2d(4)))
    weight = plain[1].weight
    x = torch.randn(2, 3, 5, 5)
    expected = plain(x)
    plain[1].reset_running_stats()
    converted = lockstep.SyncBatchNorm.convert(plain)
    assert isinstance(converted[1], lockstep.SyncBatchNorm) and isinstance(converted[2][0], lockstep.SyncBatchNorm)
    assert converted[1].weight is weight
    assert torch.equal(converted(x), expected)
    lockstep.join().leave()
    with pytest.raises(lockstep.UsageError, match="two or more dimensions"):
        converted[1](torch.ones(3))


def half(world):
    torch.manual_seed(world.rank)
    norm = lockstep.SyncBatchNorm(4).bfloat16()
    x = torch.randn(8, 4, 3, dtype=torch.bfloat16, requires_grad=True)
    norm(x).float().square().mean().backward()
    return x.grad.dtype == torch.bfloat16 and bool(x.grad.isfinite().all())


def test_bf16(pool):
    assert pool.run(2, half) == [True, True]


class NormAct(nn.BatchNorm2d):
    """As timm's BatchNormAct2d."""

    def forward(self, input):
        return super().forward(input).relu()


class Marked(nn.BatchNorm2d):
    """Adds something to the forward pass of no one."""

    def __init__(self, num_features, mark):
        super().__init__(num_features)
        self.mark = mark

    def marked(self):
        return 2 * self.mark


def test_what_subclasses_add_is_kept_or_refused():
    plain = nn.Sequential(nn.BatchNorm2d(4), nn.Sequential(NormAct(4)))
    with pytest.raises(lockstep.UsageError, match=r"'1.0' is a NormAct, a batch norm with a forward pass of its own"):
        lockstep.SyncBatchNorm.convert(plain)
    assert type(plain[0]) is nn.BatchNorm2d, "nothing was replaced"
    marked = Marked(4, 3)
    marked.eval()
    net = lockstep.SyncBatchNorm.convert(nn.Sequential(marked))
    assert isinstance(net[0], lockstep.SyncBatchNorm) and isinstance(net[0], Marked)
    assert net[0].marked() == 6 and net[0].weight is marked.weight and not net[0].training
    assert lockstep.SyncBatchNorm.convert(net)[0] is net[0]
    lockstep.join().leave()
