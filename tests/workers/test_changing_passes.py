"""Passes that change from step to step: no gradient is lost, whatever its order, size, or what was there before."""

import contextlib
import random
import warnings

import pytest
import torch
from amount import some
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.replica import bucket as bucket_module

STEPS, CHANGES_AT = 6, 3

WAYS = [
    "plain",
    "unused",
    "unused_by_all",
    "weighted",
    "frozen_later",
    "hooked_before",
    "small_buckets",
    "zero1",
    "zero3",
    "failing",
    "graph_kept",
    "asked_for_inputs",
    "uncut_unused",
    "uncut_unused_by_all",
    "uncut_failing",
    "uncut_graph_kept",
    "uncut_zero1",
    "unwatched_part",
    "accumulated",
    "zeroed_in_place",
    "never_zeroed",
    "reordered",
    "in_portions",
    "unwatched",
    "twice",
]
"""Ways to train, most of which change after some steps."""


class Hidden:
    """An output in which nobody finds the tensor."""

    def __init__(self, value):
        self.value = value


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
        self.head = nn.Linear(16, 2)
        self.way, self.is_changed, self.rank = way, False, 0

    def forward(self, x):
        layers = list(self.layers)
        if self.is_changed and self.way == "reordered":
            layers.reverse()
        if self.is_changed and (self.way == "unused_by_all" or (self.way == "unused" and self.rank == 0)):
            del layers[4:8]
        if self.is_changed and self.way == "unwatched_part":
            return Hidden(layers[8](x).square().mean())
        for number, layer in enumerate(layers):
            x = x + torch.tanh(layer(x))
            if self.is_changed and self.way == "in_portions" and number in (2, 10):
                x = checkpoint(layers[9], x, use_reentrant=True)
        loss = self.head(x).square().mean()
        return Hidden(loss) if self.is_changed and self.way == "unwatched" else loss


def train(world, way, small_bytes):
    """Train in one way, where gradients up to `small_bytes` are copied together; returns the weights."""
    before, bucket_module.SMALL_BYTES = bucket_module.SMALL_BYTES, small_bytes
    try:
        return _train(world, way)
    finally:
        bucket_module.SMALL_BYTES = before


def fail(_grad):
    raise ArithmeticError("no gradient here")


def _train(world, way):
    cap_mb = 25 if way.startswith("uncut_") else 0.002 if way == "small_buckets" else 0.006
    way = way.removeprefix("uncut_")
    torch.manual_seed(1)
    net = Net(way)
    net.rank = world.rank
    if way == "hooked_before":
        net.layers[3].weight.register_post_accumulate_grad_hook(lambda param: None)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    stage = {"zero1": 1, "zero3": 3}.get(way, 0)
    split = {"optimizer": optimizer, "zero": stage} if stage else {}
    model = lockstep.DataParallel(net, bucket_cap_mb=cap_mb, **split)
    generator = torch.Generator().manual_seed(world.rank)
    for step in range(STEPS):
        net.is_changed = step >= CHANGES_AT
        if way == "frozen_later" and net.is_changed:
            net.layers[3].weight.requires_grad_(False)
        if way != "never_zeroed":
            optimizer.zero_grad(set_to_none=way != "zeroed_in_place")
        x = torch.randn(8, 16, generator=generator).requires_grad_(way == "asked_for_inputs")
        if way == "accumulated" and net.is_changed:
            with model.no_sync():
                model(torch.randn(8, 16, generator=generator)).backward()
        if way == "failing" and step == CHANGES_AT:
            _fail_once(world, model, net, x)
            optimizer.zero_grad()
        loss = model(x)
        loss = loss.value if isinstance(loss, Hidden) else loss
        if way == "twice" and net.is_changed:
            loss.backward(retain_graph=True)
        if way == "asked_for_inputs":
            torch.autograd.grad(loss, x, retain_graph=True)
            assert all(param.grad is None for param in net.parameters()), "nothing was computed for them"
        if way == "weighted":
            lockstep.backward(loss, weight=world.rank + 1)
        else:
            _backward(loss, keeps_graph=way == "graph_kept" and net.is_changed)
        if way == "unused_by_all":
            has_grads = [layer.weight.grad is not None for layer in net.layers]
            assert has_grads == [not net.is_changed or number not in range(4, 8) for number in range(12)]
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def _backward(loss, keeps_graph):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of reference cycles.
        loss.backward(create_graph=keeps_graph)


def _fail_once(world, model, net, x):
    """A pass in which worker 1 fails half way."""
    hook = net.layers[4].weight.register_hook(fail) if world.rank == 1 else None
    with pytest.raises(ArithmeticError if world.rank == 1 else lockstep.StepVoid):
        model(x).backward()
    if world.rank != 1:
        assert all(param.grad is None for param in net.parameters()), "nothing came of the pass"
    if hook is not None:
        hook.remove()
        net.zero_grad()
        model._engine.reducer._abandon_broken_pass()


FEW = (
    "unused",
    "frozen_later",
    "zero3",
    "failing",
    "graph_kept",
    "accumulated",
    "zeroed_in_place",
    "in_portions",
    "twice",
)


