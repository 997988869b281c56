"""Small parameters that are updated together: the same bits whatever is done between two steps."""

import copy
import gc

import pytest
import torch
from flat_runs import (
    CHANGES_AT,
    STEPS,
    WIDTH,
    Run,
    has_windows_somewhere,
    has_windows_to_the_end,
    through_file,
    train_both,
)
from torch import nn

# What is done between steps. Each changes something in a run of which windows are in use.

WAYS = {}
ZERO_WAYS = []


def way(function):
    """To be tried with nothing split."""
    WAYS[function.__name__] = function
    return function


def zero_way(function):
    """To be tried with every stage."""
    ZERO_WAYS.append(function.__name__)
    return way(function)


@zero_way
def unused(run):
    for number in range(STEPS):
        run.net.skipped = (3, 4, 8) if number % 2 else ()
        run.train(1)
    run.net.skipped = ()
    run.train(2)


@zero_way
def unused_at_first(run):
    run.net.skipped = (2, 3, 4, 5, 6)
    run.train(CHANGES_AT)
    run.net.skipped = ()
    run.train()


@zero_way
def unused_later(run):
    run.train(CHANGES_AT)
    run.net.skipped = (3, 4, 8)
    run.train(2)
    run.net.skipped = ()
    run.train(2)


@way
def frozen(run):
    run.train(CHANGES_AT)
    run.net.layers[3].weight.requires_grad_(False)
    run.train()


@way
def replaced_grads(run):
    for number in range(STEPS):
        run.backward()
        if number % 4 == 3:
            for param in run.net.parameters():
                param.grad = param.grad.clone() * 2
        run.update()
    run.train(2)


@zero_way
def moved_grads(run):
    """Not by another tensor as gradient, but by other memory for the same."""
    for number in range(STEPS):
        run.backward()
        if number % 4 == 3:
            for group in run.optimizer.param_groups:
                for param in group["params"]:
                    param.grad.data = param.grad.data * 2
        run.update()
    run.train(2)


@zero_way
def clipped(run):
    for _ in range(STEPS):
        run.backward()
        run.model.clip_grad_norm_(0.01)
        run.update()


@zero_way
def zeroed_in_place(run):
    for _ in range(STEPS):
        run.backward(set_to_none=False)
        run.update()


@zero_way
def accumulated(run):
    for _ in range(STEPS):
        run.optimizer.zero_grad()
        with run.model.no_sync():
            run.loss().backward()
        run.loss().backward()
        run.update()


@zero_way
def never_zeroed(run):
    for _ in range(STEPS):
        run.loss().backward()
        run.update()


@zero_way
def closure(run):
    """Every other step computes its gradients itself."""

    def compute():
        run.backward()
        return torch.zeros(())

    run.train(CHANGES_AT)
    for number in range(STEPS):
        if number % 2:
            run.train(1)
        else:
            run.update(compute)
    run.train(1)


@way
def class_step(run):
    """A step that was asked of the class."""
    run.train(CHANGES_AT)
    run.backward()
    type(run.optimizer).step(run.optimizer)
    run.see()
    run.train(2)


@way
def group_added(run):
    run.optimizer.param_groups[1]["params"], rest = (
        run.optimizer.param_groups[1]["params"][:6],
        run.optimizer.param_groups[1]["params"][6:],
    )
    run.train(CHANGES_AT)
    run.optimizer.add_param_group({"params": rest, "lr": 0.05})
    run.train()


@way
def state_loaded(run):
    run.train(CHANGES_AT)
    saved = copy.deepcopy(run.optimizer.state_dict())
    run.train(2)
    run.optimizer.load_state_dict(saved)
    run.train(CHANGES_AT)


@way
def live_state_loaded(run):
    run.train(CHANGES_AT)
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.train(CHANGES_AT)


@way
def continued_elsewhere(run):
    """Weights and state go through a file into a model and an optimizer made anew."""
    run.train(CHANGES_AT)
    saved = through_file([run.net.state_dict(), run.optimizer.state_dict()])
    fresh = Run(run.world)
    fresh.net.load_state_dict(saved[0])
    fresh.optimizer.load_state_dict(saved[1])
    run.net, run.optimizer, run.model = fresh.net, fresh.optimizer, fresh.model
    run.train(CHANGES_AT)


@way
def moments_zeroed(run):
    run.train(CHANGES_AT)
    run.optimizer.state[run.net.layers[2].weight]["exp_avg"].zero_()
    run.train(1)
    param = run.net.layers[3].weight
    run.optimizer.state[param]["exp_avg_sq"] = torch.zeros_like(param)
    run.train(CHANGES_AT)


@zero_way
def counts_zeroed(run):
    """A warm restart in place."""
    run.train(CHANGES_AT)
    for state in run.optimizer.state.values():
        state["step"].zero_()
    run.train(CHANGES_AT)


@way
def one_count_zeroed(run):
    run.train(CHANGES_AT)
    run.optimizer.state[run.net.layers[2].weight]["step"].zero_()
    run.train(CHANGES_AT)


@zero_way
def state_cleared(run):
    run.train(CHANGES_AT)
    run.optimizer.state.clear()
    run.train(CHANGES_AT)


