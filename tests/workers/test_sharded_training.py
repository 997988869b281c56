"""The three lines, as users write them: a sharded loader, plain `loss.backward()`, evaluation over the workers."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import build, difference, weights_of
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import world as worlds

pytestmark = pytest.mark.filterwarnings("ignore:worker . has no sample of this batch")


def dataset(name, size):
    generator = torch.Generator().manual_seed(21)
    return TensorDataset(*type(build(name)).batch(size, generator, torch.double))


def train(world, name, size, batch_size, accumulate=1):
    """Two epochs, shuffled; the last batch is short, so that some parts are uneven, and some workers have none."""
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
            seen += x.flatten(1)[: loader.num_samples, 0].tolist()
            sizes.append(loader.num_samples)
    return weights_of(net), world.gather(seen), sizes, evaluate(world, model, name, size)


def evaluate(world, model, name, size):
    loader = lockstep.shard(DataLoader(dataset(name, size), batch_size=8))
    model.eval()
    right, loss, count = 0, 0.0, 0
    with torch.no_grad():
        for x, y in loader:
            out, y = model(x)[: loader.num_samples], y[: loader.num_samples]
            right += int((out.argmax(1) == y).sum())
            loss += F.cross_entropy(out, y, reduction="sum").item()
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
            assert any(0 in sizes for _, _, sizes, _ in results), "this case is meant to have a stand-in"


def dropout_masks(world):
    model = lockstep.DataParallel(torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout()))
    return (model(torch.ones(1, 4)) == 0).tolist()


def test_dropout_differs_between_workers_and_repeats_between_runs(pool):
    masks = pool.run(3, dropout_masks)
    assert masks[0] != masks[1] != masks[2] != masks[0]
    assert masks == pool.run(3, dropout_masks)


# --- Batches that are not used one after the other ---


def ahead(loader, change):
    """Each batch when the next has been read, as a prefetcher does."""
    batches = iter(loader)
    held = next(batches)
    for batch in batches:
        yield change(held)
        held = batch
    yield change(held)


def as_it_is(batch):
    return batch


def copied(batch):
    return [part.clone() for part in batch]


class Reshaping(torch.nn.Module):
    """Fails on an empty batch, as most transformers do."""

    def __init__(self):
        super().__init__()
        self.gpt = build("gpt", torch.double)

    def forward(self, tokens):
        return self.gpt(tokens.view(tokens.shape[0], 2, -1).view(tokens.shape[0], -1))


def train_ahead(world, change):
    model = lockstep.DataParallel(Reshaping())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = lockstep.shard(DataLoader(dataset("gpt", 41), batch_size=8, shuffle=True))
    means = []
    for _ in range(2):
        for x, y in ahead(loader, change) if change is not None else loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if change is None:
                means.append((world.mean(loss.item(), weight=len(x)), world.sum(len(x))))
    return weights_of(model.module), means


@pytest.mark.parametrize("change", [None, as_it_is, copied], ids=["in turn", "ahead", "ahead and changed"])
def test_batches_read_ahead_count_by_their_own_weight(pool, change):
    ((expected, means),) = pool.run(1, train_ahead, change)
    for workers in (2, 3):
        for weights, own_means in pool.run(workers, train_ahead, change):
            assert difference(weights, expected) < 1e-11
            assert own_means == [(pytest.approx(mean), count) for mean, count in means]


def counts_of_batches(world, read):
    """How many samples each batch has on all workers, by what the loop counts; and what is warned of."""
    worlds._Current.has_warned_of_ahead = False
    model = lockstep.DataParallel(build("mlp", torch.double))
    loader = lockstep.shard(DataLoader(dataset("mlp", 9), batch_size=4))
    counts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = {"in turn": iter, "ahead": lambda batches: ahead(batches, as_it_is), "whole": list}[read](loader)
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            counts.append((world.sum(len(x)), world.mean(1.0, weight=len(x))))
    return counts, [str(warning.message) for warning in caught if "read ahead of the loop" in str(warning.message)]


@pytest.mark.parametrize("read", ["in turn", "ahead", "whole"])
def test_a_stand_in_that_was_read_ahead_is_not_counted_without_a_word(pool, read):
    (counts, none), (_, said) = pool.run(2, counts_of_batches, read)
    assert none == [] and counts == [(4, 1.0), (4, 1.0), (1 if read == "in turn" else 2, 1.0)]
    assert len(said) == (0 if read == "in turn" else 1), said


def train_whole(world, change, total, is_told):
    """Train on batches that were all read before; the weights then, or what is raised."""
    model = lockstep.DataParallel(build("mlp", torch.double))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = lockstep.shard(DataLoader(dataset("mlp", total), batch_size=4))
    try:
        for (x, y), num_samples in [(change(batch), loader.num_samples) for batch in loader]:
            loss = F.cross_entropy(model(x), y)
            lockstep.backward(loss, weight=num_samples) if is_told else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except lockstep.UsageError as error:
        return str(error)
    return weights_of(model.module)


@pytest.mark.parametrize(
    ("change", "total", "is_told"),
    [(copied, 9, True), (copied, 8, False), (as_it_is, 9, False)],
    ids=["changed and told", "changed, all alike", "as they are"],
)
def test_batches_that_were_all_read_before_the_loop_count_by_their_own_weight(pool, change, total, is_told):
    (expected,) = pool.run(1, train_whole, change, total, is_told)
    for weights in pool.run(2, train_whole, change, total, is_told):
        assert difference(weights, expected) < 1e-11


def test_batches_that_were_all_read_and_changed_before_the_loop_are_refused(pool):
    for said in pool.run(2, train_whole, copied, 9, False):
        assert "its weight is lost" in said


def train_zipped(world, totals, in_one):
    """Two loaders side by side; their losses in one pass, or each in its own."""
    model = lockstep.DataParallel(build("mlp", torch.double))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loaders = [lockstep.shard(DataLoader(dataset("mlp", total), batch_size=size)) for total, size in totals]
    for batches in zip(*loaders, strict=True):
        losses = [F.cross_entropy(model(x.clone()), y) for x, y in batches] if in_one else []
        if in_one:
            sum(losses).backward()
        else:
            for x, y in batches:
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(model.module)


@pytest.mark.parametrize(("totals", "in_one"), [(((21, 4), (21, 4)), True), (((21, 4), (31, 6)), False)])
def test_two_loaders_side_by_side(pool, totals, in_one):
    (expected,) = pool.run(1, train_zipped, totals, in_one)
    for workers in (2, 3):
        for weights in pool.run(workers, train_zipped, totals, in_one):
            assert difference(weights, expected) < 1e-11


def two_weights_in_one_pass(world):
    model = lockstep.DataParallel(build("mlp", torch.double))
    long, short = (lockstep.shard(DataLoader(dataset("mlp", total), batch_size=8)) for total in (8, 7))
    for (x, y), (other, _) in zip(long, short, strict=True):
        loss = F.cross_entropy(model(x), y) + model(other).mean()
        with pytest.raises(lockstep.UsageError, match="4 of 7 and 4 of 8 samples" if world.rank == 0 else "3 of 7 and"):
            loss.backward()
        if world.rank == 0:
            model.zero_grad()
    return True


def test_one_loss_of_two_weights_is_refused(pool):
    assert pool.run(2, two_weights_in_one_pass) == [True, True]


# --- Data sets that differ ---


class Table(torch.utils.data.Dataset):
    """As Hugging Face's, as far as it is looked at."""

    _fingerprint = "of the rows"

    def __init__(self, rows):
        self.rows = list(rows)

    def __len__(self):
        return len(self.rows)

    def with_format(self, kind):
        return self

    def __getitem__(self, which):
        return Table(self.rows[which])

    def to_pydict(self):
        return {"row": self.rows}


