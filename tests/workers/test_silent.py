"""Small gradients of whose arrival nobody tells: nothing is lost, whatever the order and whoever had one before."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.replica import bucket as bucket_module

STEPS, CHANGES_AT = 6, 3

SILENT = [
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
]
"""Ways to train in which some gradients are not told of to the end."""
TOLD = [
    "unwatched_part",
    "accumulated",
    "zeroed_in_place",
    "never_zeroed",
    "reordered",
    "in_portions",
    "unwatched",
    "twice",
]
"""Ways in which all are, from some step on."""


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
    """Train in one way; returns the weights, and how many gradients were silent after each step."""
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
    num_silent = []
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
        num_silent.append(len(model._reducer._silent._indices))
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in net.parameters()]), num_silent


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
        model._reducer._abandon_broken_pass()


@pytest.mark.parametrize("way", [*SILENT, *TOLD])
def test_the_same_bits_as_when_each_is_told_of(started_pool, way):
    for workers in (2, 3):
        silent = started_pool.run(workers, train, way, 16 << 10)
        told = started_pool.run(workers, train, way, 0)
        assert all(torch.equal(weights, silent[0][0]) for weights, _ in silent)
        if way == "in_portions":  # What comes late is added later, so other sums are rounded.
            torch.testing.assert_close(silent[0][0], told[0][0], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(silent[0][0], told[0][0])
        for _, num_silent in silent:
            assert num_silent[0] == 0, "the first step shows the order of gradients"
            assert (num_silent[-1] > 0) == (way in SILENT)
            assert num_silent[2] > 10 or way in ("zeroed_in_place", "never_zeroed", "small_buckets")
        assert all(not any(num_silent) for _, num_silent in told)
