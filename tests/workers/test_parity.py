"""The reference is always the same training on one worker, in plain torch."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from amount import some
from models import build, difference, optimizer_for, part_of, weights_of

import lockstep

STEPS = 20

BACKENDS = ["shm", "gloo"]


def batches(model, dtype, sizes):
    generator = torch.Generator().manual_seed(11)
    return [type(model).batch(size, generator, dtype) for size in sizes]


def reference(name, optimizer_name, dtype, sizes):
    net = build(name, dtype)
    optimizer = optimizer_for(optimizer_name, net.parameters())
    losses = []
    for x, y in batches(net, dtype, sizes):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return weights_of(net), losses


def train(world, name, optimizer_name, dtype, sizes):
    net = lockstep.SyncBatchNorm.convert(build(name, dtype, seed=3 + world.rank))
    # Small buckets, so that there are several, and weights that differ until the wrapper makes them equal.
    model = lockstep.DataParallel(net, bucket_cap_mb=0.002)
    optimizer = optimizer_for(optimizer_name, model.parameters())
    losses = []
    for batch in batches(net, dtype, sizes):
        x, y = part_of(batch, world)
        loss = F.cross_entropy(model(x), y)
        lockstep.backward(loss, weight=len(x))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(world.mean(loss.item(), weight=len(x)))
    return weights_of(net), losses


@pytest.mark.parametrize(
    ("name", "optimizer", "workers"),
    some(
        [("mlp", "sgd", 2), ("cnn", "adamw", 3), ("gpt", "sgd", 4)],
        itertools.product(["mlp", "cnn", "gpt"], ["sgd", "adamw"], [2, 3, 4]),
    ),
)
def test_twenty_steps_equal_one_worker(pool, name, optimizer, workers):
    sizes = [10 if step % 5 else 7 for step in range(STEPS)]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        weights, losses = reference(name, optimizer, dtype, sizes)
        results = pool.run(workers, train, name, optimizer, dtype, sizes)
        for own_weights, own_losses in results:
            assert difference(own_weights, weights) < tolerance
            assert own_losses == pytest.approx(losses, rel=tolerance)
        for own_weights, _ in results[1:]:  # Replicas are equal to the bit.
            assert all(np.array_equal(own_weights[k], results[0][0][k]) for k in own_weights)
