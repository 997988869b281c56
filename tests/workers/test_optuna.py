"""Several small worlds at once, started from threads of one process: Optuna's trials, each trained by two workers."""

import threading

import pytest
import torch
from torch import nn

import lockstep


def train(rate):
    """The loss after a few steps of this learning rate, and where it was trained."""
    with lockstep.join(seed=0) as world:
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        model = lockstep.DataParallel(net)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            x = torch.randn(9, 4, generator=generator).tensor_split(world.size)[world.rank]
            lockstep.backward((model(x) - x.sum(1, keepdim=True)).square().mean(), weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
        return net(torch.ones(4)).item(), world.size


def test_trials_of_optuna_side_by_side():
    optuna = pytest.importorskip("optuna", reason="needs optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    at_once, both = [], threading.Barrier(2)

    def objective(trial):
        rate = trial.suggest_float("rate", 0.01, 0.1)
        both.wait(60)  # Both worlds are there at the same time.
        at_once.append(trial.number)
        results = lockstep.launch(train, workers=2, args=(rate,))
        assert results[0] == results[1] and results[0][1] == 2
        return (results[0][0] - 4.0) ** 2

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=2, n_jobs=2)
    assert sorted(at_once) == [0, 1] and len(study.trials) == 2
    for trial in study.trials:
        alone, size = train(trial.params["rate"])
        assert size == 1 and trial.value == pytest.approx((alone - 4.0) ** 2, abs=1e-5)
