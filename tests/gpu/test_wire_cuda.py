"""Wires on a CUDA device: the kernels compute what the torch code says, and two workers agree over NCCL."""

import math

import pytest
import torch
from test_cuda import CUDA, join

import lockstep
from lockstep.wire import BucketShape, Exchange, Full, Half, Int8, LowRank, Piece, Sign, TopK, blockwise
from lockstep.wire.blockwise import scales_and_payload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BLOCKED = [Int8(), Int8(block=8), Int8(block=4096), Sign(), Sign(block=32), Sign(block=4096)]
each_blocked = pytest.mark.parametrize("wire", BLOCKED, ids=repr)
sizes = pytest.mark.parametrize(("rows", "numel"), [(1, 1), (3, 5000), (2, 1_000_003)])


def chunks(wire, rows, numel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, wire.chunk_numel(numel, 1), generator=generator)
    return values * torch.randn(rows, 1, generator=generator).exp()


def close(ours, theirs):
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=5e-6, equal_nan=True)


def without_kernels(monkeypatch):
    monkeypatch.setattr(blockwise, "kernels_for", lambda tensor: None)


@each_blocked
@sizes
def test_kernels_encode_as_torch_does(wire, rows, numel):
    pytest.importorskip("triton")
    values = chunks(wire, rows, numel)
    on_gpu = values.to(CUDA)
    assert blockwise.kernels_for(on_gpu) and not blockwise.kernels_for(values)
    length = values.shape[1]
    encoded, expected = wire.encode(on_gpu), wire.encode(values)
    assert encoded.shape == expected.shape and torch.equal(on_gpu.cpu(), values)
    close(wire.decode(encoded, length), wire.decode(expected, length))
    close(wire.decode(expected.to(CUDA), length), wire.decode(expected, length))
    (scales, payload), (scales_wanted, payload_wanted) = (
        scales_and_payload(each.cpu(), length // wire.block) for each in (encoded, expected)
    )
    close(scales, scales_wanted)
    assert (payload != payload_wanted).float().mean() < 1e-3, "they differ where a last bit of the scale decides"
    again = wire.take(on_gpu)
    assert torch.equal(again, encoded)
    close(on_gpu, values - wire.decode(encoded, length).cpu())


@each_blocked
@sizes
def test_kernels_add_on_top(wire, rows, numel):
    values = chunks(wire, rows, numel)
    encoded = wire.encode(values)
    out = torch.ones_like(values)
    out_on_gpu = out.to(CUDA)
    wire.put(encoded, out, adds=True)
    wire.put(encoded.to(CUDA), out_on_gpu, adds=True)
    close(out_on_gpu, out)


@each_blocked
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_kernels_spoil_the_block_and_keep_no_error_of_it(wire, value):
    values = chunks(wire, 2, 20_000)
    values[1, 17] = value
    on_gpu = values.to(CUDA)
    encoded, expected = wire.take(on_gpu), wire.take(values)
    decoded = wire.decode(encoded, values.shape[1])
    assert torch.equal(decoded.isnan().cpu(), wire.decode(expected, values.shape[1]).isnan())
    assert decoded[1, 17].isnan()
    close(on_gpu, values)


@each_blocked
@pytest.mark.parametrize("factor", [0.0, 1e-44, 1e-38, 1e-30, 1e30])
def test_kernels_with_huge_and_tiny_values(wire, factor):
    values = chunks(wire, 1, 20_000) * factor
    decoded = wire.decode(wire.encode(values.to(CUDA)), values.shape[1]).cpu()
    expected = wire.decode(wire.encode(values), values.shape[1])
    assert decoded.isfinite().all()
    torch.testing.assert_close(decoded, expected, rtol=1e-5, atol=1e-36)


@each_blocked
def test_torch_on_the_device_computes_the_same(wire, monkeypatch):
    values = chunks(wire, 2, 30_000)
    without_kernels(monkeypatch)
    on_gpu = values.to(CUDA)
    encoded, expected = wire.take(on_gpu), wire.take(values)
    close(wire.decode(encoded, values.shape[1]), wire.decode(expected, values.shape[1]))
    close(on_gpu, values)


WIRES = [Full(), Half("bf16"), Half("fp16"), Int8(), Sign(), TopK(), LowRank(2)]


def travel():
    world = join()
    pieces = (Piece("a", 0, (300, 200)), Piece("b", 60_000, (9,)), Piece("c", 60_016, (41, 32)))
    bucket = BucketShape(61_328, pieces, device=torch.device(CUDA))
    seen = []
    for wire in WIRES:
        exchange = Exchange(wire, bucket, world.group)
        in_host_memory = Exchange(wire, BucketShape(bucket.numel, pieces), world.host_group)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + world.rank)
            flat = torch.randn(bucket.numel, generator=generator) / world.size
            for begin, end in bucket.gaps():
                flat[begin:end] = 0
            found, expected = exchange.run(flat.to(CUDA)).cpu(), in_host_memory.run(flat)
            assert exchange.num_bytes == exchange.bytes_promised
            error = ((found - expected).norm() / expected.norm()).item()
            # A sign or a place among the largest can fall the other way by a last bit.
            assert error < (0.05 if isinstance(wire, (Sign, TopK)) else 0.01), (wire, step, error)
            seen.append(found.view(torch.uint8).numpy().tobytes())
    return seen


def test_two_workers_agree_over_nccl():
    first, second = lockstep.launch(travel, workers=2)
    assert first == second
