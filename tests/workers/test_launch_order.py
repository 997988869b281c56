"""Gathered parameters and control flow that differs between workers: the weights of one worker, and no hang."""

import copy
import random
import time

import pytest
import torch
from amount import some
from models import difference, weights_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep

BACKENDS = ["gloo"]
(STEPS,) = some([4], [12])


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x):
        return x + self.layers(x)


class Routed(nn.Module):
    """Runs the experts that it is told to run; a parameter of its own belongs to no block."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.checkpoints = checkpoints

    def forward(self, x, path):
        for number in path:
            expert = self.experts[number]
            x = checkpoint(expert, x, use_reentrant=False) if self.checkpoints else expert(x)
        return x * self.scale


class Later:
    """An operation that is over after a while, for the one worker that waits for it."""

    def __init__(self, seconds):
        self._end = time.monotonic() + seconds

    def wait(self, timeout=None):
        time.sleep(min(timeout.total_seconds(), max(0.0, self._end - time.monotonic())))
        if not self.is_completed():
            raise RuntimeError("not yet")

    def is_completed(self):
        return time.monotonic() >= self._end


def waits_before_its_update(world):
    """One worker waits between its backward pass and its update, while the others go on to the next forward pass."""
    torch.manual_seed(0)
    net = Routed().double()
    alone = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=3, blocks=[Expert])
    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(3):
        model(rows(step, world.rank, 0), [0, 1, 2]).square().mean().backward()
        if world.rank == step % world.size:
            world.wait(Later(0.3), "waiting for what takes long")
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(world.size):
            (alone(rows(step, rank, 0), [0, 1, 2]).square().mean() / world.size).backward()
        reference.step()
        reference.zero_grad()
    return difference(weights_of(model), {f"module.{name}": value for name, value in weights_of(alone).items()})


@pytest.mark.parametrize("workers", [2, 3])
def test_nobody_gets_parameters_of_before_an_update(pool, workers):
    assert max(pool.run(workers, waits_before_its_update)) < 1e-12


def evaluates_alone(world):
    net = Routed().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=3, blocks=[Expert])
    model(rows(0, world.rank, 0), [0]).square().mean().backward()
    if world.rank == 0:
        world.wait(Later(0.3), "waiting for what takes long")
        model(rows(1, 0, 0), [3])
    optimizer.step()
    optimizer.zero_grad()
    model(rows(2, world.rank, 0), [0]).square().mean().backward()


def test_a_pass_with_parameters_that_are_gone_is_refused(pool):
    outcomes = pool.run(2, evaluates_alone, expect_failure=True)
    assert any(not ok and "Make the same forward passes between" in text for ok, text in outcomes), outcomes
    assert not any(ok for ok, _ in outcomes)


def rows(step, rank, part):
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(100 * step + 10 * rank + part)).double()


# What a worker runs in a step: passes, each of one or more forwards with one backward; the last pass sends.
CASES = {
    "fewer": lambda step, rank: [[[0, 1]]] if rank == 0 else [[[0]]],
    "none": lambda step, rank: [[[0, 1, 2]]] if rank == 0 else [[[]]],
    "other order": lambda step, rank: [[[0, 1, 2, 3]]] if rank == 0 else [[[3, 1, 0, 2]]],
    "twice": lambda step, rank: [[[0, 1, 0, 0]]] if rank == 0 else [[[1, 0]]],
    "forwards": lambda step, rank: [[[0, 1], [1, 2]]] if rank == 0 else [[[3]]],
    "passes": lambda step, rank: [[[0, 1]], [[2]], [[1]]] if rank == 0 else [[[0]]],
    "random": lambda step, rank: [
        [[dice.randrange(4) for _ in range(dice.randrange(5))] for _ in range(dice.choice([1, 1, 2]))]
        for dice in [random.Random(10 * step + rank)]
        for _ in range(dice.choice([1, 1, 2]))
    ],
}


def loss_of(model, paths, step, rank, part):
    """Of one pass."""
    return sum(model(rows(step, rank, 3 * part + n), path).square().mean() for n, path in enumerate(paths))


def alone(net, size, case):
    net = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for rank in range(size):
            for part, paths in enumerate(CASES[case](step, rank)):
                (loss_of(net, paths, step, rank, part) / size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights_of(net)


def routed(world, case, checkpoints):
    torch.manual_seed(3)
    net = Routed(checkpoints).double()
    expected = alone(net, world.size, case)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=3)
    for step in range(STEPS):
        *others, last = enumerate(CASES[case](step, world.rank))
        for part, paths in others:
            with model.no_sync():
                loss_of(model, paths, step, world.rank, part).backward()
        loss_of(model, last[1], step, world.rank, last[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():  # Evaluation differs too, in how often as well, and what follows needs everybody.
            for _ in range(world.rank):
                model(rows(step, 0, 0), [step % 4] * world.rank)
        assert world.sum(1) == world.size
    with model.whole_params():
        assert difference(weights_of(net), expected) <= 1e-12


@pytest.mark.parametrize(
    ("workers", "case", "checkpoints"),
    [
        *((2, case, False) for case in CASES),
        *some([(3, "random", True)], [(n, case, c) for n in (2, 3) for case in CASES for c in (False, True)]),
    ],
)
def test_any_path(pool, workers, case, checkpoints):
    pool.run(workers, routed, case, checkpoints, timeout=8)


TOGETHER = {
    "other blocks": lambda step, rank: ("ab", [0, 1, 2] if rank else [3], [1] if rank else [2, 0]),
    "other order": lambda step, rank: ("ab"[:: 1 - 2 * rank], [rank, 2], [3, rank]),
    "both": lambda step, rank: (
        ["ab", "ba", "aba", "bab"][(step + rank) % 4],
        [rank, step % 4],
        [3 - rank][: step % 2],
    ),
}
"""What a worker runs in one graph: models in order, and the path through each."""


def through_both(models, case, step, rank):
    order, *paths = TOGETHER[case](step, rank)
    x = rows(step, rank, 0)
    for name in order:
        at = "ab".index(name)
        x = models[at](x, paths[at])
    return x.square().mean()


def together(world, case, zero):
    """Two models in one graph of autograd, each with an optimizer."""
    torch.manual_seed(3)
    nets = [Routed().double(), Routed().double()]
    lone = copy.deepcopy(nets)
    models, optimizers = [], []
    for net in nets:
        optimizers.append(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        models.append(lockstep.DataParallel(net, optimizer=optimizers[-1], zero=zero))
    reference = torch.optim.SGD([*lone[0].parameters(), *lone[1].parameters()], lr=0.1, momentum=0.9)
    for step in range(STEPS):
        for rank in range(world.size):
            (through_both(lone, case, step, rank) / world.size).backward()
        reference.step()
        reference.zero_grad()
        through_both(models, case, step, world.rank).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for net, model, expected in zip(nets, models, lone, strict=True):
        with model.whole_params():
            assert difference(weights_of(net), weights_of(expected)) <= 1e-12


@pytest.mark.parametrize("case", TOGETHER)
@pytest.mark.parametrize("zero", [0, 3])
def test_two_models_in_one_graph(pool, case, zero):
    pool.run(2, together, case, zero, timeout=8)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("half-way")


def fails_on_its_own_path(world):
    """In the very first step, while another worker runs other blocks."""
    torch.manual_seed(3)
    net = Routed().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=3)
    outcomes = []
    for step in range(3):
        x = rows(step, world.rank, 0)
        x = Fails.apply(x.requires_grad_()) if step == 0 and world.rank == 1 else x
        try:
            model(x, [3] if world.rank else [0, 1, 2]).square().mean().backward()
            optimizer.step()
        except (ArithmeticError, lockstep.StepVoid) as error:
            outcomes.append(type(error).__name__)
        optimizer.zero_grad()
    with model.whole_params():
        return outcomes, weights_of(net)


def test_a_pass_that_fails_on_its_own_path(pool):
    (first, weights), (second, others) = pool.run(2, fails_on_its_own_path, timeout=8)
    assert (first, second) == (["StepVoid"], ["ArithmeticError"])
    assert difference(weights, others) == 0


def asks_alone(world, trains_on):
    """Worker 0 saves what it has while the other goes on."""
    net = Routed().double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=3)
    model(rows(0, world.rank, 0), [0, 1]).sum().backward()
    try:
        if world.rank == 0:
            model.state_dict()
        elif trains_on:
            model(rows(1, world.rank, 0), [0, 1]).sum().backward()
        else:
            model.whole_params().__enter__()
    except lockstep.UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("trains_on", [True, False])
def test_a_call_on_one_worker_alone_is_named(pool, trains_on):
    texts = pool.run(2, asks_alone, trains_on, timeout=8)
    other = "the end of a backward pass" if trains_on else "model.whole_params()"
    for rank, text in enumerate(texts):
        assert text.startswith(f"worker {rank}: worker 0 is in model.state_dict(), worker 1 is in {other}.")


def saves_alone(world, folder, loads):
    net = Routed()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=1)
    try:
        if world.rank == 0:
            lockstep.save(folder, model, optimizer, step=1)
        elif loads:
            lockstep.load(folder, model, optimizer)
    except (lockstep.UsageError, lockstep.WorkerLost) as error:
        return str(error)
    return ""


def test_a_save_on_one_worker_alone_is_named(pool, tmp_path):
    for rank, text in enumerate(pool.run(2, saves_alone, str(tmp_path), True, timeout=8)):
        assert text.startswith(f"worker {rank}: worker 0 is in lockstep.save(), worker 1 is in lockstep.load().")
    text, _ = pool.run(2, saves_alone, str(tmp_path), False, timeout=8)
    assert "in lockstep.save(), which every worker must call and not one alone" in text
