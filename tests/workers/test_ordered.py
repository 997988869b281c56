"""Ordered reductions: the same bits over every backend and any number of workers, with the bytes of a ring."""

import itertools

import pytest
import torch
from amount import some

from lockstep.comm.memory import Request, memory_of
from lockstep.comm.tree import ByMessages, ShardTree, even_cuts, halves, in_memory

BACKENDS = ["shm", "gloo"]
SHARDS = 8


def along_the_tree(values, begin=0):
    if len(values) == 1:
        return values[0]
    middle = halves((begin, begin + len(values)))[0][1] - begin
    return along_the_tree(values[:middle], begin) + along_the_tree(values[middle:], begin + middle)


def contribution(shard, numel, dtype):
    generator = torch.Generator().manual_seed(shard)
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * 10.0 ** (shard % 4)).to(dtype)


def lanes_of(world, tree, numel, dtype, memory):
    """This worker's roots in its lanes, in `memory`, which must live as long as they are used."""
    (laid_out,) = memory.lay_out([Request(tree.lanes * numel, dtype, torch.device("cpu"))])
    lanes = laid_out.view(tree.lanes, numel)
    for number, (begin, end) in enumerate(tree.roots[world.rank]):
        values = [contribution(shard, numel, dtype) for shard in range(begin, end)]
        lanes[tree.lane(world.rank, number)] = along_the_tree(values)
    return lanes


def reductions(world, tree):
    yield ByMessages(tree, world.group, torch.device("cpu"))
    if world.backend == "shm":
        yield in_memory(tree, world.group, torch.device("cpu"))


def reduced(world, numel, dtype):
    tree = ShardTree(SHARDS, world.size)
    found = []
    memory = memory_of(world.group, torch.device("cpu"))
    for ordered in reductions(world, tree):
        lanes = lanes_of(world, tree, numel, dtype, memory)
        world.wait(ordered.all_reduce(lanes), "adding")
        found.append(lanes[-1].double().tolist())
        lanes = lanes_of(world, tree, numel, dtype, memory)
        # Parts of any length, one of them empty.
        cuts = [(0, 0), *even_cuts(numel, world.size - 1, dtype.itemsize)]
        out = torch.zeros(cuts[world.rank][1] - cuts[world.rank][0], dtype=dtype)
        world.wait(ordered.reduce_scatter(lanes, cuts, out), "adding")
        whole = torch.zeros(numel, dtype=torch.float64)
        whole[slice(*cuts[world.rank])] = out.double()
        found.append(world.sum(whole).tolist())
    return found


@pytest.mark.parametrize(
    ("dtype", "workers"),
    some(
        [*((torch.float32, size) for size in (2, 3, 5, 8)), (torch.float64, 3), (torch.bfloat16, 5), (torch.half, 2)],
        itertools.product([torch.float32, torch.float64, torch.bfloat16, torch.half], [2, 3, 5, 8]),
    ),
)
def test_the_same_bits_everywhere(pool, dtype, workers):
    for numel in (1, 100, 70_000) if dtype == torch.float32 else (333,):
        expected = along_the_tree([contribution(shard, numel, dtype) for shard in range(SHARDS)]).double().tolist()
        for found in pool.run(workers, reduced, numel, dtype):
            assert all(each == expected for each in found)


def counted(world, shards, numel):
    tree = ShardTree(shards, world.size)
    ordered = ByMessages(tree, world.group, torch.device("cpu"))
    lanes = lanes_of(world, tree, numel, torch.float32, memory_of(world.group, torch.device("cpu")))
    world.wait(ordered.all_reduce(lanes), "adding")
    return ordered.num_bytes_sent


@pytest.mark.parametrize(("workers", "shards"), [(2, 2), (2, 8), (4, 8), (5, 5), (3, 8)])
def test_it_moves_the_bytes_of_a_ring(pool, workers, shards):
    """2(N-1)/N of the message where each worker sends one root; once more there for each further one."""
    numel = 64 * 60
    tree = ShardTree(shards, workers)
    for rank, num_bytes in enumerate(pool.run(workers, counted, shards, numel)):
        passes = len(tree.roots[rank]) + 1
        assert num_bytes == pytest.approx(passes * (workers - 1) / workers * 4 * numel, rel=0.02)
