"""Wires between real workers: the same bits everywhere, within the form's bound, with the bytes that it promises."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from lockstep.wire import BucketShape, ChunkWire, Exchange, Full, Half, Int8, LowRank, Piece, Sign, SumWire, TopK

BACKENDS = ["gloo"]

crews = pytest.mark.parametrize("workers", [2, 3, 4])


@dataclass(frozen=True, slots=True)
class Float8(ChunkWire):
    """A user's own: 8 bits of floating point, and no scale."""

    def chunk_bytes(self, numel):
        return numel

    def encode(self, values):
        return values.to(torch.float8_e5m2).view(torch.uint8)

    def decode(self, encoded, numel):
        return encoded.view(torch.float8_e5m2).float()


@dataclass(frozen=True, slots=True)
class FixedPoint(SumWire):
    """Another: whole numbers of 32 bits, whose sum has the same bits in any order."""

    quantum: float = 2.0**-20

    def encoded_bytes(self, bucket):
        return 4 * bucket.numel

    def encode(self, values):
        return values.div(self.quantum).round_().to(torch.int32)

    def decode(self, summed, out):
        out.copy_(summed).mul_(self.quantum)


WIRES = [Full(), Half("bf16"), Half("fp16"), Int8(), Int8(block=16), Sign(), TopK(), TopK(0.2), LowRank(2), Float8(),
         FixedPoint()]  # fmt: skip
BUCKET = BucketShape(5328, (Piece("a", 0, (80, 50)), Piece("b", 4000, (9,)), Piece("c", 4016, (41, 32))))
NUMELS = (0, 1, 2, 3, 5, 300, 4097)
"""Among them empty buckets and buckets of fewer values than workers."""


def grads(rank, size, step, bucket):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    flat = torch.randn(bucket.numel, generator=generator) / size
    for begin, end in bucket.gaps():
        flat[begin:end] = 0
    return flat


def raw(tensor):
    return tensor.numpy().tobytes()


def limit(wire, parts, exact):
    """How far a sum may be off in the first step, by value."""
    largest = sum(part.abs().max() for part in parts) + exact.abs().max()
    match wire:
        case Full() | FixedPoint():
            return 2e-6 * len(parts)
        case Half():
            return len(parts) * 2.0 ** (-8 if wire.dtype == "bf16" else -11) * sum(part.abs() for part in parts)
        case Int8():
            return largest / 250
        case Float8():
            return largest / 6
        case _:
            return 2 * largest


def travel(world, wires):
    """For each wire and bucket: the bits of three steps' results."""
    seen = []
    for wire in wires:
        for bucket in (BUCKET, *map(BucketShape, NUMELS)):
            exchange = Exchange(wire, bucket, world.group)
            for step in range(3):
                parts = [grads(rank, world.size, step, bucket) for rank in range(world.size)]
                tail = torch.tensor([float(world.rank), 7.0])
                flat = torch.cat([parts[world.rank], tail])
                found = exchange.run(flat)
                assert found is flat and torch.equal(flat[bucket.numel :], tail)
                found = found[: bucket.numel]
                exact = torch.stack(parts).sum(0)
                if step == 0 and bucket.numel:
                    assert ((found - exact).abs() <= limit(wire, parts, exact)).all(), (wire, bucket.numel)
                assert exchange.num_bytes == exchange.bytes_promised == wire.bytes_promised(bucket, world.size)
                seen.append(raw(found))
            if bucket is BUCKET:
                assert torch.dot(found, exact) > 0
    return seen


@crews
def test_the_same_bits_within_the_bound_with_the_bytes_promised(pool, workers):
    first, *others = pool.run(workers, travel, WIRES)
    assert all(other == first for other in others)


def handed_over(world, wires):
    """What was counted, and what torch was given to send to others."""
    found = []
    plain = dist.all_reduce, dist.all_to_all_single, dist.all_gather_into_tensor
    size, given = world.size, []

    def num_bytes(tensor):
        return tensor.numel() * tensor.element_size()

    def all_reduce(tensor, **options):
        given.append(2 * (size - 1) * num_bytes(tensor) / size)
        return plain[0](tensor, **options)

    def all_to_all_single(out, tensor, **options):
        given.append((size - 1) * num_bytes(tensor) / size)
        return plain[1](out, tensor, **options)

    def all_gather(out, tensor, **options):
        given.append((size - 1) * num_bytes(tensor))
        return plain[2](out, tensor, **options)

    new = {"all_gather_single": all_gather} if hasattr(dist, "all_gather_single") else {}
    patches = {"all_reduce": all_reduce, "all_to_all_single": all_to_all_single, "all_gather_into_tensor": all_gather}
    with pytest.MonkeyPatch.context() as patch:
        for name, function in (patches | new).items():
            patch.setattr(dist, name, function)
        for wire in wires:
            exchange = Exchange(wire, BUCKET, world.group)
            exchange.run(grads(world.rank, size, 0, BUCKET))
            found.append((repr(wire), exchange.num_bytes, sum(given)))
            given.clear()
    return found


def test_what_is_counted_is_what_was_handed_over(pool):
    for found in pool.run(3, handed_over, WIRES):
        for wire, counted, given in found:
            assert counted == pytest.approx(given, rel=0.001), wire


def wait_for(works):
    for work in works:
        if work is not None:
            work.wait()


def in_phases(world, wires):
    """Two buckets on their way at once, as a reducer has them: the same bits as one after the other."""
    for wire in wires:
        one_by_one, together = ([Exchange(wire, BUCKET, world.group) for _ in range(2)] for _ in range(2))
        for step in range(2):
            flats = [grads(world.rank, world.size, 10 * step + number, BUCKET) for number in range(2)]
            expected = [exchange.run(flat.clone()) for exchange, flat in zip(one_by_one, flats, strict=True)]
            works = [exchange.launch(flat) for exchange, flat in zip(together, flats, strict=True)]
            wait_for(works)
            wait_for([exchange.relay() for exchange in together])
            for exchange, flat, wanted in zip(together, flats, expected, strict=True):
                exchange.finish(flat)
                assert raw(flat) == raw(wanted), wire


def test_buckets_can_be_on_their_way_together(pool):
    pool.run(3, in_phases, WIRES)


def go_on(world, wires):
    """Stop after three steps, save, load, go on."""
    for wire in wires:
        through, stopped = (Exchange(wire, BUCKET, world.group) for _ in range(2))
        for step in range(3):
            through.run(grads(world.rank, world.size, step, BUCKET))
            stopped.run(grads(world.rank, world.size, step, BUCKET))
        again = Exchange(wire, BUCKET, world.group)
        again.passage.load_state_dict(stopped.passage.state_dict())
        for step in range(3, 5):
            flat = grads(world.rank, world.size, step, BUCKET)
            assert raw(again.run(flat.clone())) == raw(through.run(flat)), wire


def test_a_saved_exchange_goes_on_with_the_same_bits(pool):
    pool.run(2, go_on, WIRES)


def alone(world):
    for wire in WIRES:
        exchange = Exchange(wire, BUCKET, None)
        flat = grads(0, 1, 0, BUCKET)
        assert torch.dot(exchange.run(flat.clone()), flat) > 0 and exchange.num_bytes == exchange.bytes_promised == 0


def test_one_worker(pool):
    pool.run(1, alone)
