"""Small parameters that are updated together: the same bits with any optimizer, and nothing to be seen of it."""

import gc
import weakref

import pytest
import torch
from flat_runs import (
    OPTIMIZERS,
    STEPS,
    WIDTH,
    Net,
    Odd,
    Run,
    alone,
    has_windows_somewhere,
    has_windows_to_the_end,
    plain,
    through_file,
    train_both,
)
from torch import nn

import lockstep

# Optimizers


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer(started_pool, optimizer, zero):
    is_cut = optimizer not in ("norm_scaled", "remembering", "aggregated")
    assert has_windows_to_the_end(started_pool, plain, optimizer, zero) == is_cut


def test_an_optimizer_that_needs_whole_tensors_and_begins_with_a_rate_of_zero(started_pool):
    assert not has_windows_somewhere(started_pool, warmed_up)


def warmed_up(world):
    return Run(world, "norm_scaled", before_wrapping=from_zero).train()


def from_zero(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / STEPS)


def test_an_optimizer_that_needs_whole_tensors_in_its_second_group(started_pool):
    train_both(started_pool, plain, "mixed", 0)


def test_an_optimizer_that_looks_at_attributes_of_parameters(started_pool):
    train_both(started_pool, marked)


def marked(world):
    run = Run(world, "marked")
    for number, param in enumerate(run.net.parameters()):
        param.lr_factor = 1.0 + number
    return run.train()


def test_one_optimizer_of_two_models(started_pool):
    assert has_windows_to_the_end(started_pool, two_models)


def two_models(world):
    run = Run(world)
    other = Run(world)
    run.optimizer.add_param_group({"params": list(other.net.parameters()), "lr": 0.02})
    second = lockstep.DataParallel(other.net, optimizer=run.optimizer)
    for _ in range(STEPS):
        run.backward()
        second(torch.ones(2, WIDTH) * world.rank).backward()
        run.update()
        run.weights[-1] += [param.detach().clone() for param in other.net.parameters()]
    return run


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_three_workers(started_pool, zero):
    assert has_windows_to_the_end(started_pool, plain, "adamw_fused", zero, workers=3)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_odd_parameters(started_pool, zero):
    """Where they are split, one worker may own nothing else."""
    assert any(num_windows[-1] for num_windows in train_both(started_pool, plain, "adamw", zero, Odd))


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_fused"])
def test_several_threads(started_pool, optimizer):
    assert has_windows_to_the_end(started_pool, in_threads, optimizer, 3)


class Wider(nn.Module):
    """Together its parameters are enough for torch to divide a window among threads, and not at whole vectors."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 256)
        self.layers = nn.ModuleList(nn.Linear(256, 32 + 32 * number) for number in range(1, 3))
        self.more = nn.ParameterList(torch.randn(3, 4128) for _ in range(4))

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return sum(layer(x).square().mean() for layer in self.layers) + sum(each.tanh().mean() for each in self.more)


def in_threads(world, optimizer, num_threads):
    torch.set_num_threads(num_threads)
    try:
        return Run(world, optimizer, net=Wider).train()
    finally:
        torch.set_num_threads(1)


# Schedulers and groups


def step_lr(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.01, 0.02], total_steps=STEPS + 1)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("make", [step_lr, one_cycle])
@pytest.mark.parametrize("is_before", [True, False], ids=["made_before", "made_after"])
def test_schedulers(started_pool, make, is_before, zero):
    assert has_windows_to_the_end(started_pool, scheduled, make, is_before, zero)


def scheduled(world, make, is_before, zero):
    run = Run(world, zero=zero, before_wrapping=make if is_before else None)
    run.scheduler = run.scheduler or make(run.optimizer)
    return run.train()


# What the user can see


def test_state_dict_is_as_ever(started_pool):
    started_pool.run(2, state_dict_is_as_ever)


def state_dict_is_as_ever(world):
    ours, theirs = Run(world).train(), alone(lambda: Run(world).train())
    assert ours.windows()
    found, expected = through_file(ours.optimizer.state_dict()), theirs.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, param in enumerate(ours.net.parameters()):
        assert type(found["state"][number]) is dict
        assert found["state"][number].keys() == expected["state"][number].keys()
        assert found["state"][number]["exp_avg"].shape == param.shape
        for name, value in expected["state"][number].items():
            assert torch.equal(found["state"][number][name], value)
            assert found["state"][number][name].stride() == value.stride()


def test_autograd_notices_the_update(started_pool):
    started_pool.run(2, autograd_notices)


def autograd_notices(world):
    run = Run(world).train()  # Not with a graph that sees the parameters' memory: they would not be moved.
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        loss = run.loss()
        loss.backward(retain_graph=True)
        run.update()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, list(run.net.parameters()))
    assert run.windows()


def test_old_buckets_are_freed_before_new_ones_are_used(started_pool):
    started_pool.run(2, free_old_buckets)


def free_old_buckets(world):
    run = Run(world, net=Reversed).train(1)
    old = [weakref.ref(bucket.flat_grads) for bucket in run.model._reducer.buckets]
    run.backward()
    assert all(reference() is None for reference in old)


def test_the_optimizer_is_freed_without_the_collector(started_pool):
    """As torch takes care of: its state may be large."""
    started_pool.run(2, free_optimizer)


def free_optimizer(world):
    run = Run(world).train()
    reference = weakref.ref(run.optimizer)
    gc.disable()
    try:
        run.optimizer = None
        assert reference() is None
    finally:
        gc.enable()


class Reversed(Net):
    """Gradients do not come in the order that was guessed."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(reversed(self.layers))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def test_safetensors_take_the_weights(started_pool, tmp_path):
    pytest.importorskip("safetensors.torch")
    started_pool.run(2, save_as_safetensors, str(tmp_path))


def save_as_safetensors(world, folder):
    from safetensors.torch import load_file, save_file

    run = Run(world).train()
    assert run.windows()
    path = f"{folder}/{world.rank}.safetensors"
    save_file(run.net.state_dict(), path)
    saved = load_file(path)
    assert all(torch.equal(saved[name], value) for name, value in run.net.state_dict().items())


def test_nothing_is_left_in_the_optimizer_after_release(started_pool):
    started_pool.run(2, leave_and_go_on)


def leave_and_go_on(world):
    run = Run(world).train()
    assert run.windows()
    update = run.model._update
    update.release()
    assert not run.windows()
    run.train(2)
    assert not run.windows()
    assert set(run.optimizer.state) == set(run.net.parameters())
