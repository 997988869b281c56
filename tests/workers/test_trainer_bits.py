"""The same bits on any number of workers: hashes of weights, buffers and optimizer state after training."""

import functools
import hashlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from amount import some
from models import CNN, GPT, MLP
from torch import nn

import lockstep
from lockstep.wire import Half
from lockstep.wire.plain import DTYPES

BACKENDS = ["shm", "gloo"]
SHARDS = 8
(STEPS,) = some([12], [30])  # Three epochs, each with a last batch that is smaller.


class Dropped(nn.Module):
    """A model with dropout before its head, and one of the batch's own kind."""

    def __init__(self, kind):
        super().__init__()
        self.net = kind()
        self.batch = kind.batch
        for module in list(self.net.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.GELU | nn.ReLU):
                    setattr(module, name, nn.Sequential(child, nn.Dropout(0.2)))

    def forward(self, x):
        return self.net(x)


KINDS = {"mlp": MLP, "cnn": functools.partial(Dropped, CNN), "gpt": functools.partial(Dropped, GPT)}


class Samples(torch.utils.data.Dataset):
    """Made of random numbers, and changed by random numbers each time one is fetched."""

    def __init__(self, kind, count):
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = (CNN if kind == "cnn" else GPT if kind == "gpt" else MLP).batch(count, generator, torch.float)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return (x + 0.01 * torch.randn_like(x) if x.is_floating_point() else x), self.y[index]


def loss_fn(model, shard):
    x, y = shard
    return F.cross_entropy(model(x), y)


def make(kind, optimizer, zero=0, **options):
    torch.manual_seed(3)
    net = KINDS[kind]()
    if optimizer == "sgd":
        chosen = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    else:
        chosen = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(chosen, STEPS)
    return lockstep.Trainer(
        net, chosen, loss_fn, shards=SHARDS, clip=0.5, zero=zero, scheduler=scheduler, seed=7, bucket_cap_mb=0.01,
        **options,
    )  # fmt: skip


def digest(trainer):
    sha = hashlib.sha256()
    for name, tensor in sorted(trainer.state_dict()["tensors"].items()):
        sha.update(name.encode() + tensor.numpy().tobytes())
    return sha.hexdigest()


def feed(trainer, kind):
    # 150 samples in batches of 40: the last one has 30, and its 8 shards have 4 or 3.
    return trainer.batches(Samples(kind, 150), batch_size=40, epochs=100)


def train(world, kind, optimizer, zero, steps=STEPS, wire=None):
    """The hash after so many steps, and the losses."""
    trainer = make(kind, optimizer, zero, wire=wire)
    losses = []
    for batch in feed(trainer, kind):
        if trainer.steps == steps:
            break
        losses.append(trainer.step(batch).loss)
    return digest(trainer), losses


@pytest.fixture(scope="module")
def expected(started_pool):
    """Of one worker."""
    return functools.cache(lambda kind, optimizer, *more: started_pool.run(1, train, kind, optimizer, 0, *more)[0])


FULL = [(*each, zero) for each in itertools.product(KINDS, ("sgd", "adamw"), (2, 3, 4, 5, 8)) for zero in range(4)]
SOME = [
    ("gpt", "sgd", 2, 0), ("mlp", "adamw", 3, 1), ("cnn", "sgd", 4, 0), ("gpt", "adamw", 5, 0), ("cnn", "adamw", 8, 2),
    ("cnn", "sgd", 3, 3), ("gpt", "adamw", 2, 3),
]  # fmt: skip
"""Every kind, optimizer, number of workers and stage at least once."""


@pytest.mark.parametrize(("kind", "optimizer", "workers", "zero"), some(SOME, FULL))
def test_the_same_bits(pool, expected, kind, optimizer, workers, zero):
    for result in pool.run(workers, train, kind, optimizer, zero):
        assert result == expected(kind, optimizer)


HALVES = [
    (*each, half, zero) for each in itertools.product(KINDS, (2, 3, 5, 8)) for half in DTYPES for zero in range(4)
]
SOME_HALVES = [("cnn", 2, "bf16", 0), ("gpt", 3, "bf16", 2), ("mlp", 5, "fp16", 1), ("mlp", 2, "bf16", 3)]


@pytest.mark.parametrize(("kind", "workers", "half", "zero"), some(SOME_HALVES, HALVES))
def test_the_same_bits_where_sums_are_rounded_to_half(pool, expected, kind, workers, half, zero):
    found = pool.run(workers, train, kind, "sgd", zero, STEPS, Half(half))
    alone = expected(kind, "sgd", STEPS, Half(half))
    assert all(each == alone for each in found)
    exact = expected(kind, "sgd")
    assert alone[0] != exact[0] and alone[1] == pytest.approx(exact[1], rel=0.02)


def sent(world, half):
    """Bytes that this worker has sent of gradients in one step."""
    trainer = make("mlp", "sgd", wire=half)
    trainer.step(next(feed(trainer, "mlp")))
    return trainer._stepper._shards.reduction._ordered.num_bytes_sent


def test_half_sends_half_the_bytes(started_pool):
    def total(half):
        return sum(started_pool.run(3, sent, half, backend="gloo"))

    assert 0.45 < total(Half()) / total(None) < 0.6  # The notes are counters, and stay as they are.
