"""Small parameters that are updated together: the same bits as when each is by itself, whatever is done in between."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn

import lockstep
from lockstep.replica import flat_update

STEPS, CHANGES_AT = 6, 3
NEVER = 1 << 40
WIDTH = 32
"""A layer's bias fills whole vectors, so that it does not end a window."""


class Net(nn.Module):
    """A chain of small layers, of which some may be skipped."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.skipped = ()

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if number not in self.skipped:
                x = x + torch.tanh(layer(x))
        return x.square().mean()


class Odd(Net):
    """The same with parameters that do not fit into windows, or end them, in their midst."""

    def __init__(self):
        super().__init__()
        self.seven, self.scale = nn.Parameter(torch.randn(7)), nn.Parameter(torch.tensor(0.5))
        self.more = nn.Parameter(torch.randn(33))
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.precise = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
        self.conv = nn.Conv2d(4, 8, 2).to(memory_format=torch.channels_last)
        self.large = nn.Parameter(torch.randn(17000))
        self.halves = nn.ParameterList(torch.randn(64, dtype=torch.bfloat16) for _ in range(5))
        self.doubles = nn.ParameterList(torch.randn(48, dtype=torch.float64) for _ in range(5))

    def forward(self, x):
        seen = self.conv(x[:, :16].reshape(-1, 4, 2, 2)).flatten(1).mean()
        numbers = self.seven.sum() * self.more.square().mean() + self.scale * seen
        wide = (self.turn * x).abs().mean() + (self.precise * x).mean() + sum((each**2).mean() for each in self.doubles)
        numbers = numbers + self.large.square().mean() + sum((each**2).mean() for each in self.halves).float()
        return super().forward(x * self.scale) + numbers + wide.float()


class NormScaled(torch.optim.Optimizer):
    """Divides an update by the norm of its tensor, so it needs whole tensors."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / param.grad.norm().clamp_min(1e-8), alpha=group["lr"])


class Counting(NormScaled):
    """Counts steps in a Python number, and replaces its moment at each of them."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, self.state[param], group["lr"])

    def _update(self, param, state, lr):
        state["step"] = state.get("step", 0) + 1
        state["m"] = 0.9 * state.get("m", torch.zeros_like(param)) + param.grad
        param.sub_(state["m"], alpha=lr / state["step"] ** 0.5)


class Remembering(Counting):
    """Keeps a Python list that it writes to in place."""

    def _update(self, param, state, lr):
        state.setdefault("lengths", []).append(len(state.get("lengths", [])))
        param.sub_(param.grad, alpha=lr / len(state["lengths"]))


class Aggregated(Counting):
    """Keeps several moments in a dictionary, as AggMo does."""

    def _update(self, param, state, lr):
        moments = state.setdefault("moments", {beta: torch.zeros_like(param) for beta in (0.0, 0.9)})
        for beta, moment in moments.items():
            param.sub_(moment.mul_(beta).add_(param.grad), alpha=lr / 2)


class Marked(Counting):
    """Looks at what the user has written on a parameter."""

    def _update(self, param, state, lr):
        param.sub_(param.grad, alpha=lr * getattr(param, "lr_factor", 1.0))


class Mixed(NormScaled):
    """Needs whole tensors in its second group only, as Muon with Adam for the rest does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (each for each in group["params"] if each.grad is not None):
                norm = param.grad.norm().clamp_min(1e-8) if group.get("is_whole") else 1.0
                param.sub_(param.grad / norm, alpha=group["lr"])


OPTIMIZERS = {
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw_tensor_lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01)),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.1),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "sgd_fused": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1),
    "nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.01),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.01),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=1.0),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.01),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.01),
    "counting": Counting,
    "remembering": Remembering,
    "norm_scaled": NormScaled,
}
MORE_OPTIMIZERS = {
    "aggregated": Aggregated,
    "marked": Marked,
    "mixed": lambda params: Mixed([{"params": params[:12]}, {"params": params[12:], "is_whole": True}]),
}