@pytest.mark.parametrize("way", some(FEW, WAYS))
def test_small_gradients_that_are_copied_together_give_the_same_bits(started_pool, way):
    together = started_pool.run(2, train, way, 16 << 10)
    each = started_pool.run(2, train, way, 0)
    assert all(torch.equal(weights, together[0]) for weights in together)
    if way == "in_portions":  # What comes late is added later, so other sums are rounded.
        torch.testing.assert_close(together[0], each[0], rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(together[0], each[0])


def mix(world, seed, stage, cap_mb, is_plain):
    """Steps that each do something else; their changes, and the weights after each.

    is_plain: the module is not wrapped, and its gradients are averaged here.
    """
    chance = random.Random(seed)
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Linear(96, 96, bias=number % 2 == 0) for number in range(4))
    head = nn.Linear(96, 2)
    net = Mixed(layers, head)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    split = {"optimizer": optimizer, "zero": stage} if stage else {}
    model = net if is_plain else lockstep.DataParallel(net, bucket_cap_mb=cap_mb, **split)
    generator = torch.Generator().manual_seed(world.rank)
    found = []
    for step in range(MIXED_STEPS):
        net.calls = [(0, "call"), (1, "call"), (2, "call"), (3, "call")]
        changes = chance.sample(CHANGES, chance.choice((0, 0, 1, 2))) if step > 3 else []
        number = chance.randrange(4)
        hook = None
        for change in changes:
            if change in ("call", "functional", "nested", "checkpointed"):
                net.calls.insert(chance.randrange(5), (number, change))
            elif change in ("skip", "skip_and_penalty"):
                net.calls = [call for call in net.calls if call[0] != number]
            elif change == "skip_here" and world.rank == 0:
                net.calls = net.calls[1:]
            elif change == "hook":
                hook = layers[number].weight.register_hook(lambda grad: grad * 2)
        x = torch.randn(16, 96, generator=generator)
        if "no_sync" in changes:
            with contextlib.nullcontext() if is_plain else model.no_sync():
                model(x).backward()
        if "fail" in changes and not is_plain:
            is_skipped = any("skip" in change for change in changes)
            _fail_at(world, model, x, head.weight if is_skipped else layers[number].weight)
        if "fail" in changes:
            optimizer.zero_grad()
        loss = model(x)
        if "penalty" in changes or "skip_and_penalty" in changes:
            params = [*layers[number].parameters()][chance.choice((0, -1)) :]
            loss = loss + 1e-2 * (1 + world.rank) * sum(param.square().sum() for param in params)
        if "asked_for" in changes and "nested" not in changes:  # torch refuses that.
            torch.autograd.grad(loss, layers[number].weight, retain_graph=True, allow_unused=True)
        loss.backward(retain_graph="again" in changes)
        if "again" in changes and "nested" not in changes:
            loss.backward()
        if hook is not None:
            hook.remove()
        if is_plain:
            for param in net.parameters():
                param.grad = world.mean(torch.zeros_like(param) if param.grad is None else param.grad)
        optimizer.step()
        with contextlib.nullcontext() if is_plain else model.whole_params():
            found.append((changes, torch.cat([param.detach().flatten() for param in net.parameters()])))
        optimizer.zero_grad(set_to_none="zeroed_in_place" not in changes)
    return found


CHANGES = [
    "call", "functional", "nested", "checkpointed", "skip", "skip_here", "hook", "penalty", "asked_for", "again",
    "fail", "no_sync", "zeroed_in_place", "skip_and_penalty",
]  # fmt: skip
MIXED_STEPS = 24


class Mixed(nn.Module):
    def __init__(self, layers, head):
        super().__init__()
        self.layers, self.head, self.calls = layers, head, []

    def forward(self, x):
        for number, how in self.calls:
            layer = self.layers[number]
            if how == "functional":
                x = torch.tanh(nn.functional.linear(x, layer.weight))
            elif how in ("nested", "checkpointed"):
                x = torch.tanh(checkpoint(layer, x, use_reentrant=how == "nested" and x.requires_grad))
            else:
                x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def _fail_at(world, model, x, param):
    """A pass that fails on worker 1 at the gradient of a parameter."""
    hook = param.register_hook(fail) if world.rank == 1 else None
    with pytest.raises(ArithmeticError if world.rank == 1 else lockstep.StepVoid):
        model(x).backward()
    if hook is not None:
        hook.remove()
        with contextlib.suppress(lockstep.StepVoid):
            model._engine.reducer._abandon_broken_pass()


@pytest.mark.parametrize("seed", some((2, 5), range(30)))
def test_steps_that_each_do_something_else(started_pool, seed):
    plain = started_pool.run(2, mix, seed, 0, None, True)[0]
    for stage, cap_mb in [(0, None), (1, None), (3, None), (0, 0.06)]:
        for worker in started_pool.run(2, mix, seed, stage, cap_mb, False):
            for step, ((changes, weights), (_, expected)) in enumerate(zip(worker, plain, strict=True)):
                where = f"zero={stage}, cap_mb={cap_mb}, step {step} {changes}"
                torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6, msg=lambda m: f"{where}: {m}")
