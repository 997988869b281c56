"""A bit that flips in one replica is found, its worker is named, the majority's bits are restored; honest ones pass."""

import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from amount import some
from hypothesis import given, settings
from hypothesis import strategies as st
from models import part_of
from torch import nn

import lockstep
from lockstep.replica import fingerprint
from lockstep.replica.fingerprint import fingerprints, raw_bytes
from lockstep.train.integrity import Integrity, TensorPrint, judge

BACKENDS = some(["gloo"], ["shm", "gloo"])


class Net(nn.Module):
    """Dropout, both batch norms, a weight whose bytes do not lie in a row, and buffers of odd dtypes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.plain = nn.BatchNorm2d(8)
        self.dropout = nn.Dropout(0.3)
        self.inner = nn.Linear(8, 9)
        self.synced = lockstep.SyncBatchNorm(9)
        self.head = nn.Linear(9, 5)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("phases", torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        x = self.dropout(self.plain(self.conv(x)).relu()).mean((2, 3))
        return self.head(self.synced(self.inner(x)))


def trained(world, zero=0, **options):
    torch.manual_seed(3)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return lockstep.DataParallel(net, optimizer=optimizer, zero=zero, **options), optimizer


def train(world, model, optimizer, first, last, integrity=None):
    for step in range(first, last + 1):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 3, 6, 6, generator=generator)
        x, y = part_of((x, torch.randint(5, (16,), generator=generator)), world)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if integrity is not None:
            integrity.check_if_due(step)


def tensor_called(label, model, optimizer):
    name, _, where = label.partition(" ")
    named = {**dict(model.module.named_parameters()), **dict(model.module.named_buffers())}
    tensor = named[name.strip("'")]
    return tensor if where in ("", "(buffer)") else optimizer.state[tensor][where.strip("()")]


def flip(label, model, optimizer, bit=22):
    """Flip one bit of the last element."""
    tensor = tensor_called(label, model, optimizer).detach()
    raw = raw_bytes(tensor).clone()
    raw[-tensor.element_size() + bit // 8 % tensor.element_size()] ^= 1 << bit % 8
    tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))


def stopped(call):
    try:
        call()
    except lockstep.ReplicaDiffers as error:
        return str(error), error.ranks
    return None


PLACES = [
    "'conv.weight'",
    "'head.bias'",
    "'inner.weight' (exp_avg)",
    "'inner.bias' (exp_avg_sq)",
    "'plain.running_var' (buffer)",
    "'synced.running_mean' (buffer)",
    "'phases' (buffer)",
]


def flipped(world, faulty, labels, policy):
    model, optimizer = trained(world)
    checker = Integrity(model, optimizer, every=2, policy=policy)
    train(world, model, optimizer, 1, 3, checker)
    found = []
    for label in labels:
        if world.rank == faulty:
            flip(label, model, optimizer)
        found.append(stopped(lambda: checker.check_if_due(4)))
        if world.rank == faulty:
            flip(label, model, optimizer)
    assert not checker.check() and checker.held()
    return found


@pytest.mark.parametrize("workers, faulty", [(3, 0), (3, 2), (4, 1)])
def test_the_worker_and_the_tensor_are_named(pool, workers, faulty):
    for found in pool.run(workers, flipped, faulty, PLACES, "stop"):
        for label, (text, ranks) in zip(PLACES, found, strict=True):
            assert ranks == (faulty,)
            assert re.match(rf"worker {faulty} \(pid \d+ on .+\) differs from the majority of {workers} workers", text)
            assert f"after step 4: first in {label}, in 1 of " in text


@pytest.mark.parametrize("policy", ["stop", "repair"])
def test_of_two_it_cannot_be_told_which_is_right(pool, policy):
    for found in pool.run(2, flipped, 1, PLACES, policy):
        for label, (text, ranks) in zip(PLACES, found, strict=True):
            assert ranks == (0, 1)
            assert f"the replicas of worker 0 and worker 1 differ after step 4: first in {label}" in text
            assert "With two workers it cannot be told which is right" in text


def flipped_in_training(world, label):
    model, optimizer = trained(world)
    checker = Integrity(model, optimizer, every=5)
    train(world, model, optimizer, 1, 6, checker)
    if world.rank == 1:
        flip(label, model, optimizer)
    train(world, model, optimizer, 7, 9, checker)
    return stopped(lambda: train(world, model, optimizer, 10, 11, checker))


def test_a_flip_is_found_some_steps_later(pool):
    for label in ("'head.weight'", "'head.weight' (exp_avg)", "'synced.running_var' (buffer)"):
        for text, ranks in pool.run(3, flipped_in_training, label):
            assert ranks == (1,) and "after step 10: first in " in text


def camps(world, policy):
    model, optimizer = trained(world)
    train(world, model, optimizer, 1, 1)
    if world.rank % 2:
        flip("'head.bias'", model, optimizer)
    return stopped(Integrity(model, optimizer, policy=policy).check)


@pytest.mark.parametrize("policy", ["stop", "repair"])
def test_half_of_the_workers_are_no_majority(pool, policy):
    for text, ranks in pool.run(4, camps, policy):
        assert ranks == (0, 1, 2, 3)
        assert "the replicas of workers 0, 2 and workers 1, 3 differ: first in 'head.bias', in 1 of" in text
        assert "Without a majority" in text


def everything(model, optimizer):
    held = [*model.module.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
    return [raw_bytes(tensor).numpy().tobytes() for tensor in held]


def repaired(world, flips):
    model, optimizer = trained(world)
    checker = Integrity(model, optimizer, every=3, policy="repair")
    train(world, model, optimizer, 1, 3, checker)
    for rank, label in flips:
        if world.rank == rank:
            flip(label, model, optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = checker.check()
    train(world, model, optimizer, 4, 9, checker)
    return found, [str(one.message) for one in caught], everything(model, optimizer)


def test_repair_restores_every_bit_and_training_goes_on(pool):
    """Two workers are wrong, each somewhere else: every tensor has a majority of its own."""
    flips = [(1, label) for label in PLACES] + [(2, "'head.weight'"), (2, "'head.weight' (step)")]
    (_, _, expected), *_ = pool.run(3, repaired, [])
    for rank, (found, said, bits) in enumerate(pool.run(3, repaired, flips)):
        firsts = {rank: (labels[0], len(labels)) for rank, labels in found.items()}
        assert firsts == {1: ("'conv.weight'", 7), 2: ("'head.weight'", 2)}
        assert bits == expected
        assert len(said) == (rank == 0)
    assert "Repaired from the majority." in pool.run(3, repaired, flips[:1])[0][1][0]


def honest(world, zero):
    model, optimizer = trained(world, zero)
    checker = Integrity(model, optimizer, every=1)
    train(world, model, optimizer, 1, 40, checker)
    assert not checker.check()
    return len(checker.held())


NUM_PARAMS, NUM_BUFFERS, NUM_STATES = 10, 8, 30


@pytest.mark.parametrize(
    ("workers", "zero"),
    some([(3, 0), (2, 1), (3, 2), (2, 3)], [(2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (3, 2)]),
)
def test_nothing_is_reported_of_honest_training(pool, workers, zero):
    expected = NUM_BUFFERS
    if zero == 0:
        expected += NUM_PARAMS + NUM_STATES
    elif zero < 3 and pool._backend == "gloo":
        expected += NUM_PARAMS
    assert set(pool.run(workers, honest, zero)) == {expected}


def flipped_with_zero(world, zero):
    """In a copy that is there on every worker until the next update."""
    model, optimizer = trained(world, zero)
    checker = Integrity(model, optimizer, policy="repair")
    train(world, model, optimizer, 1, 3)
    if world.rank == 2:
        flip("'inner.weight'", model, optimizer)
    found = checker.check()
    train(world, model, optimizer, 4, 5)
    return found, everything(model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("zero", [1, 2])
def test_copies_beside_a_split_optimizer_are_compared(started_pool, zero):
    (_, expected), *others = started_pool.run(3, flipped_with_zero, zero, backend="gloo")
    for found, bits in others:
        assert found == {2: ["'inner.weight'"]} and bits == expected


def state_on_one_worker(world, policy):
    model, optimizer = trained(world)
    train(world, model, optimizer, 1, 1)
    if world.rank == 1:
        optimizer.state.pop(model.module.head.bias)
    checker = Integrity(model, optimizer, policy=policy)
    without_state = Integrity(model, None)
    assert not without_state.check()
    return stopped(checker.check), len(without_state.held())


def test_state_that_somebody_lacks_cannot_be_repaired(pool):
    for policy in ("stop", "repair"):
        for (text, ranks), compared in pool.run(3, state_on_one_worker, policy):
            assert ranks == (1,) and "first in 'head.bias' (exp_avg), in 3 of" in text
            assert "'head.bias' (exp_avg) is not there on every worker" in text
            assert compared == NUM_PARAMS + NUM_BUFFERS


def left_alone(world):
    """Buffers that are not kept equal are not compared; a sparse momentum is."""
    model, optimizer = trained(world, broadcast_buffers=False)
    train(world, model, optimizer, 1, 2)
    without_state = Integrity(model, None)
    assert not without_state.check()
    compared = len(without_state.held())
    table = lockstep.DataParallel(nn.Embedding(20, 3, sparse=True))
    sgd = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        table(torch.arange(3) + world.rank).sum().backward()
        sgd.step()
        sgd.zero_grad()
    checker = Integrity(table, sgd)
    assert not checker.check()
    first = len(checker.held())
    if world.rank == 1:
        sgd.state[table.module.weight]["momentum_buffer"]._values()[0] += 1
    return compared, first, stopped(checker.check)


def test_only_what_is_kept_equal_is_compared(pool):
    for compared, first, (text, ranks) in pool.run(3, left_alone):
        assert (compared, first) == (NUM_PARAMS + 3, 3)
        assert ranks == (1,) and "first in 'weight' (momentum_buffer, values)" in text


def called(world):
    model, optimizer = trained(world)
    for wrong in ({"policy": "ignore"}, {"policy": None}, {"every": -1}, {"every": 2.5}, {"every": True}):
        with pytest.raises(lockstep.UsageError, match="Integrity"):
            Integrity(model, optimizer, **wrong)
    flip("'head.bias'", model, optimizer, bit=world.rank)  # Everybody is wrong.
    for off in (None, 0):
        Integrity(model, optimizer, every=off).check_if_due(0)
    Integrity(model, optimizer).check_if_due(49)
    return stopped(lambda: Integrity(model, optimizer).check_if_due(100))


def test_when_it_is_due(pool):
    assert all("after step 100" in text for text, _ in pool.run(2, called))
    assert pool.run(1, called) == [None]


# Without workers

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.int32, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
]  # fmt: skip


def all_flips(raw):
    """`raw` with each of its bits flipped, one at a time."""
    for place in range(raw.numel()):
        for bit in range(8):
            other = raw.clone()
            other[place] ^= 1 << bit
            yield other


@pytest.mark.parametrize("numel", [1, 3, 9])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype, numel):
    num_bytes = torch.zeros(numel, dtype=dtype).nbytes
    raw = torch.randint(256, (num_bytes,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    variants = [raw, *all_flips(raw)]  # All differ from one another too: two flips do not cancel.
    assert len(set(fingerprints([one.view(dtype) for one in variants]))) == len(variants)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, fingerprint.SMALL_BYTES + 5000), st.integers(0, 2**31), st.data())
def test_a_bit_anywhere_counts(numel, seed, data):
    raw = torch.randint(256, (numel,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    other = raw.clone()
    other[data.draw(st.integers(0, numel - 1))] ^= 1 << data.draw(st.integers(0, 7))
    first, second, again = fingerprints([raw, other, raw])
    assert first == again != second


@given(st.integers(0, 40), st.sampled_from(DTYPES))
@settings(max_examples=40, deadline=None)
def test_memory_layout_does_not_count(numel, dtype):
    size = torch.zeros(1, dtype=dtype).element_size()
    values = torch.randint(2, (numel * size,), dtype=torch.uint8).view(dtype).reshape(numel, 1)
    spread = torch.stack([values, values], 2)[..., 1]
    shifted = torch.cat([values.new_zeros(1, 1), values])[1:]
    assert len(set(fingerprints([values, spread, shifted]))) == 1
    square = torch.rand(2, 3, 4, 5)
    channels_last = square.to(memory_format=torch.channels_last)
    assert len(set(fingerprints([square, channels_last]))) == 1


def test_bits_are_compared_and_not_values():
    zero, minus, nan = torch.zeros(3), -torch.zeros(3), torch.full((3,), torch.nan)
    prints = fingerprints([zero, minus, nan, nan.clone(), torch.zeros(0), torch.tensor(1.0), torch.ones(1)])
    assert prints[0] != prints[1] and prints[2] == prints[3] and prints[5] == prints[6]
    page = torch.randn(2, 1024)
    assert len(set(fingerprints([page, page.flip(0)]))) == 2


@pytest.mark.parametrize("name, value", [("TABLE_ROWS", 3), ("SMALL_BYTES", 0), ("SLAB_ROWS", 4)])
def test_how_it_is_added_up_does_not_count(monkeypatch, name, value):
    tensors = [torch.randn(1000 * n + n) for n in range(7)] + [torch.randn(50_001).half()]
    together = fingerprints(tensors)
    monkeypatch.setattr(fingerprint, name, value)
    assert fingerprints(tensors) == together and fingerprints([]) == []


def test_the_majority_is_sought_tensor_by_tensor():
    good, bad, other = (TensorPrint((3,), "torch.float32", value) for value in (1, 2, 3))
    vote = judge([{"a": bad, "b": good}, {"a": good, "b": good}, {"a": good, "b": bad}])
    assert vote.wrong == {0: ["a"], 2: ["b"]} and vote.sources == {"a": 1, "b": 0}
    assert judge([{"a": good}, {"a": bad}, {"a": other}]).undecided == ["a"]
    assert judge([{"a": good}, {"a": good}, {"a": TensorPrint((4,), "torch.float32", 1)}]).misfits == ["a"]
    assert judge([{"a": good}] * 3).wrong == {}


def test_an_error_can_be_sent():
    error = pickle.loads(pickle.dumps(lockstep.ReplicaDiffers("text", (2,))))
    assert (str(error), error.ranks) == ("text", (2,))
