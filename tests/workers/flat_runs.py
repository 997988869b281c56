"""Trainings in which small parameters are updated together, and the same in which each is by itself."""

import io

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
    assert all(all(map(torch.equal, weights, results[0][0])) for weights, _ in results), "workers differ"
    return [num_windows for _, num_windows in results]


def has_windows_to_the_end(*args, **options):
    return all(num_windows[-1] for num_windows in train_both(*args, **options))


def has_windows_somewhere(*args, **options):
    return all(any(num_windows) for num_windows in train_both(*args, **options))


def plain(world, optimizer, zero, net=Net):
    return Run(world, optimizer, zero, net).train()


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
