"""The three lines, as users write them: a sharded loader, plain `loss.backward()`, evaluation over the workers."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import build, difference, weights_of
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def dataset(name, size):
    generator = torch.Generator().manual_seed(21)
    return TensorDataset(*type(build(name)).batch(size, generator, torch.double))


def train(world, name, size, batch_size, accumulate=1):
    """Two epochs, shuffled; the last batch is short, so that some parts are uneven or empty."""
    net = lockstep.SyncBatchNorm.convert(build(name, torch.double))
    model = lockstep.DataParallel(net, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    loader = lockstep.shard(DataLoader(dataset(name, size), batch_size=batch_size, shuffle=True))
    seen, sizes = [], []
    for _ in range(2):
        for number, (x, y) in enumerate(loader):
            last = (number + 1) % accumulate == 0 or number + 1 == len(loader)
            with torch.enable_grad() if last else model.no_sync():
                (F.cross_entropy(model(x), y) / accumulate).backward()
            if last:
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
            seen += x.flatten(1)[:, 0].tolist()
            sizes.append(len(x))
    assert world.weight is None
    return weights_of(net), world.gather(seen), sizes, evaluate(world, model, name, size)


def evaluate(world, model, name, size):
    loader = lockstep.shard(DataLoader(dataset(name, size), batch_size=8))
    model.eval()
    right, loss, count = 0, 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            out = model(x)
            right += int((out.argmax(1) == y).sum())
            loss += F.cross_entropy(out, y, reduction="sum").item() if len(x) else 0.0
            count += y.numel()
    return world.sum(right), world.sum(loss), world.sum(count)


@pytest.mark.parametrize(("name", "size", "batch_size", "accumulate"), [
    ("mlp", 41, 8, 1), ("mlp", 34, 8, 1), ("mlp", 34, 8, 2), ("mlp", 37, 6, 3), ("cnn", 34, 8, 1), ("gpt", 33, 8, 1),
])  # fmt: skip
def test_a_sharded_run_equals_one_worker(pool, name, size, batch_size, accumulate):
    ((expected, order, _, score),) = pool.run(1, train, name, size, batch_size, accumulate)
    for workers in (2, 3, 4):
        results = pool.run(workers, train, name, size, batch_size, accumulate)
        for weights, seen, _, own_score in results:
            assert difference(weights, expected) < 1e-11
            assert sorted(sum(seen, [])) == sorted(order[0])  # Every sample once per epoch, none twice.
            assert own_score == pytest.approx(score, rel=1e-9)
        assert all(np.array_equal(w[k], results[0][0][k]) for w, *_ in results for k in w)
        if size % batch_size < workers:
            assert any(0 in sizes for _, _, sizes, _ in results), "this case is meant to have an empty part"


def dropout_masks(world):
    model = lockstep.DataParallel(torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout()))
    return (model(torch.ones(1, 4)) == 0).tolist()


def test_dropout_differs_between_workers_and_repeats_between_runs(pool):
    masks = pool.run(3, dropout_masks)
    assert masks[0] != masks[1] != masks[2] != masks[0]
    assert masks == pool.run(3, dropout_masks)
