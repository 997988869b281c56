import pytest
import torch
import torch.distributed as dist

import lockstep


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
    first = torch.rand(3).tolist()
    lockstep.DataParallel(torch.nn.Linear(2, 2))
    return first, torch.rand(3).tolist()


def test_seeds_agree_until_wrapping_and_differ_after(pool):
    once = pool.run(3, _draws)
    again = pool.run(3, _draws)
    assert once == again
    assert len({tuple(before) for before, _ in once}) == 1
    assert len({tuple(after) for _, after in once}) == 3
    assert pool.run(1, _draws)[0] == once[0]


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