def shards_of(world, kind, start, stop):
    with pytest.raises(lockstep.UsageError) as raised:
        lockstep.shard(DataLoader(kind(range(10)[start + 5 * world.rank : stop + 5 * world.rank]), batch_size=2))
    lockstep.shard(DataLoader(kind(range(10)), batch_size=2))
    return str(raised.value)


@pytest.mark.parametrize(("kind", "stop", "said"), [(list, 6, "[6, 5] samples"), (Table, 5, "first row differs")])
def test_parts_of_a_data_set_are_refused(pool, kind, stop, said):
    assert all(said in text for text in pool.run(2, shards_of, kind, 0, stop))


# --- A loader that is not sharded ---


def warned_of(world, shards, shifts):
    model = lockstep.DataParallel(build("mlp", torch.double))
    loader = DataLoader(dataset("mlp", 24), batch_size=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in lockstep.shard(loader) if shards else loader:
            F.cross_entropy(model(x + world.rank if shifts else x), y).backward()
    return [str(warning.message) for warning in caught if "same samples" in str(warning.message)]


def test_workers_that_train_on_the_same_samples_are_told_once(pool):
    (said,), none = pool.run(2, warned_of, False, False)
    assert said.startswith("all 2 workers train on the same samples") and "lockstep.shard(loader)" in said and not none
    for shards, shifts in ((True, False), (False, True)):
        assert pool.run(2, warned_of, shards, shifts) == [[], []]
    assert pool.run(1, warned_of, False, False) == [[]]
