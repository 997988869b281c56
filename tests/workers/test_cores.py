"""Where every core computes nothing leaves before the end of the pass, and the bits are those of leaving early."""

import pytest
import torch
from crowded import crowded
from torch import nn

import lockstep

BACKENDS = ["shm"]
LAYERS = 6
"""Of 1 MB each: more than a first bucket, and more than a last one that carries the notes."""


def wrap_and_train(world, num_threads, zero, cap_mb, layers):
    """On as many cores as there are workers: the slots of each bucket, how many left early, the weights."""
    with crowded(world, num_threads):
        torch.manual_seed(1)
        net = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, bucket_cap_mb=cap_mb)
        num_early = _train(world, model, optimizer)
        with model.whole_params():
            weights = torch.cat([param.detach().flatten().clone() for param in net.parameters()])
        return [len(bucket.plan.slots) for bucket in model._engine.reducer.buckets], num_early, weights


def _train(world, model, optimizer):
    generator, num_early = torch.Generator().manual_seed(world.rank), []
    first = model.module[0].weight  # Its gradient is the last.
    first.register_hook(lambda grad: num_early.append(model._engine.reducer.progress().num_launched))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 512, generator=generator)).square().mean().backward()
        optimizer.step()
    return num_early[-1]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_nothing_leaves_early_where_every_core_computes(pool, zero):
    late = pool.run(2, wrap_and_train, 1, zero, None, LAYERS)
    early = pool.run(2, wrap_and_train, 1, zero, 1, LAYERS)
    for (slots, num_early, weights), (_, num_early_cut, weights_cut) in zip(late, early, strict=True):
        assert slots == ([LAYERS] if zero == 0 else [LAYERS, 0])
        assert num_early == 0
        assert num_early_cut > 0, "a cap that was asked for counts"
        assert torch.equal(weights, weights_cut)


@pytest.mark.parametrize("zero", [0, 3])
def test_buckets_leave_early_beside_several_threads(pool, zero):
    for slots, num_early, _ in pool.run(2, wrap_and_train, 2, zero, None, LAYERS):
        assert slots[:2] == [1, LAYERS - 1], "the first one is small"
        assert num_early > 0


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_small_last_bucket_carries_the_notes(pool, zero):
    for slots, _, weights in pool.run(2, wrap_and_train, 1, zero, None, 3):
        assert slots == [3]
        assert torch.equal(weights, pool.run(2, wrap_and_train, 1, 0, None, 3)[0][2])
