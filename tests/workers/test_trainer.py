"""The trainer's loop: resuming, uneven batches, weights, streams, loader processes, failures, metrics."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from amount import some
from models import GPT, MLP
from test_trainer_bits import Samples, digest, feed, loss_fn, make, train
from torch import nn

import lockstep

BACKENDS = some(["gloo"], ["shm", "gloo"])


# Stop and go on


def stop_and_go_on(world, kind, zero, folder, first, last):
    trainer = make(kind, "adamw", zero)
    if first:
        trainer.load(folder)
    assert trainer.steps == first
    for batch in feed(trainer, kind):
        trainer.step(batch)
        if trainer.steps == last:
            break
    trainer.save(folder)
    return digest(trainer)


@pytest.mark.parametrize("kind", some(["cnn"], ["mlp", "cnn", "gpt"]))
def test_resumed_on_another_number_of_workers(pool, tmp_path, kind):
    """As if it had never stopped: in mid-epoch, with another split, the data at the next sample."""
    expected, _ = pool.run(1, train, kind, "adamw", 0, 15)[0]
    folder = str(tmp_path)
    pool.run(3, stop_and_go_on, kind, 1, folder, 0, 5)
    pool.run(2, stop_and_go_on, kind, 3, folder, 5, 10)
    for found in pool.run(4, stop_and_go_on, kind, 0, folder, 10, 15):
        assert found == expected


def by_state_dict(world, zero):
    whole = make("gpt", "adamw")
    for _, batch in zip(range(6), feed(whole, "gpt"), strict=False):
        whole.step(batch)
    stopped = make("gpt", "adamw", zero)
    for _, batch in zip(range(3), feed(stopped, "gpt"), strict=False):
        stopped.step(batch)
    state = stopped.state_dict()
    resumed = make("gpt", "adamw", 3 - zero)
    resumed.load_state_dict(state)
    for _, batch in zip(range(3), feed(resumed, "gpt"), strict=False):
        resumed.step(batch)
    return digest(whole), digest(resumed)


@pytest.mark.parametrize("zero", [0, 3])
def test_state_dict(pool, zero):
    for whole, resumed in pool.run(2, by_state_dict, zero):
        assert whole == resumed


def several_feeds(world, stop_at, state):
    trainer = make("mlp", "sgd")
    if state is not None:
        trainer.load_state_dict(state)
    seen = []
    for count in (30, 50):
        for batch in trainer.batches(Samples("mlp", count), batch_size=16, epochs=2):
            seen.append((count, batch.epoch, batch.number))
            trainer.step(batch)
            if trainer.steps == stop_at:
                return seen, trainer.state_dict(), digest(trainer)
    return seen, None, digest(trainer)


@pytest.mark.parametrize("stop_at", [3, 4, 9])
def test_feeds_go_on_where_they_were(pool, stop_at):
    everything, _, expected = pool.run(1, several_feeds, None, None)[0]
    before, state, _ = pool.run(2, several_feeds, stop_at, None)[0]
    after, _, found = pool.run(3, several_feeds, None, state)[0]
    assert before + after == everything
    assert found == expected


# Batches of every size


def small_batches(world, zero, sizes):
    trainer = make("gpt", "adamw", zero)
    dataset = Samples("gpt", 40)
    losses = []
    for step, size in enumerate(sizes):
        x, y = (torch.stack(column) for column in zip(*(dataset[i] for i in range(step, step + size)), strict=True))
        out = trainer.step((x, y))
        losses.append((out.loss, out.grad_norm, out.weight))
        assert out.weight == size
    return losses, digest(trainer)


@pytest.mark.parametrize(("workers", "zero"), some([(8, 0), (3, 1), (5, 3)], [(3, 0), (8, 0), (3, 1), (5, 3)]))
def test_batches_with_fewer_samples_than_shards(pool, workers, zero):
    """Some workers have fewer shards than others, some have none with samples; none may hang or count."""
    sizes = [20, 3, 1, 11, 8, 2]
    expected = pool.run(1, small_batches, 0, sizes)[0]
    for found in pool.run(workers, small_batches, zero, sizes):
        assert found == expected


def weighed(world):
    """Token losses: shards have different numbers of tokens, one has none."""
    torch.manual_seed(3)
    net = GPT()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def token_loss(model, shard):
        x, y, mask = shard
        losses = F.cross_entropy(model(x), y, reduction="none") * mask
        return losses.sum() / mask.sum().clamp(min=1), mask.sum()

    trainer = lockstep.Trainer(net, optimizer, token_loss, shards=4, seed=1)
    generator = torch.Generator().manual_seed(2)
    outs = []
    for _ in range(4):
        x, y = GPT.batch(8, generator, torch.float)
        mask = (torch.rand(y.shape, generator=generator) < 0.5).float()
        mask[2:4] = 0
        outs.append(trainer.step((x, y, mask)))
    return [(out.loss, out.weight) for out in outs], digest(trainer), [p.detach().numpy() for p in net.parameters()]


def test_weights_of_tokens(pool):
    expected = pool.run(1, weighed)[0]
    for workers in some((3,), (2, 3, 4)):
        for found in pool.run(workers, weighed):
            assert found[:2] == expected[:2]
    torch.manual_seed(3)
    net = GPT()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    for loss, weight in expected[0]:
        x, y = GPT.batch(8, generator, torch.float)
        mask = (torch.rand(y.shape, generator=generator) < 0.5).float()
        mask[2:4] = 0
        plain = (F.cross_entropy(net(x), y, reduction="none") * mask).sum() / mask.sum()
        assert (loss, weight) == (pytest.approx(plain.item(), rel=1e-5), mask.sum())
        plain.backward()
        optimizer.step()
        optimizer.zero_grad()
    for param, found in zip(net.parameters(), expected[2], strict=True):
        torch.testing.assert_close(param.detach(), torch.from_numpy(found), rtol=1e-4, atol=1e-6)


def one_shard(world):
    trainer = lockstep.Trainer(
        net := MLP(), torch.optim.AdamW(net.parameters()), loss_fn, shards=1, clip=1.0, check_every=0
    )
    plain = MLP()
    plain.load_state_dict(net.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters())
    for step in range(5):
        x, y = MLP.batch(16, torch.Generator().manual_seed(step), torch.float)
        out = trainer.step((x, y))
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert out.loss == loss.item() and out.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert out.step == step + 1 and out.lr == 1e-3 and not out.skipped
    return max((a - b).abs().max().item() for a, b in zip(net.parameters(), plain.parameters(), strict=True))


def test_one_shard_on_one_worker_is_the_plain_loop(pool):
    assert pool.run(1, one_shard)[0] < 1e-6


# Things that go wrong


def shard_fails(world, zero, failing_shard):
    trainer = make("gpt", "adamw", zero)
    calls = 0

    def sometimes(model, shard):
        nonlocal calls
        calls += 1
        if trainer.steps == 3 and not hasattr(trainer, "failed") and failing_shard in owned and (
            calls - 1 - before == owned.index(failing_shard)
        ):  # fmt: skip
            trainer.failed = True
            raise ArithmeticError("bad sample")
        return loss_fn(model, shard)

    trainer._stepper._options = dataclasses.replace(trainer._stepper._options, loss_fn=sometimes)
    owned = list(range(*trainer._options.shard_range))
    outcomes = []
    for batch in feed(trainer, "gpt"):
        before = calls
        try:
            trainer.step(batch)
        except (ArithmeticError, lockstep.StepVoid) as error:
            outcomes.append((trainer.steps, type(error).__name__))
        if trainer.steps == 6:
            break
    return outcomes, digest(trainer)


@pytest.mark.parametrize(("zero", "shard"), some([(0, 7), (2, 4)], [(0, 0), (0, 7), (2, 4)]))
def test_a_shard_that_fails_makes_the_step_void(pool, zero, shard):
    """The step happens nowhere, and training goes on with the next batch, with the same bits on any number."""
    alone, expected = pool.run(1, shard_fails, 0, shard)[0]
    assert alone == [(3, "ArithmeticError")]
    results = pool.run(2, shard_fails, zero, shard)
    assert {found for _, found in results} == {expected}
    whose = shard // 4
    assert [results[rank][0][0][1] for rank in (whose, 1 - whose)] == ["ArithmeticError", "StepVoid"]


def overflows(world, zero):
    torch.manual_seed(3)
    net = MLP()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=4, zero=zero, scaler=scaler, seed=1)
    skipped = []
    for step in range(6):
        x, y = MLP.batch(16, torch.Generator().manual_seed(step), torch.float)
        x[6] = torch.inf if step == 2 else x[6]  # In shard 1.
        skipped.append(trainer.step((x, y)).skipped)
    return skipped, scaler.get_scale(), digest(trainer)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_overflow_skips_the_step_on_all(pool, zero):
    expected = pool.run(1, overflows, 0)[0]
    assert expected[:2] == ([False, False, True, False, False, False], 32.0)
    for found in pool.run(3, overflows, zero):
        assert found == expected


def flipped(world, policy):
    torch.manual_seed(3)
    net = MLP()
    trainer = lockstep.Trainer(
        net, torch.optim.AdamW(net.parameters()), loss_fn, shards=3, check_every=4, on_difference=policy, seed=1
    )
    for step in range(12):
        if step == 5 and world.rank == 1:
            bits = net.net[2].weight.data.view(torch.int32)
            bits[3, 4] ^= 1 << 7
        try:
            trainer.step(MLP.batch(12, torch.Generator().manual_seed(step), torch.float))
        except lockstep.LockstepError as error:
            return trainer.steps, str(error)
    return trainer.steps, digest(trainer)


def test_a_flipped_bit_is_found_and_named(pool):
    for steps, text in pool.run(3, flipped, "stop"):
        assert steps == 8 and "worker 1" in text and "net.2.weight" in text
    assert len({found for _, found in pool.run(3, flipped, "repair")}) == 1


def misused(world):
    net = MLP()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    texts = []

    def refused(make):
        with pytest.raises((lockstep.UsageError, lockstep.CheckpointError)) as caught:
            make()
        texts.append(str(caught.value))

    refused(lambda: lockstep.Trainer(net, "sgd", loss_fn, shards=2))
    refused(lambda: lockstep.Trainer(net, sgd, None, shards=2))
    refused(lambda: lockstep.Trainer(net, sgd, loss_fn, shards=0))
    refused(lambda: lockstep.Trainer(net, sgd, loss_fn, shards=1))
    refused(lambda: lockstep.Trainer(net, sgd, loss_fn, shards=2, clip=-1))
    refused(lambda: lockstep.Trainer(net, sgd, loss_fn, shards=2, threads=0))
    refused(lambda: lockstep.Trainer(lockstep.SyncBatchNorm(3), sgd, loss_fn, shards=2))
    refused(lambda: lockstep.Trainer(net, sgd, loss_fn, shards=2, cuda_graph="yes"))
    alone = lockstep.LocalSGD(every=2)
    refused(lambda: lockstep.Trainer(net, sgd, loss_fn, shards=2, cuda_graph=True, strategy=alone))
    trainer = lockstep.Trainer(net, sgd, lambda model, shard: model(shard), shards=2)
    refused(lambda: trainer.step(torch.randn(4, 12)))
    refused(lambda: trainer.batches(Samples("mlp", 8), batch_size=0))
    refused(lambda: trainer.batches(7, batch_size=4))
    refused(lambda: trainer.evaluate(Samples("mlp", 8), lambda model, shard: "good"))
    state = trainer.state_dict()
    refused(lambda: lockstep.Trainer(net, sgd, loss_fn, shards=4).load_state_dict(state))
    refused(lambda: lockstep.Trainer(net, sgd, loss_fn, shards=2, threads=2).load_state_dict(state))
    return texts


def test_misuse_is_told(pool):
    words = [
        "torch.optim.Optimizer", "function of", "one or more shards", "at most 1 workers", "above 0", "at least one",
        "statistics of each shard", "True or False", "Leave one of the two out", "must return the mean loss",
        "at least one sample", "__getitem__", "must return a number", "shards=2", "threads=1",
    ]  # fmt: skip
    for texts in pool.run(2, misused):
        assert all(word in text for word, text in zip(words, texts, strict=True)), texts


# Metrics


def metrics(world, zero, count):
    trainer = make("gpt", "adamw", zero)

    def metric_fn(model, shard):
        x, y = shard
        assert not model.training and not torch.is_grad_enabled()
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "hits": (logits.argmax(1) == y).float().mean()}

    found = trainer.evaluate(Samples("gpt", count), metric_fn, batch_size=16)
    only = trainer.evaluate(Samples("gpt", count), lambda model, shard: (1.0, len(shard[0])), batch_size=16)
    assert trainer.model.training and only == 1.0
    return found


@pytest.mark.parametrize("count", [3, 61])
def test_metrics_count_every_sample_once(pool, count):
    expected = pool.run(1, metrics, 0, count)[0]
    for workers, zero in some([(3, 3), (5, 0)], [(2, 0), (3, 3), (5, 0)]):
        assert pool.run(workers, metrics, zero, count) == [expected] * workers
    torch.manual_seed(3)
    net = make("gpt", "adamw").model.eval()
    x, y = Samples("gpt", count).x, Samples("gpt", count).y
    with torch.no_grad():
        assert expected["loss"] == pytest.approx(F.cross_entropy(net(x), y).item(), rel=1e-5)
        assert expected["hits"] == pytest.approx((net(x).argmax(1) == y).float().mean().item(), rel=1e-6)


# The way of a shard


class Traced(nn.Linear):
    """Knows the functions of ours that its forward pass was called through."""

    def forward(self, x):
        frame, self.ways = sys._getframe(), []
        while frame is not None:
            if Path(frame.f_code.co_filename).is_relative_to(Path(lockstep.__file__).parent):
                self.ways.append(frame.f_code.co_qualname)
            frame = frame.f_back
        return super().forward(x)


def way_of_a_shard(world, strategy):
    net = Traced(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    trainer = lockstep.Trainer(net, optimizer, lambda model, x: model(x).mean(), shards=2, strategy=strategy)
    for batch in trainer.batches([torch.ones(3)] * 2, batch_size=2):
        trainer.step(batch)
    return net.ways[: net.ways.index("Trainer.step") + 1]


def test_few_functions_stand_between_a_step_and_the_module(pool):
    for strategy in (None, lockstep.LocalSGD(every=2), lockstep.Async()):
        (way,) = pool.run(1, way_of_a_shard, strategy)
        assert len(way) <= 4, way
