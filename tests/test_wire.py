"""Wires without processes: what they encode comes back within their bounds, and nothing is lost for good."""

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from amount import some
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.wire import After, BucketShape, Exchange, Full, Half, Int8, LowRank, Piece, Route, Sign, TopK
from lockstep.wire.blockwise import pack, unpack
from lockstep.wire.low_rank import orthonormal
from lockstep.wire.top_k import largest

pytestmark = pytest.mark.usefixtures("one_thread")  # These tensors are small: a second one costs more than it does.

CHUNKED = [Int8(), Int8(block=8), Sign(feedback=1.0), Sign(block=32, feedback=1.0), TopK(), TopK(ratio=0.3)]
LOSSY = [*CHUNKED, LowRank(), LowRank(rank=1)]
ALL = [Full(), Half("bf16"), Half("fp16"), *LOSSY]

each = pytest.mark.parametrize("wire", ALL, ids=repr)
each_lossy = pytest.mark.parametrize("wire", LOSSY, ids=repr)
each_chunked = pytest.mark.parametrize("wire", CHUNKED, ids=repr)

SHAPE = BucketShape(4200, (Piece("a", 0, (60, 40)), Piece("b", 2416, (7,)), Piece("c", 2432, (40, 3, 10))))
"""Two matrices, a vector, and padding between and behind them."""


NOT_FINITE, PLACES = [math.inf, -math.inf, math.nan], [5, 2417, 4095 - 600]


def is_padding(shape=SHAPE):
    mask = torch.zeros(shape.numel, dtype=torch.bool)
    for begin, end in shape.gaps():
        mask[begin:end] = True
    return mask


def carry(parcels):
    """What arrives at each worker."""
    tensors = [parcel.tensor for parcel in parcels]
    match parcels[0].route:
        case Route.SUM:
            total = tensors[0].clone()
            for tensor in tensors[1:]:
                total += tensor
            return [total.clone() for _ in tensors]
        case Route.SWAP:
            return [torch.stack([tensor[rank] for tensor in tensors]) for rank in range(len(tensors))]
        case Route.GATHER:
            return [torch.cat([tensor.view(1, -1) for tensor in tensors]) for _ in tensors]


def exchange(passages, flats):
    """One exchange between workers of one process; returns the buckets and the bytes that each sent."""
    flats = [flat.clone() for flat in flats]
    out = [passage.encode(flat) for passage, flat in zip(passages, flats, strict=True)]
    arrived, num_bytes = carry(out), bytes_sent(out)
    back = [passage.combine(each) for passage, each in zip(passages, arrived, strict=True)]
    if back[0] is not None:
        arrived, num_bytes = carry(back), num_bytes + bytes_sent(back)
    for passage, each, flat in zip(passages, arrived, flats, strict=True):
        passage.decode(each, flat)
    return flats, num_bytes


def bytes_sent(parcels):
    assert all(parcel.tensor.is_contiguous() for parcel in parcels)
    tensor = parcels[0].tensor
    return parcels[0].route.num_bytes(tensor.numel() * tensor.element_size(), len(parcels))


def open_all(wire, size, shape=SHAPE):
    return [wire.open(shape, rank, size) for rank in range(size)]


def gradients(size, step=0, shape=SHAPE):
    generator = torch.Generator().manual_seed(step)
    flats = [torch.randn(shape.numel, generator=generator) / size for _ in range(size)]
    for flat in flats:
        flat[is_padding(shape)] = 0
    return flats


def raw(tensor):
    return tensor.numpy().tobytes()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Half("fp32"),
        lambda: Int8(block=100),
        lambda: Int8(block=4),
        lambda: Int8(block=256.0),
        lambda: Sign(block=8192),
        lambda: Sign(block=16),
        lambda: TopK(ratio=0),
        lambda: TopK(ratio=0.6),
        lambda: TopK(ratio="1%"),
        lambda: LowRank(rank=0),
        lambda: LowRank(rank=1.5),
        lambda: BucketShape(-1),
        lambda: BucketShape(10, (Piece("a", 4, (8,)),)),
        lambda: BucketShape(10, (Piece("a", 0, (6,)), Piece("b", 5, (2,)))),
    ],
)
def test_what_cannot_be_right_is_refused(make):
    with pytest.raises(UsageError, match=r"\d|1%|fp32"):
        make()