class Run:
    """One training, and what was seen after each step."""

    def __init__(self, world, optimizer="adamw", zero=0, net=Net, before_wrapping=None):
        torch.manual_seed(1)
        self.world, self.zero = world, zero
        self.net = net()
        self.optimizer = (OPTIMIZERS | MORE_OPTIMIZERS)[optimizer](self.groups(optimizer))
        self.scheduler = before_wrapping(self.optimizer) if before_wrapping else None
        self.wrap()
        self.generator = torch.Generator().manual_seed(world.rank)
        self.weights, self.num_windows = [], []

    def groups(self, optimizer):
        """Of parameters, where the optimizer knows weight decay two with different ones."""
        if not optimizer.startswith("adam"):
            return list(self.net.parameters())
        params = list(self.net.parameters())
        return [{"params": params[:12]}, {"params": params[12:], "lr": 0.003, "weight_decay": 0.2}]

    def wrap(self):
        self.model = lockstep.DataParallel(self.net, optimizer=self.optimizer, zero=self.zero)

    def windows(self):
        update = self.model._zero._update if self.zero else self.model._update
        return update._windows if update is not None else []

    def loss(self):
        return self.model(torch.randn(8, WIDTH, generator=self.generator))

    def backward(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.loss().backward()

    def update(self, *args):
        self.optimizer.step(*args)
        if self.scheduler is not None:
            self.scheduler.step()
        self.see()

    def see(self):
        with self.model.whole_params():
            self.weights.append([param.detach().clone() for param in self.net.parameters()])
        self.num_windows.append(len(self.windows()))

    def train(self, steps=STEPS):
        for _ in range(steps):
            self.backward()
            self.update()
        return self


def alone(way, *args):
    """The same with nothing updated together."""
    before, flat_update.FEWEST = flat_update.FEWEST, NEVER
    try:
        return way(*args)
    finally:
        flat_update.FEWEST = before


def compare(world, way, *args):
    """Train in one way with and without windows: returns the last weights, and how many windows there were."""
    expected = alone(way, world, *args)
    found = way(world, *args)
    assert not any(expected.num_windows)
    for step, (ours, theirs) in enumerate(zip(found.weights, expected.weights, strict=True)):
        differing = [n for n, (one, other) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(one, other)]
        assert not differing, f"step {step}: parameters {differing} differ; windows: {found.num_windows}"
    return found.weights[-1], found.num_windows


def train_both(pool, way, *args, workers=2, backend=None):
    """Compare on all workers; returns how many windows there were after each step, on each."""
    results = pool.run(workers, compare, way, *args, backend=backend)
    assert all(map(torch.equal, weights, results[0][0]) for weights, _ in results), "workers differ"
    return [num_windows for _, num_windows in results]


def has_windows_to_the_end(*args, **options):
    return all(num_windows[-1] for num_windows in train_both(*args, **options))


def has_windows_somewhere(*args, **options):
    return all(any(num_windows) for num_windows in train_both(*args, **options))


# Optimizers


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer(started_pool, optimizer, zero):
    is_cut = optimizer not in ("norm_scaled", "remembering", "aggregated")
    assert has_windows_to_the_end(started_pool, plain, optimizer, zero) == is_cut


@pytest.mark.parametrize("optimizer", ["counting", "remembering", "aggregated", "nadam", "asgd", "sgd_fused"])
def test_together_and_one_by_one_in_turns(started_pool, optimizer):
    train_both(started_pool, trained, "unused_later", 0, optimizer)


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


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_without_shared_memory(started_pool, zero):
    """Parameters are gathered by block there, with zero=3."""
    assert has_windows_to_the_end(started_pool, trained, "unused_later", zero, backend="gloo")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_odd_parameters(started_pool, zero):
    """Where they are split, one worker may own nothing else."""
    assert any(num_windows[-1] for num_windows in train_both(started_pool, plain, "adamw", zero, Odd))


def plain(world, optimizer, zero, net=Net):
    return Run(world, optimizer, zero, net).train()


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


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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
