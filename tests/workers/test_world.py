import os
import random

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split

import lockstep
from lockstep import seeds


def _words(world):
    return {
        "same": lockstep.join() is world,
        "rank": world.rank,
        "size": world.size,
        "local": (world.local_rank, world.local_size),
        "main": world.is_main,
        "device": str(world.device),
        "backend": world.backend,
        "sum": (world.sum(world.rank + 1), world.sum(0.5), world.sum(torch.ones(2) * world.rank).tolist()),
        "mean": (world.mean(float(world.rank)), world.mean(float(world.rank), weight=world.rank)),
        "mean of nothing": world.mean(float("nan") if world.rank else 3.0, weight=0 if world.rank else 2),
        "gather": world.gather({"rank": world.rank, "long": "x" * world.rank}),
        "group": dist.get_world_size(),
    }


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_words(pool, workers):
    for rank, seen in enumerate(pool.run(workers, _words)):
        everyone = range(workers)
        assert seen["same"]
        assert (seen["rank"], seen["size"], seen["local"]) == (rank, workers, (rank, workers))
        assert seen["main"] == (rank == 0)
        assert (seen["device"], seen["backend"], seen["group"]) == ("cpu", "gloo" if workers == 1 else "shm", workers)
        assert seen["sum"] == (sum(r + 1 for r in everyone), 0.5 * workers, [sum(everyone)] * 2)
        plain = sum(everyone) / workers
        weighted = sum(r * r for r in everyone) / sum(everyone) if workers > 1 else 0.0
        assert seen["mean"] == pytest.approx((plain, weighted))
        assert seen["mean of nothing"] == 3.0
        assert seen["gather"] == [{"rank": r, "long": "x" * r} for r in everyone]


def _draws(world):
    """What a script draws that wraps, shards and trains: in its own lines, and in the model."""
    own = [torch.rand(3).tolist()]
    model = lockstep.DataParallel(Drawing())
    dataset = TensorDataset(torch.arange(24.0).view(12, 2))
    train, held_out = random_split(dataset, [8, 4])
    own.append((train.indices, held_out.indices))
    inside = []
    for (x,) in lockstep.shard(DataLoader(Noisy(train), batch_size=4, shuffle=True)):
        inside += [model(x).tolist(), x[:, 2:].tolist()]
        own.append((torch.rand(2).tolist(), numpy.random.rand(), random.random()))
    with pytest.raises(KeyError):
        model(None)
    own.append(torch.rand(2).tolist())
    return own, inside


class Drawing(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def forward(self, x):
        drawn = torch.rand(3)
        if x is None:
            raise KeyError
        return checkpoint(self._drawn, drawn, use_reentrant=False)

    def _drawn(self, drawn):
        return drawn + torch.rand(3) + 0 * self.weight.sum()


class Noisy(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        drawn = torch.tensor([torch.rand(()), numpy.random.rand(), random.random()])
        return (torch.cat([self.samples[index][0], drawn]),)


def test_with_a_seed_scripts_draw_alike_and_models_and_data_sets_each_their_own(pool):
    once = pool.run(3, _draws)
    assert once == pool.run(3, _draws)
    assert once[0][0] == once[1][0] == once[2][0]
    for kind in zip(*(inside for _, inside in once), strict=True):
        assert kind[0] != kind[1] != kind[2] != kind[0]


def _draws_by_torch_alone(world, wraps):
    """The same without `join(seed=...)`; unwrapped, it is what a plain script draws."""
    world.leave()
    with lockstep.join(timeout=30):
        seeds.seed_everything(5)
        model = Drawing()
        model = lockstep.DataParallel(model) if wraps else model
        drawn = [random_split(range(9), [5, 4])[0].indices]
        for _ in range(2):
            drawn += [model(torch.ones(1, 2)).tolist(), torch.rand(2).tolist(), numpy.random.rand(), random.random()]
        return drawn


def test_without_a_seed_no_generator_is_touched(pool):
    (plain,) = pool.run(1, _draws_by_torch_alone, False)
    assert pool.run(2, _draws_by_torch_alone, True) == [plain, plain]
    assert pool.run(1, _draws_by_torch_alone, True) == [plain]


def _order_after_late_seeding(world, seed):
    world.leave()
    with lockstep.join(timeout=30) as world:
        torch.manual_seed(seed + world.rank)
        loader = lockstep.shard(DataLoader(range(12), batch_size=4, shuffle=True))
        return world.gather([part.tolist() for part in loader]), world.seed


def test_the_seed_is_taken_when_it_is_first_needed(pool):
    first, *others = runs = [pool.run(2, _order_after_late_seeding, seed) for seed in (7, 7, 8)]
    assert first == others[0] and first[0] == first[1] and first[0][1] == 7
    assert runs[2][0] != first[0]


def _own_seeds(world):
    world.leave()
    with pytest.raises(lockstep.UsageError, match=r"different seeds by the workers: \[0, 1\]"):
        lockstep.join(seed=int(os.environ["RANK"]), timeout=30)


def test_workers_with_different_seeds_are_told(pool):
    pool.run(2, _own_seeds)


def _uses_a_left_world(world):
    model = lockstep.DataParallel(torch.nn.Linear(2, 2))
    world.leave()
    world.leave()
    assert world.has_left and not dist.is_initialized()
    with torch.no_grad():
        model(torch.ones(1, 2))
    with pytest.raises(lockstep.UsageError, match="has been left"):
        model(torch.ones(1, 2))


def test_leaving_twice_is_fine_and_training_after_it_is_not(pool):
    pool.run(2, _uses_a_left_world)


def _in_groups(world):
    """Two pairs out of four workers, each with its own model: a dimension of a mesh."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pair"))
    model = lockstep.DataParallel(torch.nn.Linear(2, 2), device_mesh=mesh["pair"])
    model(torch.full((1, 2), 1.0 + world.rank)).sum().backward()
    return model.world.size, model.module.weight.grad[0, 0].item()


def test_over_one_dimension_of_a_mesh(pool):
    assert pool.run(4, _in_groups) == [(2, 1.5), (2, 1.5), (2, 3.5), (2, 3.5)]
