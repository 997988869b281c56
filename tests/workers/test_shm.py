"""Every collective of backend shm, against what the definition says, on tensors of all kinds."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from amount import some

from lockstep.comm import shm

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
SIZES = (0, 1, 7, 1000, 60_000, 700_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.complex64)
GROUPS = some((1, 2, 3), (1, 2, 3, 4))


def group(world=None, timeout=30):
    shm.register()
    return dist.new_group(backend="shm", timeout=timedelta(seconds=timeout))


def inputs(size, numel, dtype, seed=0):
    """What each worker holds; the same on all of them."""
    generator = torch.Generator().manual_seed(1000 * seed + numel)
    return [(torch.rand(numel, generator=generator) * 8 - 2).to(dtype) for _ in range(size)]


def shared(pg, value):
    held = shm.allocate(pg, value.numel(), value.dtype)
    held.copy_(value.flatten())
    return held


def expect(found, wanted, *what):
    assert torch.equal(found, wanted), (what, found, wanted)


def total(parts):
    """The sum in the order of the ranks; narrow types add up in float32."""
    wide = torch.float32 if parts[0].dtype in (torch.bfloat16, torch.float16) else parts[0].dtype
    result = parts[0].to(wide)
    for part in parts[1:]:
        result = result + part.to(wide)
    return result.to(parts[0].dtype)


def sums(world):
    pg = group()
    for dtype in DTYPES:
        for numel in SIZES:
            parts = inputs(world.size, numel, dtype)
            mine = parts[world.rank].clone()
            dist.all_reduce(mine, group=pg)
            expect(mine, total(parts), dtype, numel)
            held = shared(pg, parts[world.rank])
            dist.all_reduce(held, group=pg)
            expect(held, total(parts), dtype, numel, "in place")


@pytest.mark.parametrize("workers", GROUPS)
def test_all_reduce_is_the_sum_in_the_order_of_the_ranks(pool, workers):
    pool.run(workers, sums)


def reductions(world):
    pg = group()
    op = dist.ReduceOp
    for numel in (5, 200_000):
        parts = inputs(world.size, numel, torch.float32)
        stacked = torch.stack(parts)
        for kind, wanted in (
            (op.AVG, total(parts) / world.size),
            (op.MIN, stacked.min(0).values),
            (op.MAX, stacked.max(0).values),
            (op.PRODUCT, stacked[0] * stacked[1] * stacked[2]),
            (dist._make_nccl_premul_sum(0.5), total([part * 0.5 for part in parts])),
        ):
            for mine in (parts[world.rank].clone(), shared(pg, parts[world.rank])):
                dist.all_reduce(mine, kind, group=pg)
                expect(mine, wanted, numel, kind)
        for dtype in (torch.int32, torch.bool, torch.uint16):
            bits = inputs(world.size, numel, torch.uint8)
            bits = [part.to(dtype) for part in bits]
            for kind, step in ((op.BAND, "and"), (op.BOR, "or"), (op.BXOR, "xor")):
                mine = bits[world.rank].clone()
                dist.all_reduce(mine, kind, group=pg)
                signed = [part.view(torch.int16) if dtype == torch.uint16 else part for part in bits]
                combine = getattr(torch, f"bitwise_{step}")
                wanted = combine(combine(signed[0], signed[1]), signed[2])
                expect(mine.view(wanted.dtype), wanted, dtype, kind)
        mine = parts[world.rank].clone()
        dist.reduce(mine, 2, group=pg)
        expect(mine, total(parts) if world.rank == 2 else parts[world.rank])
        held = shared(pg, parts[world.rank])
        dist.reduce(held, 2, group=pg)
        expect(held, total(parts) if world.rank == 2 else parts[world.rank])
    with pytest.raises(RuntimeError, match="cannot reduce"):
        dist.all_reduce(torch.ones(2), op.BAND, group=pg)
    dist.barrier(group=pg)


def test_every_reduction(pool):
    pool.run(3, reductions)


def moves(world):
    pg = group()
    size, rank = world.size, world.rank
    for dtype in (torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex64):
        for numel in SIZES:
            parts = inputs(size, numel, dtype)
            whole = torch.cat(parts)
            raw = lambda tensor: tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor
            same = lambda found, wanted: expect(raw(found), raw(wanted), dtype, numel)
            for mine in (parts[rank].clone(), shared(pg, parts[rank])):
                dist.broadcast(mine, size - 1, group=pg)
                same(mine, parts[-1])
            for mine in (parts[rank].clone(), shared(pg, parts[rank])):
                outs = [torch.empty(numel, dtype=dtype) for _ in range(size)]
                dist.all_gather(outs, mine, group=pg)
                same(torch.cat(outs), whole)
                for out in (torch.empty(size * numel, dtype=dtype), shm.allocate(pg, size * numel, dtype)):
                    dist.all_gather_into_tensor(out, mine, group=pg)
                    same(out, whole)
                outs = [torch.empty(numel, dtype=dtype) for _ in range(size)] if rank == 1 else None
                dist.gather(mine, outs, 1, group=pg)
                if outs:
                    same(torch.cat(outs), whole)
            out = torch.empty(numel, dtype=dtype)
            dist.scatter(out, parts if rank == 0 else None, 0, group=pg)
            same(out, parts[rank])
            outs = [torch.empty(numel, dtype=dtype) for _ in range(size)]
            dist.all_to_all(outs, [parts[(rank + other) % size] for other in range(size)], group=pg)
            same(torch.cat(outs), torch.cat([parts[(rank + other) % size] for other in range(size)]))


@pytest.mark.parametrize("workers", some((3,), (2, 3, 4)))
def test_moves_keep_every_bit_of_every_dtype(pool, workers):
    pool.run(workers, moves)


def scattered_sums(world):
    pg = group()
    size, rank = world.size, world.rank
    for numel in SIZES:
        parts = inputs(size, numel * size, torch.float32)
        wanted = total(parts)[rank * numel : (rank + 1) * numel]
        for mine in (parts[rank], shared(pg, parts[rank])):
            out = torch.empty(numel)
            dist.reduce_scatter_tensor(out, mine, group=pg)
            expect(out, wanted, numel)
            dist.reduce_scatter(out, list(mine.chunk(size)) if numel else [mine] * size, group=pg)
            expect(out, wanted, numel)
        own = shared(pg, parts[rank])
        part = own[rank * numel : (rank + 1) * numel]
        dist.reduce_scatter_tensor(part, own, group=pg)
        expect(part, wanted, numel, "into its own input")
    rows = [torch.full((rank + other + 1, 3), float(rank * 10 + other)) for other in range(size)]
    out = torch.empty(sum(rank + other + 1 for other in range(size)), 3)
    splits = [rank + other + 1 for other in range(size)]
    dist.all_to_all_single(out, torch.cat(rows), splits, splits, group=pg)
    expect(out, torch.cat([torch.full((rank + other + 1, 3), float(other * 10 + rank)) for other in range(size)]))


@pytest.mark.parametrize("workers", GROUPS)
def test_reduce_scatter_and_uneven_all_to_all(pool, workers):
    pool.run(workers, scattered_sums)


def awkward(world):
    pg = group()
    grid = torch.arange(12.0).view(3, 4) + world.rank
    dist.all_reduce(grid.t()[1:], group=pg)
    expect(grid[:, 1:], (2 * torch.arange(12.0).view(3, 4) + 1)[:, 1:])
    expect(grid[:, 0], torch.arange(12.0).view(3, 4)[:, 0] + world.rank)
    scalar = torch.tensor(1.0 + world.rank, requires_grad=True)
    dist.all_reduce(scalar, group=pg)
    assert scalar.item() == 3
    out = torch.zeros(4, 2).t()
    dist.broadcast(out if world.rank else torch.arange(8.0).view(2, 4), 0, group=pg)
    if world.rank:
        expect(out, torch.arange(8.0).view(2, 4))
    tensors = [torch.ones(3), torch.ones(200_000)]
    with dist._coalescing_manager(group=pg):
        for tensor in tensors:
            dist.all_reduce(tensor, group=pg)
    assert all(bool((tensor == 2).all()) for tensor in tensors)
    found = [None, None]
    dist.all_gather_object(found, {"rank": world.rank}, group=pg)
    assert found == [{"rank": 0}, {"rank": 1}]
    half = shm.allocate(pg, 100_000, torch.float32)[50_000:]
    half.fill_(1)
    dist.all_reduce(half if world.rank else torch.ones(50_000), group=pg)
    assert bool((half == (2 if world.rank else 1)).all())


def test_views_scalars_coalesced_objects_and_shared_with_unshared(pool):
    pool.run(2, awkward)


def asynchronous(world):
    pg = group()
    tensors = [torch.ones(10 ** (1 + number % 6)) for number in range(24)]
    works = [dist.all_reduce(tensor, group=pg, async_op=True) for tensor in tensors]
    last = torch.ones(3)
    dist.all_reduce(last, group=pg)
    assert all(work.is_completed() and work.is_success() for work in works)
    assert all(work.wait() for work in works)
    assert all(bool((tensor == world.size).all()) for tensor in tensors)
    (result,) = works[5].get_future().wait()
    assert result is tensors[5]
    chained = dist.all_reduce(torch.ones(2), group=pg, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    expect(chained.wait(), torch.full((2,), 2.0 * world.size))


def test_asynchronous_operations_end_in_order(pool):
    pool.run(3, asynchronous)


def messages(world):
    pg = group()
    rank, size = world.rank, world.size
    after, before = (rank + 1) % size, (rank - 1) % size
    for numel in (0, 1, 400_000):
        out = torch.empty(numel)
        works = [dist.isend(torch.full((numel,), float(rank)), after, group=pg), dist.irecv(out, before, group=pg)]
        for work in works:
            work.wait()
        expect(out, torch.full((numel,), float(before)))
    out = torch.empty(3)
    operations = [dist.P2POp(dist.irecv, out, before, pg), dist.P2POp(dist.isend, torch.ones(3) * rank, after, pg)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    expect(out, torch.ones(3) * before)
    dist.barrier(group=pg)
    if rank == 0:
        for tag in range(5):
            dist.isend(torch.full((100_000,), float(tag)), 1, group=pg, tag=tag).wait() if tag < 2 else dist.send(
                torch.full((10,), float(tag)), 1, group=pg, tag=tag
            )
    elif rank == 1:
        for tag in (4, 2, 3):
            out = torch.empty(10)
            dist.recv(out, 0, group=pg, tag=tag)
            expect(out, torch.full((10,), float(tag)))
        for tag in (1, 0):
            out = torch.empty(100_000)
            assert dist.recv(out, group=pg, tag=tag) == 0
            expect(out, torch.full((100_000,), float(tag)))
    dist.barrier(group=pg)


def called(world):
    """Those who are called at the end of one operation, or message, start the next one and wait for it."""
    pg = group()
    first, second = torch.ones(200_000), torch.ones(3)
    ending = dist.all_reduce(first, group=pg, async_op=True).get_future()
    ending.then(lambda _: dist.all_reduce(second, group=pg, async_op=True).get_future().wait()).wait()
    expect(second, torch.full((3,), float(world.size)))
    ending = dist.all_reduce(first, group=pg, async_op=True).get_future()
    ending.then(lambda _: dist.all_reduce(second, group=pg)).wait()
    expect(second, torch.full((3,), float(world.size**2)))
    if world.rank == 0:
        dist.barrier(group=pg)  # The receiver waits for what is not there yet.
        for number in range(2):
            dist.send(torch.full((3,), float(number)), 1, group=pg)
    else:
        ending = dist.irecv(second, 0, group=pg).get_future().then(lambda _: dist.recv(second, 0, group=pg))
        dist.barrier(group=pg)
        ending.wait()
        expect(second, torch.ones(3))
    dist.barrier(group=pg)


def test_who_is_called_may_wait_for_another(pool):
    pool.run(2, called)


@pytest.mark.parametrize("workers", (2, 3))
def test_messages_find_their_tag_and_never_wait_for_each_other(pool, workers):
    pool.run(workers, messages)


def several(world):
    shm.register()
    pairs = [dist.new_group([0, 1], backend="shm"), dist.new_group([1, 2, 3], backend="shm")]
    everybody = group()
    works = []
    for number in range(20):
        for pg in (*pairs, everybody):
            if dist.get_rank(pg) >= 0:
                tensor = torch.ones(1 + 5000 * number)
                works.append((dist.all_reduce(tensor, group=pg, async_op=True), tensor, dist.get_world_size(pg)))
    for work, tensor, size in works:
        work.wait()
        assert bool((tensor == size).all())


def test_several_groups_at_once(pool):
    pool.run(4, several)