@way
def one_state_deleted(run):
    run.train(CHANGES_AT)
    del run.optimizer.state[run.net.layers[2].weight]
    run.train(CHANGES_AT)


@way
def failing_step(run):
    """A hook of the user's raises once; the step is made up for."""
    own = [list(group["params"]) for group in run.optimizer.param_groups]
    run.train(CHANGES_AT)
    hook = run.optimizer.register_step_pre_hook(fail)
    run.backward()
    with pytest.raises(ArithmeticError):
        run.optimizer.step()
    hook.remove()
    for group, params in zip(run.optimizer.param_groups, own, strict=True):
        assert all(one is other for one, other in zip(group["params"], params, strict=True))
    assert set(run.optimizer.state) == set(run.net.parameters())
    run.update()
    run.train(CHANGES_AT)


def fail(*_):
    raise ArithmeticError("no step here")


@way
def weights_replaced(run):
    run.train(CHANGES_AT)
    with torch.no_grad():
        run.net.layers[2].weight.data = run.net.layers[2].weight * 0.5
    run.train(CHANGES_AT)


@way
def weights_transposed(run):
    """Values and address stay, strides do not."""
    run.train(CHANGES_AT)
    run.net.layers[2].weight.data = run.net.layers[2].weight.data.t()
    run.train(CHANGES_AT)


@way
def strides_changed(run):
    """Weights get memory of another order, as by `net.to(memory_format=...)`."""
    run.train(CHANGES_AT)
    for layer in run.net.layers:
        layer.weight.data = layer.weight.data.t().contiguous().t()
    run.train(STEPS)


@way
def weights_loaded(run):
    saved = through_file(run.net.state_dict())
    run.train(CHANGES_AT)
    run.net.load_state_dict(saved)
    run.train(2)
    run.net.load_state_dict(saved, assign=False)
    run.train(2)


@way
def wrapped_again(run):
    run.train(CHANGES_AT)
    run.model = None
    gc.collect()
    run.wrap()
    run.train(CHANGES_AT)


@way
def tied_by_memory(run):
    """Two parameters over the same memory, as some tie them, both updated."""
    run.train(CHANGES_AT)
    run.net.layers[5].weight.data = run.net.layers[2].weight.data
    run.train()


@way
def seen_from_outside(run):
    """Somebody holds the memory of the weights, as another process does after `net.share_memory()`."""
    run.train(CHANGES_AT)
    run.net.share_memory()
    seen = [param.detach() for param in run.net.parameters()]
    run.train()
    run.weights.append(seen)


@way
def copied(run):
    """Copies and files hold what the model holds, and a copied optimizer leaves the model alone."""
    run.train(CHANGES_AT)
    twin, own = copy.deepcopy((run.net, run.optimizer))
    before = [param.clone() for param in run.net.parameters()]
    saved = through_file(run.net.state_dict())
    assert all(torch.equal(saved[name], value) for name, value in run.net.state_dict().items())
    twin(torch.ones(1, WIDTH)).backward()
    own.step()
    assert all(map(torch.equal, before, run.net.parameters()))
    assert not any(map(torch.equal, before, twin.parameters()))
    run.train(CHANGES_AT)


# Hooks of the user's around a step, for which a window is no parameter of theirs


@way
def hook_replaces_grads(run):
    run.train(CHANGES_AT)
    run.optimizer.register_step_pre_hook(lambda *_: double_grads(run.net))
    run.train()


def double_grads(net):
    for param in net.parameters():
        param.grad = param.grad * 2


@way
def hook_clips_each(run):
    """By the norm of each parameter's own gradient."""
    run.train(CHANGES_AT)
    run.optimizer.register_step_pre_hook(clip_each)
    run.train()


def clip_each(optimizer, *_):
    for group in optimizer.param_groups:
        for param in group["params"]:
            nn.utils.clip_grad_norm_(param, 1e-3)


@way
def hook_knows_parameters(run):
    """A running mean of the weights, found by parameter."""
    run.train(CHANGES_AT)
    means = {param: param.detach().clone() for param in run.net.parameters()}
    run.optimizer.register_step_post_hook(lambda optimizer, *_: follow(means, optimizer))
    run.train()
    run.weights.append(list(means.values()))


@torch.no_grad()
def follow(means, optimizer):
    for group in optimizer.param_groups:
        for param in group["params"]:
            means[param].lerp_(param, 0.1)


def trained(world, name, zero, optimizer="adamw"):
    run = Run(world, optimizer, zero)
    WAYS[name](run)
    return run


@pytest.mark.parametrize("name", WAYS)
def test_whatever_is_done_between_steps(started_pool, name):
    assert has_windows_somewhere(started_pool, trained, name, 0)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("name", ZERO_WAYS)
def test_the_same_where_something_is_split(started_pool, name, zero):
    assert has_windows_somewhere(started_pool, trained, name, zero)


@pytest.mark.parametrize("optimizer", ["counting", "remembering", "aggregated", "nadam", "asgd", "sgd_fused"])
def test_together_and_one_by_one_in_turns(started_pool, optimizer):
    train_both(started_pool, trained, "unused_later", 0, optimizer)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_without_shared_memory(started_pool, zero):
    """Parameters are gathered by block there, with zero=3."""
    assert has_windows_to_the_end(started_pool, trained, "unused_later", zero, backend="gloo")
