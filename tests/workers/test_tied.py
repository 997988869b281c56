"""Embeddings whose table is a linear layer's weight too: the same bits as when the whole table is added and copied."""

import contextlib
import copy
import gc
import pickle

import pytest
import torch
from test_lending import NEVER, digest, fail
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.replica import lending
from lockstep.replica.bucket import Bucket

STEPS, CHANGES_AT = 5, 3
VOCAB, WIDTH = 512, 64

ADDED = [
    "plain", "int32", "padded", "two_tables", "two_lookups", "checkpointed", "gradient_asked_for", "accumulated",
    "zero1", "zero2", "zero3", "hook", "float64",
]  # fmt: skip
"""Ways to train in which rows are added to what the layer has computed, to the end."""
WHOLE = ["weighted", "hooked", "penalised", "autocast", "frozen", "renormed", "by_frequency", "three_workers"]
"""Ways in which torch adds a whole table, at least in the last step."""
MIXED = ["regularised", "functional", "before_the_layer", "recomputed", "unused", "void"]
"""Ways in which the weight is used otherwise, or less, from step 3 on."""


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        padding = 3 if way == "padded" else None
        self.tokens = nn.Embedding(VOCAB, WIDTH, padding_idx=padding)
        self.others = nn.Embedding(VOCAB, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight
        if way == "two_tables":
            self.others.weight = self.tokens.weight
        self.tokens.max_norm = 0.5 if way == "renormed" else None
        self.tokens.scale_grad_by_freq = way == "by_frequency"
        self.way, self.is_changed = way, False

    def forward(self, tokens):
        way, is_changed = self.way, self.is_changed
        logits = 0.0
        if way == "before_the_layer" and is_changed:
            logits = 0.1 * self.head(torch.ones(*tokens.shape, WIDTH, dtype=self.head.weight.dtype))
        if way == "recomputed" and is_changed:
            looked_up = checkpoint(lambda x: self.tokens(tokens) * x, torch.ones((), requires_grad=True))
        else:
            looked_up = self.tokens(tokens)
        if way in ("two_lookups", "two_tables"):
            looked_up = looked_up + (self.tokens if way == "two_lookups" else self.others)(tokens.flip(1))
        else:
            looked_up = looked_up + self.others(tokens)
        if way == "functional" and is_changed:
            looked_up = looked_up + nn.functional.embedding(tokens.flip(0), self.tokens.weight)
        if way == "unused" and is_changed:
            return self.hidden(looked_up).square().mean()
        if way == "checkpointed":
            looked_up = checkpoint(self.hidden, looked_up, use_reentrant=False)
        logits = logits + self.head(torch.tanh(self.hidden(looked_up)))
        return nn.functional.cross_entropy(logits.view(-1, VOCAB), tokens.roll(1).flatten().long())


def train(world, way, least_bytes):
    """Train in one way; returns the weights, and how many lookups were added as rows in each step."""
    before, lending.LEAST_BYTES = lending.LEAST_BYTES, least_bytes
    add_rows = Bucket.add_rows
    added = []

    def counted(bucket, slot, rows, values):
        added.append(slot)
        assert len(rows) == len(values) == len(rows.unique())
        add_rows(bucket, slot, rows, values)

    Bucket.add_rows = counted
    try:
        return _train(world, way, added)
    finally:
        lending.LEAST_BYTES, Bucket.add_rows = before, add_rows


def _train(world, way, added):
    torch.manual_seed(1)
    net = Net(way)
    if way == "float64":
        net.double()
    net.tokens.weight.requires_grad_(way != "frozen")
    if way == "hooked":
        net.tokens.weight.register_hook(lambda grad: grad * 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-3)
    stage = int(way[-1]) if way.startswith("zero") else 0
    model = lockstep.DataParallel(net, **({"optimizer": optimizer, "zero": stage} if stage else {}))
    if way == "hook":
        model.register_comm_hook(None, reduce)
    generator = torch.Generator().manual_seed(world.rank)
    num_added = []
    for step in range(STEPS):
        net.is_changed = step >= CHANGES_AT
        optimizer.zero_grad()
        # Few tokens, so that rows come several times.
        tokens = torch.randint(24, (4, 12), generator=generator)
        tokens = tokens.int() if way == "int32" else tokens
        if way == "accumulated":
            with model.no_sync():
                model(tokens.flip(0)).backward()
            if step == STEPS - 1:
                optimizer.zero_grad()  # Else what was accumulated has its own memory, and nothing is lent.
        if way == "void" and step == CHANGES_AT:
            fail_once(world, model, tokens)
        with torch.autocast("cpu", torch.float16) if way == "autocast" else contextlib.nullcontext():
            loss = model(tokens)
        if way == "regularised" and net.is_changed:
            loss = loss + 1e-2 * net.tokens.weight.square().sum()
        if way == "gradient_asked_for":
            kept = torch.autograd.grad(loss, net.tokens.weight, retain_graph=True)[0]
            copied = kept.clone()
        if way == "penalised":
            loss.backward(create_graph=True)
            for param in net.parameters():
                param.grad = param.grad.detach()
        elif way == "weighted":
            lockstep.backward(loss, weight=world.rank + 1)
        else:
            loss.backward()
        if way == "gradient_asked_for":
            assert torch.equal(kept, copied)
        num_added.append(len(added))
        added.clear()
        optimizer.step()
    with model.whole_params():
        return [param.detach().clone() for param in net.parameters()], num_added


def reduce(state, bucket):
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def fail_once(world, model, tokens):
    """A pass that fails on worker 1 when the head has its gradient, and the embedding not yet."""
    hook = model.module.hidden.weight.register_hook(fail) if world.rank == 1 else None
    with pytest.raises(ArithmeticError if world.rank == 1 else lockstep.StepVoid):
        model(tokens).backward()
    if hook is not None:
        hook.remove()
        with contextlib.suppress(lockstep.StepVoid):
            model._reducer._abandon_broken_pass()


@pytest.mark.parametrize("way", [*ADDED, *WHOLE])
def test_rows_that_are_added_to_the_layers_gradient_give_the_same_bits(started_pool, way):
    for workers in (3,) if way == "three_workers" else (2, 4):
        rows = started_pool.run(workers, train, way, 1 << 10)
        whole = started_pool.run(workers, train, way, NEVER)
        found = [digest(weights) for weights, _ in rows]
        assert found == [digest(weights) for weights, _ in whole]
        assert len(set(found)) == 1 or way == "renormed", "what is written in a forward pass is each worker's own"
        assert all(num_added == [0] * STEPS for _, num_added in whole)
        for _, num_added in rows:
            assert num_added[0] == 0, "the first step shows the order of gradients"
            assert num_added[-1] == (way in ADDED) * (2 if way in ("two_tables", "two_lookups") else 1)


@pytest.mark.parametrize("way", MIXED)
def test_a_table_that_is_used_otherwise_too(started_pool, way):
    rows = started_pool.run(2, train, way, 1 << 10)
    whole = started_pool.run(2, train, way, NEVER)
    assert digest(rows[0][0]) == digest(rows[1][0])
    for one, other in zip(rows[0][0], whole[0][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for _, num_added in rows:
        assert num_added[:3] == [0, 1, 1]
        assert num_added[-1] == (way == "void")


def freeze_between(world, least_bytes):
    """All is frozen between a forward pass and its backward pass: torch tells of gradients, and there are none."""
    before, lending.LEAST_BYTES = lending.LEAST_BYTES, least_bytes
    torch.manual_seed(1)
    net = Net("plain")
    model = lockstep.DataParallel(net)
    lending.LEAST_BYTES = before
    generator = torch.Generator().manual_seed(world.rank)
    grads = []
    for step in range(STEPS):
        loss = model(torch.randint(24, (4, 12), generator=generator))
        if step == CHANGES_AT:
            net.requires_grad_(False)
        loss.backward()
        net.requires_grad_(True)
        grads.append(None if net.tokens.weight.grad is None else net.tokens.weight.grad.clone())
        net.zero_grad()
    return grads


def test_a_weight_that_is_frozen_between_forward_and_backward(started_pool):
    rows = started_pool.run(2, freeze_between, 1 << 10)[0]
    whole = started_pool.run(2, freeze_between, NEVER)[0]
    for one, other in zip(rows, whole, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def leave(world):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(512, 512), nn.Linear(512, 512, bias=False))
    net[1].weight = net[0].weight
    tokens = torch.arange(8)
    expected = net(tokens)
    model = lockstep.DataParallel(net)
    assert "forward" in vars(net[0])
    assert torch.equal(net(tokens), expected)
    assert torch.equal(net[0](input=tokens), net[0].weight[:8])
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        nn.init.zeros_(other[0].weight)
        assert not other(tokens).any()
        assert torch.equal(net(tokens), expected)
    assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(tokens), expected)
    assert torch.equal(torch.vmap(net)(tokens), expected)
    swapped = {name: torch.zeros_like(param) for name, param in net.named_parameters()}
    assert not torch.func.functional_call(net, swapped, (tokens,)).any()
    for wrong in (tokens.float(), tokens + 512):
        with pytest.raises((RuntimeError, IndexError)):
            net(wrong)
    twice = [torch.autograd.grad(each(tokens).square().sum(), each[0].weight, create_graph=True)[0].square().sum()
             for each in (net, copy.deepcopy(net))]  # fmt: skip
    assert torch.equal(twice[0], twice[1])
    del model
    gc.collect()
    assert "forward" not in vars(net[0]) and "forward" not in vars(net[1])


def test_the_module_stays_what_it_is_with_a_tied_table(started_pool):
    started_pool.run(2, leave, timeout=120)
