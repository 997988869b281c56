"""Splitting changes memory and nothing else: weights must come out as with zero=0, whatever is split."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from amount import some
from models import build, difference, part_of, weights_of

import lockstep

BACKENDS = ["shm", "gloo"]
(STEPS,) = some([8], [20])
SIZES = [12, 7, 12, 5]
"""Of the global batches: some do not divide."""


class Lion(torch.optim.Optimizer):
    """As a user would write one."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    param.add_((0.9 * mean + 0.1 * param.grad).sign(), alpha=-group["lr"])
                    mean.lerp_(param.grad, 0.01)


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-3),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=1e-3),
    "radam": lambda groups: torch.optim.RAdam(groups, lr=1e-3),
    "adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-3),
    "lion": Lion,
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
}


def groups_of(net):
    """Decayed and not, as most training scripts have it."""
    named = list(net.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() <= 1], "lr": 5e-3},
    ]


def train(world, name, optimizer_name, dtype, zero, *, accumulate=1):
    net = build(name, dtype)
    optimizer = OPTIMIZERS[optimizer_name](groups_of(net))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, bucket_cap_mb=0.05)
    generator = torch.Generator().manual_seed(3)
    norms = []
    for step in range(STEPS):
        for micro in range(accumulate):
            x, y = type(net).batch(SIZES[step % len(SIZES)], generator, dtype)
            mine = part_of((x, y), world)
            passing = model.no_sync() if micro + 1 < accumulate else contextlib.nullcontext()
            with passing:
                loss = F.cross_entropy(model(mine[0]), mine[1]) if len(mine[0]) else 0 * model(x[:1]).sum()
                lockstep.backward(loss, weight=len(mine[0]))
        norms.append(model.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    with model.whole_params():
        return weights_of(net), norms, [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("workers", "name", "dtype"),
    some(
        [(2, "mlp", torch.float64), (3, "gpt", torch.float32), (3, "mlp", torch.float32), (4, "gpt", torch.float64)],
        itertools.product([2, 3, 4], ["mlp", "gpt"], [torch.float32, torch.float64]),
    ),
)
def test_every_stage_gives_the_same_weights(pool, workers, name, dtype):
    whole, norms, rates = pool.run(workers, train, name, "adamw", dtype, 0)[0]
    for zero in (1, 2, 3):
        for weights, got_norms, got_rates in pool.run(workers, train, name, "adamw", dtype, zero):
            assert difference(weights, whole) <= (1e-6 if dtype is torch.float32 else 1e-12)
            assert got_norms == pytest.approx(norms, rel=1e-5)
            assert got_rates == rates


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_optimizers(pool, optimizer_name):
    whole, _, _ = pool.run(3, train, "mlp", optimizer_name, torch.float64, 0)[0]
    for zero in (1, 2):
        for weights, _, _ in pool.run(3, train, "mlp", optimizer_name, torch.float64, zero):
            assert difference(weights, whole) <= 1e-12


def accumulated(world, zero):
    return train(world, "mlp", "adamw", torch.float64, zero, accumulate=3)


def test_accumulation(pool):
    whole, _, _ = pool.run(2, accumulated, 0)[0]
    for zero in (1, 2, 3):
        for weights, _, _ in pool.run(2, accumulated, zero):
            assert difference(weights, whole) <= 1e-12