@each
def test_a_wire_is_a_frozen_value(wire):
    assert wire == dataclasses.replace(wire) and hash(wire) == hash(dataclasses.replace(wire))
    for field in dataclasses.fields(wire):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(wire, field.name, 3)
    assert type(wire).__doc__.count("Exactness:") == type(wire).__doc__.count("Volume:") == 1


# One encoding


@each_chunked
@given(numel=st.integers(1, 700), rows=st.integers(1, 3), seed=st.integers(0, 99), power=st.integers(-30, 30))
@settings(max_examples=15, deadline=None)
def test_encoded_chunks_have_their_size_and_bound(wire, numel, rows, seed, power):
    numel = wire.chunk_numel(numel, 1)
    values = torch.randn(rows, numel, generator=torch.Generator().manual_seed(seed)) * 10.0**power
    before = values.clone()
    encoded = wire.encode(values)
    assert encoded.shape == (rows, wire.chunk_bytes(numel)) and encoded.dtype == torch.uint8
    assert torch.equal(values, before)
    decoded = wire.decode(encoded, numel)
    assert raw(wire.take(values)) == raw(encoded)
    torch.testing.assert_close(values, before - decoded, rtol=1e-6, atol=10.0**power * 1e-6)
    if isinstance(wire, Int8):
        limit = before.view(rows, -1, wire.block).abs().amax(2, keepdim=True) / 254 * 1.001
        assert ((decoded - before).view(rows, -1, wire.block).abs() <= limit).all()
    if isinstance(wire, Sign):
        assert torch.equal(decoded.signbit(), before.signbit())
        means = before.view(rows, -1, wire.block).abs().mean(2, keepdim=True).expand(-1, -1, wire.block)
        torch.testing.assert_close(decoded.view(rows, -1, wire.block).abs(), means, rtol=1e-6, atol=0.0)
    if isinstance(wire, TopK):
        kept = decoded != 0
        assert torch.equal(decoded[kept], before[kept])
        assert (kept.sum(1) == wire.num_kept(numel)).all()
        for row in range(rows):
            assert before[row][kept[row]].abs().min() >= before[row][~kept[row]].abs().max()
    assert (before - decoded).double().norm() < before.double().norm(), (
        "error feedback needs an encoding that takes something away"
    )


