"""Naive and ring all-reduce: right sums, the traffic that the textbook says, the same bits everywhere."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import shm
from lockstep.comm.ring import Traffic, naive_all_reduce, ring_all_reduce

ALGORITHMS = {"naive": naive_all_reduce, "ring": ring_all_reduce}
SIZES = (0, 1, 2, 3, 5, 12, 1000, 60_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64)

everywhere = pytest.mark.parametrize("backend", ["gloo", "shm"])
crews = pytest.mark.parametrize("workers", [2, 3, 4])
both = pytest.mark.parametrize("algorithm", ALGORITHMS)


def group(backend, ranks=None):
    shm.register()
    return dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=30))


def inputs(size, shape, dtype):
    """What each worker holds: small whole numbers, whose sums are exact in every dtype and order."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, 9, shape, generator=generator).to(dtype) for _ in range(size)]


def raw(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def sums(world, backend, algorithm):
    pg = group(backend)
    for dtype in DTYPES:
        for numel in SIZES:
            parts = inputs(world.size, (numel,), dtype)
            ALGORITHMS[algorithm](parts[world.rank], pg)
            others = inputs(world.size, (numel,), dtype)
            assert torch.equal(parts[world.rank], torch.stack(others).sum(0).to(dtype)), (dtype, numel)


@everywhere
@crews
@both
def test_sums_are_right_for_every_size_and_dtype(pool, workers, backend, algorithm):
    pool.run(workers, sums, backend, algorithm)


def shapes(world, backend, algorithm):
    pg = group(backend)
    reduce = ALGORITHMS[algorithm]
    total = sum(range(1, world.size + 1))

    def check(whole, seen, wanted):
        """Reduce `seen`, a part of `whole`: it becomes `wanted`, and what is around it stays as it was."""
        around = whole.clone()
        reduce(seen, pg)
        assert torch.equal(seen, torch.full_like(seen, wanted)), seen
        seen.fill_(0)
        assert whole.eq(around).logical_or(whole.eq(0)).all()

    mine = torch.full((6, 7), float(world.rank + 1))
    check(mine, mine.t(), total)
    mine = torch.full((6, 7), float(world.rank + 1))
    check(mine, mine[1::2, ::3], total)
    mine = torch.full((5,), float(world.rank + 1))
    check(mine, mine[::7], total)
    check(mine, mine[2], total)
    mine = torch.full((2, 3, 4, 5), float(world.rank + 1)).to(memory_format=torch.channels_last)
    check(mine, mine, total)
    mine = torch.full((9,), complex(1, world.rank + 1))
    check(mine, mine.conj(), complex(world.size, -total))
    mine = torch.zeros(5, dtype=torch.bool)
    mine[world.rank] = True
    reduce(mine, pg)
    assert mine.tolist() == [number < world.size for number in range(5)]
    weight = torch.nn.Parameter(torch.full((3, 3), float(world.rank + 1)))
    reduce(weight, pg)
    assert weight.eq(total).all()


@everywhere
@both
def test_tensors_of_every_shape(pool, backend, algorithm):
    pool.run(3, shapes, backend, algorithm)


def bits(world, backend, algorithm):
    pg = group(backend)
    seen = []
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        for numel in (3, 4099):
            generator = torch.Generator().manual_seed(world.rank)
            mine = (torch.randn(numel, generator=generator) * 10.0**world.rank).to(dtype)
            before = world.gather(mine.clone())
            ALGORITHMS[algorithm](mine, pg)
            seen.append(raw(mine))
            if algorithm == "naive":
                in_order = before[0].clone()
                for part in before[1:]:
                    in_order += part
                assert raw(mine) == raw(in_order)
            scale = torch.stack(before).abs().sum(0).max().item()
            assert (mine - torch.stack(before).sum(0)).abs().max() <= scale * 4 * torch.finfo(dtype).eps
    return seen


@everywhere
@crews
@both
def test_the_same_bits_on_every_worker(pool, workers, backend, algorithm):
    first, *others = pool.run(workers, bits, backend, algorithm)
    assert all(other == first for other in others)


def traffic(world, backend, algorithm, sizes):
    pg = group(backend)
    return [ALGORITHMS[algorithm](torch.ones(numel), pg) for numel in sizes]


@everywhere
@crews
def test_naive_sends_everything_to_everyone(pool, workers, backend):
    sizes = (0, 1, 12, 1001)
    for numel, *found in zip(sizes, *pool.run(workers, traffic, backend, "naive", sizes), strict=True):
        assert sum(each.num_bytes for each in found) == workers * (workers - 1) * 4 * numel
        messages = workers - 1 if numel else 0
        assert set(found) == {Traffic((workers - 1) * 4 * numel, messages, 1)}


@everywhere
@crews
def test_the_ring_sends_each_chunk_on_twice(pool, workers, backend):
    sizes = (0, 1, 2, 5, 12, 12_000, 1001)
    for numel, *found in zip(sizes, *pool.run(workers, traffic, backend, "ring", sizes), strict=True):
        steps, whole = 2 * (workers - 1), 4 * numel
        assert {each.num_steps for each in found} == {steps}
        assert sum(each.num_bytes for each in found) == steps * whole
        if numel % workers == 0:
            assert set(found) == {Traffic(steps * whole // workers, steps if numel else 0, steps)}
        for each in found:
            assert abs(each.num_bytes - steps * whole / workers) <= 4 * workers
            assert each.num_messages <= steps


def handed_over(world, algorithm):
    """What was counted, and what torch was given to send."""
    given = []
    plain = dist.isend

    def isend(tensor, *args, **kwargs):
        given.append(tensor.numel() * tensor.element_size())
        return plain(tensor, *args, **kwargs)

    distributed = torch.distributed.distributed_c10d
    dist.isend = distributed.isend = isend
    try:
        found = ALGORITHMS[algorithm](torch.ones(1001, dtype=torch.float64), group("gloo"))
    finally:
        dist.isend = distributed.isend = plain
    return found, given


@both
def test_what_is_counted_is_what_was_handed_over(pool, algorithm):
    for found, given in pool.run(3, handed_over, algorithm):
        assert (found.num_bytes, found.num_messages) == (sum(given), len(given))


def in_part(world, backend):
    """Of three workers, the last two reduce; their ranks in the group are not their ranks in the world."""
    pg = group(backend, [1, 2])
    mine = torch.full((5,), float(world.rank))
    if world.rank == 0:
        with pytest.raises(ValueError, match="worker 0 is not in the group"):
            ring_all_reduce(mine, pg)
        return
    for reduce, wanted in ((naive_all_reduce, 3), (ring_all_reduce, 6)):
        reduce(mine, pg)
        assert mine.eq(wanted).all()


@everywhere
def test_a_group_of_some_workers(pool, backend):
    pool.run(3, in_part, backend)


def alone(world):
    mine = torch.arange(5.0)
    assert naive_all_reduce(mine).num_bytes == ring_all_reduce(mine).num_bytes == 0
    assert mine.tolist() == [0, 1, 2, 3, 4]


def test_one_worker_has_its_sum(pool):
    pool.run(1, alone)
