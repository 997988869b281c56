"""A machine that computes wrongly is found, and one that does not is not accused."""

import pytest
import torch
import torch.nn.functional as F
from elastic_runs import digest, make, samples
from torch import nn

import lockstep

STEPS = 9


def train(world, zero, wrong_rank=None, wrong_from=0, kind="mlp", recheck_every=3):
    trainer = make(kind, zero, recheck_every=recheck_every)
    if world.rank == wrong_rank:
        linear, calls = nn.Linear.forward, [0]

        def errs(self, x):
            calls[0] += 1
            return linear(self, x) * (1.0 + 2e-7 if calls[0] > wrong_from else 1.0)

        nn.Linear.forward = errs
    try:
        for batch in trainer.batches(samples(kind), batch_size=40, epochs=10):
            if trainer.steps == STEPS:
                break
            trainer.step(batch)
        return digest(trainer)
    finally:
        if world.rank == wrong_rank:
            nn.Linear.forward = linear


@pytest.mark.parametrize("zero", [0, 1])
def test_to_compare_changes_nothing(pool, zero):
    alone = pool.run(1, train, 0, None, 0, "cnn", 0)[0]
    assert set(pool.run(3, train, zero, None, 0, "cnn", 2)) == {alone}


def test_the_one_that_errs_is_named_on_all(pool):
    outcomes = pool.run(3, train, 0, 1, 30, expect_failure=True)
    for ok, text in outcomes:
        assert not ok and "ReplicaDiffers" in text and "worker 1 (pid" in text and "than the 2 others" in text, text


def test_of_two_it_cannot_be_told_which(pool):
    outcomes = pool.run(2, train, 0, 1, 0, expect_failure=True)
    for ok, text in outcomes:
        assert not ok and "worker 0 (pid" in text and "worker 1 (pid" in text and "cannot be told" in text, text


def test_a_number_of_steps_is_asked_for():
    net = nn.Linear(2, 2)
    with pytest.raises(lockstep.UsageError, match="recheck_every"):
        lockstep.Trainer(net, torch.optim.SGD(net.parameters(), lr=0.1), F.mse_loss, shards=1, recheck_every=-1)