@given(numel=st.integers(1, 300), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_bits_are_packed_lowest_first(numel, seed):
    bits = torch.randint(0, 2, (3, 8 * numel), generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    packed = pack(bits)
    assert packed.shape == (3, numel) and packed.dtype == torch.uint8
    assert packed[1, 0] == sum(int(bit) << place for place, bit in enumerate(bits[1, :8]))
    assert torch.equal(unpack(packed), bits)
    assert torch.equal(pack(-bits), packed), "the lowest bit counts"


@given(numel=st.integers(1, 3000), share=st.floats(0.001, 0.5), seed=st.integers(0, 99), kinds=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_the_largest_are_found_whatever_the_values(numel, share, seed, kinds):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    if kinds > 1:  # Many equal ones, and many zeros.
        values = values.mul(kinds - 2).round()
    count = math.ceil(share * numel)
    places = largest(values, count)
    assert len(set(places.tolist())) == count
    assert torch.equal(values[places].abs().sort().values, values.abs().topk(count).values.sort().values)


def test_the_largest_of_many():
    values = torch.randn(1_000_003, generator=torch.Generator().manual_seed(1)) ** 3
    values[::64] *= 100
    places = largest(values, 10_001)
    assert set(places.tolist()) == set(values.abs().topk(10_001).indices.tolist())


@each
def test_zero_stays_zero(wire):
    passages = open_all(wire, 3)
    for flat in exchange(passages, [torch.zeros(SHAPE.numel)] * 3)[0]:
        assert (flat == 0).all()
    assert all((tensor == 0).all() for key, tensor in passages[0].state_dict().items() if "error" in key)


@each
@pytest.mark.parametrize("factor", some([1e-44, 1e-30, 1e34], [1e-44, 1e-38, 1e-30, 1e30, 1e34]))
def test_huge_and_tiny(wire, factor):
    if wire == Half("fp16"):
        pytest.skip("beyond its range")
    flats = [flat * factor for flat in gradients(2)]
    passages = open_all(wire, 2)
    (found, _), _ = exchange(passages, flats)
    assert torch.isfinite(found).all()
    assert found.abs().max() <= 40 * sum(flats).abs().max()
    if factor >= 1e-30:
        assert torch.dot(found.double(), sum(flats).double()) > 0


@each
@pytest.mark.parametrize(
    ("value", "place"), some(zip(NOT_FINITE, PLACES, strict=True), itertools.product(NOT_FINITE, PLACES))
)
def test_an_overflow_on_one_worker_is_seen_by_all_and_then_forgotten(wire, value, place):
    passages = open_all(wire, 3)
    exchange(passages, gradients(3))
    flats = gradients(3, 1)
    flats[1][place] = value
    for flat in exchange(passages, flats)[0]:
        assert not torch.isfinite(flat[place])
    for step in (2, 3):
        for flat in exchange(passages, gradients(3, step))[0]:
            assert torch.isfinite(flat).all()


def test_half_overflows_where_it_must():
    flats, _ = exchange(open_all(Half("fp16"), 2), [torch.full((SHAPE.numel,), 40_000.0)] * 2)
    assert flats[0].isinf().all()


# Exchanges


@each
@pytest.mark.parametrize("size", some([1, 3], [1, 2, 3, 5]))
def test_all_workers_end_with_the_same_bits_within_the_bound(wire, size):
    passages = open_all(wire, size)
    for step in range(3):
        flats = gradients(size, step)
        found, _ = exchange(passages, flats)
        assert {raw(flat) for flat in found} == {raw(found[0])}
        assert (found[0][is_padding()] == 0).all()
        exact = sum(flats)
        if wire == Full():
            torch.testing.assert_close(found[0], exact)
        elif isinstance(wire, Half):
            spread = sum(flat.abs() for flat in flats)
            assert ((found[0] - exact).abs() <= size * 2.0 ** (-8 if wire.dtype == "bf16" else -11) * spread).all()
        elif isinstance(wire, Int8):
            # Out and back, and as much again for the errors of the step before.
            limit = 2 * (sum(flat.abs().max() for flat in flats) + exact.abs().max()) / 250
            assert ((found[0] - exact).abs() <= limit).all()
        elif isinstance(wire, LowRank):
            torch.testing.assert_close(found[0][2416:2423], exact[2416:2423])


@each
def test_the_same_input_gives_the_same_bits(wire):
    runs = []
    for _ in range(2):
        passages = open_all(wire, 3)
        runs.append([raw(exchange(passages, gradients(3, step))[0][0]) for step in range(4)])
    assert runs[0] == runs[1]


@each_lossy
@pytest.mark.parametrize("size", [1, 3])
def test_what_was_decoded_and_the_error_add_up_to_what_was_put_in(wire, size):
    passages = open_all(wire, size)
    put_in = decoded = torch.zeros(SHAPE.numel, dtype=torch.double)
    for step in range(30):
        flats = gradients(size, step)
        put_in = put_in + sum(flat.double() for flat in flats)
        decoded = decoded + exchange(passages, flats)[0][0].double()
    error = torch.zeros(SHAPE.numel, dtype=torch.double)
    for passage in passages:
        state = passage.state_dict()
        for piece in SHAPE.pieces:
            error[piece.offset : piece.end] += state[f"error.{piece.name}"]
            if f"owner_error.{piece.name}" in state:
                begin = piece.offset + int(state[f"owner_begin.{piece.name}"])
                part = state[f"owner_error.{piece.name}"]
                error[begin : begin + part.numel()] += part
    torch.testing.assert_close(decoded + error, put_in, rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("wire", [Int8(), Sign(feedback=1.0), TopK(0.05), LowRank(2)], ids=repr)
def test_the_mean_of_what_was_decoded_converges(wire):
    """The same gradient again and again: the error stays bounded, so the mean comes as near as one likes."""
    passages, flats = open_all(wire, 2), gradients(2)
    exact, total, distance = sum(flats), torch.zeros(SHAPE.numel), {}
    for step in range(1, 201):
        total += exchange(passages, flats)[0][0]
        distance[step] = ((total / step - exact).norm() / exact.norm()).item()
    assert distance[200] < 0.4 * distance[20] + 1e-5
    assert distance[200] < 0.1


@each_lossy
def test_padding_has_no_error(wire):
    passages = open_all(wire, 2)
    for step in range(20):
        found, _ = exchange(passages, gradients(2, step))
        assert (found[0][is_padding()] == 0).all()
    values = passages[0]._error.values
    assert (values[: SHAPE.numel][is_padding()] == 0).all() and (values[SHAPE.numel :] == 0).all()


@each
def test_the_tail_is_left_alone(wire):
    passages = open_all(wire, 2)
    tail = torch.tensor([7.0, math.nan, 9.0])
    for flat in exchange(passages, [torch.cat([flat, tail]) for flat in gradients(2)])[0]:
        assert raw(flat[SHAPE.numel :]) == raw(tail) and torch.isfinite(flat[: SHAPE.numel]).all()


@each
@pytest.mark.parametrize("dtype", some([torch.bfloat16, torch.float64], [torch.bfloat16, torch.float16, torch.float64]))
def test_buckets_of_other_dtypes(wire, dtype):
    shape = dataclasses.replace(SHAPE, dtype=dtype)
    flats = [flat.to(dtype) for flat in gradients(2)]
    found, num_bytes = exchange(open_all(wire, 2, shape), flats)
    assert found[0].dtype == dtype and raw(found[0].view(torch.uint8)) == raw(found[1].view(torch.uint8))
    assert torch.dot(found[0].double(), sum(flats).double()) > 0
    assert num_bytes == wire.bytes_promised(shape, 2)


# Volume


@each
@pytest.mark.parametrize("size", some([1, 3], [1, 2, 3, 4]))
@pytest.mark.parametrize("numel", some([0, 3, 4097], [0, 1, 3, 255, 4097, 300_000]))
def test_bytes_are_as_promised(wire, size, numel):
    shape = BucketShape(numel)
    flats, num_bytes = exchange(open_all(wire, size, shape), [torch.ones(numel)] * size)
    assert num_bytes == wire.bytes_promised(numel, size) == wire.bytes_promised(shape, size)
    assert flats[0].shape == (numel,)
    if not isinstance(wire, LowRank):
        kept = flats[0][flats[0] != 0]
        torch.testing.assert_close(kept, torch.full_like(kept, size), rtol=0.02, atol=0.0)
        assert kept.numel() >= numel * getattr(wire, "ratio", 1)


@pytest.mark.parametrize(
    ("wire", "bytes_per_value"),
    [
        (Full(), 4),
        (Half(), 2),
        (Int8(), 1 + 4 / 256),
        (Int8(block=64), 1 + 4 / 64),
        (Sign(), 1 / 8 + 4 / 256),
        (TopK(), 0.08),
        (TopK(ratio=0.1), 0.8),
        (LowRank(4), 4 * 4 * (1000 + 1000) / 1e6),
    ],
    ids=repr,
)
def test_the_promise_is_what_the_form_says(wire, bytes_per_value):
    shape = BucketShape(1_000_000, (Piece("matrix", 0, (1000, 1000)),))
    for size in (2, 3, 4, 8):
        expected = 2 * (size - 1) / size * bytes_per_value * shape.numel
        assert wire.bytes_promised(shape, size) == pytest.approx(expected, rel=0.02)


# State


@each
def test_a_saved_passage_goes_on_with_the_same_bits(wire):
    passages = open_all(wire, 3)
    for step in range(3):
        exchange(passages, gradients(3, step))
    states = [passage.state_dict() for passage in passages]
    again = open_all(wire, 3)
    for passage, state in zip(again, states, strict=True):
        assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
        passage.load_state_dict(state | {"error.elsewhere": torch.ones(3)})
    for step in range(3, 6):
        ours, theirs = exchange(passages, gradients(3, step)), exchange(again, gradients(3, step))
        assert raw(ours[0][0]) == raw(theirs[0][0])


def undelivered(passages):
    total = {}
    for passage in passages:
        state = passage.state_dict()
        for key, tensor in state.items():
            kind, name = key.split(".", 1)
            if kind == "error":
                total[name] = total.get(name, 0) + tensor
            if kind == "owner_error":
                begin = int(state[f"owner_begin.{name}"])
                total[name] = total[name].index_add(0, torch.arange(begin, begin + len(tensor)), tensor)
    return total


@each_lossy
def test_errors_move_to_other_buckets_without_loss(wire):
    """The order of gradients was learned, so pieces lie elsewhere and are owned by others."""
    passages = open_all(wire, 3)
    for step in range(3):
        exchange(passages, gradients(3, step))
    new_shape = BucketShape(3700, (Piece("c", 0, (40, 3, 10)), Piece("b", 1200, (7,)), Piece("a", 1216, (60, 40))))
    moved = open_all(wire, 3, new_shape)
    for passage, before in zip(moved, passages, strict=True):
        passage.load_state_dict(before.state_dict())
    ours, theirs = undelivered(passages), undelivered(moved)
    assert ours.keys() == theirs.keys() == {"a", "b", "c"}
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@each_lossy
def test_a_changed_loss_scale_rescales_the_error(wire):
    passages = open_all(wire, 2)
    exchange(passages, gradients(2))
    before = undelivered(passages)
    for passage in passages:
        passage.rescale(0.5)
    for name, error in undelivered(passages).items():
        torch.testing.assert_close(error, before[name] / 2)


@each_lossy
def test_a_state_that_does_not_fit_is_refused(wire):
    passage = wire.open(SHAPE, 0, 2)
    with pytest.raises(UsageError, match="has no '"):
        passage.load_state_dict({})
    state = passage.state_dict()
    with pytest.raises(UsageError, match="saved error of 'b' has 3 values"):
        passage.load_state_dict(state | {"error.b": torch.zeros(3)})
    if wire == LowRank():
        with pytest.raises(UsageError, match="rank"):
            passage.load_state_dict(state | {"right.a": torch.zeros(40, 2)})


# Factors


def test_columns_become_orthonormal_even_if_nearly_parallel():
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(3, 50, 4, generator=generator)
    batch[1, :, 1] = batch[1, :, 0] + 1e-5 * batch[1, :, 1]
    batch[2] *= 1e-30
    found = orthonormal(batch)
    torch.testing.assert_close(found.mT @ found, torch.eye(4).expand(3, 4, 4), rtol=0.0, atol=1e-5)


def test_a_column_without_anything_of_its_own_is_zero():
    batch = torch.randn(1, 50, 3, generator=torch.Generator().manual_seed(0))
    batch[0, :, 1] = 2 * batch[0, :, 0]
    found = orthonormal(batch)
    assert (found[0, :, 1] == 0).all()
    torch.testing.assert_close(found[0].norm(dim=0), torch.tensor([1.0, 0.0, 1.0]))
    assert orthonormal(batch * math.nan).isnan().all()


def test_a_matrix_of_low_rank_is_exact_after_a_step():
    generator = torch.Generator().manual_seed(0)
    shape = BucketShape(50 * 40, (Piece("a", 0, (50, 40)),))
    exact = torch.randn(50, 3, generator=generator) @ torch.randn(3, 40, generator=generator)
    passages = open_all(LowRank(4), 2, shape)
    exchange(passages, [exact.flatten() / 2] * 2)
    found, _ = exchange(passages, [exact.flatten() / 2] * 2)
    torch.testing.assert_close(found[0].view(50, 40), exact, rtol=1e-4, atol=1e-4)


def test_directions_come_back_after_steps_without_a_gradient():
    generator = torch.Generator().manual_seed(0)
    shape = BucketShape(50 * 40, (Piece("a", 0, (50, 40)),))
    passages = open_all(LowRank(2), 2, shape)
    exchange(passages, [torch.zeros(shape.numel)] * 2)
    exact = (torch.randn(50, 2, generator=generator) @ torch.randn(2, 40, generator=generator)).flatten()
    for _ in range(3):
        found, _ = exchange(passages, [exact / 2] * 2)
    torch.testing.assert_close(found[0], exact, rtol=1e-3, atol=1e-3)


# Learning


@functools.cache
def least_squares(wire, size=4, steps=200):
    """Final loss of a linear model of 64 to 32 features, learned by `size` workers at a rate that falls to zero."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, 128, 64, generator=generator)
    y = x @ torch.randn(64, 32, generator=generator) + torch.randn(size, 128, 32, generator=generator)
    passages = open_all(wire, size, BucketShape(64 * 32, (Piece("weight", 0, (64, 32)),)))
    weight = torch.zeros(64, 32)
    for step in range(steps):
        grads = [(x[rank].mT @ (x[rank] @ weight - y[rank]) / 128 / size).flatten() for rank in range(size)]
        weight = weight - 0.2 * (1 - step / steps) * exchange(passages, grads)[0][0].view(64, 32)
    return ((x @ weight - y) ** 2).mean().item()


@pytest.mark.parametrize(
    ("wire", "within"),
    [
        (Half("bf16"), 0.001),
        (Half("fp16"), 0.001),
        (Int8(), 0.001),
        (LowRank(4), 0.01),
        (Sign(feedback=1.0), 0.03),
        (TopK(0.05), 0.02),
    ],
    ids=repr,
)
def test_least_squares_learns_as_with_full(wire, within):
    assert least_squares(wire) == pytest.approx(least_squares(Full()), rel=within)


def test_after_sends_plainly_first_and_counts_through_a_restart():
    wire, flat = After(2, Int8()), torch.randn(256)
    bucket = BucketShape(256)
    exchange = Exchange(wire, bucket, None)
    sent = []
    for _ in range(2):
        sent.append(exchange.run(flat.clone()))
    assert all(torch.equal(each, flat) for each in sent)
    again = Exchange(wire, bucket, None)
    again.passage.load_state_dict(exchange.passage.state_dict())
    assert not torch.equal(again.run(flat.clone()), flat)


def test_feedback_is_the_share_that_is_added():
    """With none of it every step is the same; with all of it the steps add up."""
    flat, bucket = torch.randn(512), BucketShape(512)
    for share, error in ((0.0, 0.4), (1.0, 0.2)):
        exchange = Exchange(Sign(feedback=share), bucket, None)
        steps = [exchange.run(flat.clone()) for _ in range(50)]
        assert torch.equal(steps[0], steps[-1]) == (share == 0.0)
        apart = (torch.stack(steps).mean(0) - flat).norm() / flat.norm()
        assert (apart > error) if share == 0.0 else (apart < error)
