"""Linear layers that compute gradients in their slots: the same bits as when they are copied, whatever is done."""

import contextlib
import copy
import gc
import hashlib
import pickle
import random

import pytest
import torch
from amount import some
from crowded import crowded
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.replica import bucket, lending

STEPS, CHANGES_AT = 6, 3
NEVER = 1 << 40

LENT = [
    "plain", "three_dims", "no_bias", "small_buckets", "checkpointed", "recomputed", "gradient_asked_for",
    "accumulated", "zero1", "zero2", "zero3", "hook", "half", "nested",
]  # fmt: skip
"""Ways to train in which slots are lent to the end."""
COPIED = [
    "weighted", "zeroed_in_place", "never_zeroed", "hooked", "hooked_after", "hooked_later", "autocast", "penalised",
]  # fmt: skip
"""Ways in which nothing can be lent, at least in the last step."""
PARTLY_LENT = ["frozen", "transposed", "unused_later"]
"""Ways in which one of the two is lent."""
TOLD = {"accumulated", "half", *COPIED} - {"hooked_later"}
"""Ways in which all gradients are told of to the end."""
MIXED = ["twice", "regularised", "functional", "void_twice", "void_twice_zero1"]
"""Ways in which a weight is found to be used otherwise too, from step 3 on."""

FEW_LATE = [
    "plain", "recomputed", "nested", "hook", "zero1", "zero3", "unused_later", "hooked_later", "zeroed_in_place",
]  # fmt: skip
LATE = [f"late_{way}" for way in some(FEW_LATE, [*LENT, *PARTLY_LENT, *COPIED])]
"""The same where all is sent at the end of a pass, since no core is free."""


class Net(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.first = nn.Linear(64, 128, bias=way != "no_bias")
        self.second = nn.Linear(128, 64, bias=way != "no_bias")
        self.head = nn.Linear(64, 2)
        self.way, self.is_changed = way, False

    def forward(self, x):
        way = self.way
        if way == "transposed":
            x = x.t().contiguous().t()
        if way == "three_dims":
            x = x.view(2, -1, 64)
        if way in ("checkpointed", "recomputed"):
            hidden = checkpoint(self.both, x.requires_grad_(), use_reentrant=way == "recomputed")
        else:
            hidden = self.both(x)
        if self.is_changed and way in ("twice", "void_twice", "void_twice_zero1"):
            hidden = self.both(hidden)
        if self.is_changed and way == "functional":
            hidden = nn.functional.linear(nn.functional.linear(hidden, self.first.weight), self.second.weight)
        if self.is_changed and way == "nested":
            hidden = checkpoint(self.both, hidden, use_reentrant=True)
        return self.head(hidden).square().mean()

    def both(self, x):
        if self.is_changed and self.way == "unused_later":
            return torch.tanh(self.first(x))[..., :64]
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def train(world, way, least_bytes):
    """Train in one way; returns the weights, how many slots were lent in each step, and how many of those quietly."""
    before, lending.LEAST_BYTES = lending.LEAST_BYTES, least_bytes
    try:
        if way.startswith("late_"):
            with crowded(world):
                return _train(world, way.removeprefix("late_"), None)
        return _train(world, way, 0.001 if way == "small_buckets" else 0.1)
    finally:
        lending.LEAST_BYTES = before


def _train(world, way, cap_mb):
    torch.manual_seed(1)
    net = Net(way)
    net.first.weight.requires_grad_(way != "frozen")
    if way == "hooked_after":
        net.first.weight.register_post_accumulate_grad_hook(double)
        net.second.weight.register_post_accumulate_grad_hook(double)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    stage = int(way[-1]) if "zero" in way and way[-1].isdigit() else 0
    split = {"optimizer": optimizer, "zero": stage} if stage else {}
    wire = lockstep.wire.Half("fp16") if way == "half" else None
    model = lockstep.DataParallel(net, bucket_cap_mb=cap_mb, wire=wire, **split)
    if way == "hook":
        model.register_comm_hook(None, halve_and_double)
    elif way == "hooked":
        net.first.weight.register_hook(lambda grad: grad * 2)
        net.second.weight.register_hook(lambda grad: grad * 2)
    lent = count_loans(model._reducer)
    generator = torch.Generator().manual_seed(world.rank)
    num_lent, num_quiet = [], []
    for step in range(STEPS):
        net.is_changed = step >= CHANGES_AT
        if way == "hooked_later" and step == CHANGES_AT:
            net.first.weight.register_hook(lambda grad: grad * 2)
            net.second.weight.register_hook(lambda grad: grad * 2)
        if way != "never_zeroed":
            optimizer.zero_grad(set_to_none=way != "zeroed_in_place")
        x = torch.randn(32, 64, generator=generator)
        if way == "accumulated":
            with model.no_sync():
                model(torch.randn(32, 64, generator=generator)).backward()
            if step == STEPS - 1:
                optimizer.zero_grad()  # Else what was accumulated has its own memory, and nothing is lent.
        if way.startswith("void") and step == CHANGES_AT:
            fail_once(world, model, x, net.first.bias)
        with torch.autocast("cpu", torch.float16) if way == "autocast" else contextlib.nullcontext():
            loss = model(x)
        if net.is_changed and way == "regularised":
            loss = loss + 1e-2 * (net.first.weight.square().sum() + net.second.weight.square().sum())
        if way == "gradient_asked_for":
            kept = torch.autograd.grad(loss, net.second.weight, retain_graph=True)[0]
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
        num_lent.append(len(lent))
        num_quiet.append(sum(lent))
        lent.clear()
        optimizer.step()
    return [param.detach().clone() for param in net.parameters()], num_lent, num_quiet


def count_loans(reducer):
    """A list that grows with every slot that is lent: by whether autograd is given nothing then."""
    lent, lend = [], reducer.lender.lend

    def counted(index, param, operands):
        loan = lend(index, param, operands)
        if loan is not None:
            lent.append(loan[2])
        return loan

    reducer.lender.lend = counted
    return lent


def fail_once(world, model, x, param):
    """A pass that fails on worker 1 at the gradient of a parameter."""
    hook = param.register_hook(fail) if world.rank == 1 else None
    with pytest.raises(ArithmeticError if world.rank == 1 else lockstep.StepVoid):
        model(x).backward()
    if hook is not None:
        hook.remove()
        with contextlib.suppress(lockstep.StepVoid):
            model._reducer._abandon_broken_pass()


def fail(grad):
    raise ArithmeticError("no gradient here")


def double(param):
    param.grad.mul_(2)


def halve_and_double(state, bucket):
    work = torch.distributed.all_reduce(bucket.buffer().mul_(0.5), async_op=True)
    return work.get_future().then(lambda future: future.value()[0].mul_(2).div_(torch.distributed.get_world_size()))


def digest(weights):
    return hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()


@pytest.mark.parametrize("way", [*LENT, *PARTLY_LENT, *COPIED, *LATE])
def test_gradients_computed_in_their_slots_have_the_same_bits(started_pool, way):
    for workers in (2, 4):
        lent = started_pool.run(workers, train, way, 1 << 10)
        copied = started_pool.run(workers, train, way, NEVER)
        assert digest(lent[0][0]) == digest(copied[0][0])
        plain = way.removeprefix("late_")
        assert len({digest(weights) for weights, *_ in lent}) == 1 or plain in ("zero1", "zero2", "zero3")
        assert all(num_lent == [0] * STEPS for _, num_lent, _ in copied)
        for _, num_lent, num_quiet in lent:
            assert num_lent[0] == 0, "the first step shows the order of gradients"
            assert num_lent[-1] == 2 - (plain in PARTLY_LENT) - 2 * (plain in COPIED)
            assert (max(num_quiet) > 0) == (way in LATE and plain not in TOLD)


@pytest.mark.parametrize("way", [*MIXED, *(f"late_{way}" for way in MIXED)])
def test_a_weight_that_is_used_otherwise_too_is_not_lent_again(started_pool, way):
    lent = started_pool.run(2, train, way, 1 << 10)
    copied = started_pool.run(2, train, way, NEVER)
    assert digest(lent[0][0]) == digest(lent[1][0])
    for one, other in zip(lent[0][0], copied[0][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    for _, num_lent, num_quiet in lent:
        assert (max(num_quiet) > 0) == way.startswith("late_")
        assert (num_lent[:3], num_lent[-1]) == ([0, 2, 2], 0)
        assert num_lent[3] > 0


def mix(world, seed, stage, cap_mb, is_told):
    """Steps that each do something else; the gradients of each, and how many slots were lent quietly in all.

    is_told: every gradient is told of, and copied.
    """
    before = lending.LEAST_BYTES, bucket.SMALL_BYTES
    lending.LEAST_BYTES, bucket.SMALL_BYTES = (NEVER, 0) if is_told else (1 << 10, bucket.SMALL_BYTES)
    try:
        with crowded(world):
            return _mix(world, random.Random(seed), stage, cap_mb)
    finally:
        lending.LEAST_BYTES, bucket.SMALL_BYTES = before


def _mix(world, chance, stage, cap_mb):
    torch.manual_seed(1)
    layers = nn.ModuleList(nn.Linear(96, 96, bias=number % 2 == 0) for number in range(4))
    head = nn.Linear(96, 2)
    net = Mixed(layers, head)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    split = {"optimizer": optimizer, "zero": stage} if stage else {}
    model = lockstep.DataParallel(net, bucket_cap_mb=cap_mb, **split)
    lent = count_loans(model._reducer)
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
            with model.no_sync():
                model(x).backward()
        if "fail" in changes:
            is_skipped = any("skip" in change for change in changes)
            fail_once(world, model, x, head.weight if is_skipped else layers[number].weight)
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
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in optimizer.param_groups[0]["params"]]
        found.append((changes, grads))
        optimizer.zero_grad(set_to_none="zeroed_in_place" not in changes)
    return found, sum(lent)


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


@pytest.mark.parametrize("stage, cap_mb", [(0, None), (1, None), (3, None), (0, 0.06)])
@pytest.mark.parametrize("seed", some((2, 5), range(30)))
def test_steps_that_each_do_something_else(started_pool, seed, stage, cap_mb):
    """Without a cap all is sent at the end of a pass."""
    lent = started_pool.run(2, mix, seed, stage, cap_mb, False)
    copied = started_pool.run(2, mix, seed, stage, cap_mb, True)
    for (mine, num_quiet), (theirs, _) in zip(lent, copied, strict=True):
        assert (num_quiet > 0) == (cap_mb is None)
        for step, ((changes, grads), (_, expected)) in enumerate(zip(mine, theirs, strict=True)):
            for number, (grad, wanted) in enumerate(zip(grads, expected, strict=True)):
                torch.testing.assert_close(
                    grad, wanted, rtol=1e-4, atol=1e-6, msg=lambda m: f"{step} {changes} {number}: {m}"
                )


def test_nothing_is_lent_where_the_scale_is_no_power_of_two(started_pool):
    lent = started_pool.run(3, train, "plain", 1 << 10)
    assert digest(lent[0][0]) == digest(started_pool.run(3, train, "plain", NEVER)[0][0])
    assert lent[0][1] == [0] * STEPS


def leave(world):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))
    x = torch.randn(4, 512)
    expected = net(x)
    model = lockstep.DataParallel(net)
    assert "forward" in vars(net[0])
    assert torch.equal(net(x), expected)
    assert torch.equal(net[0](input=x), nn.functional.linear(x, net[0].weight, net[0].bias))
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), copy.deepcopy(copy.deepcopy(net))):
        nn.init.zeros_(other[2].weight)
        assert torch.equal(other(x), other[2].bias.expand(4, -1))
        assert torch.equal(net(x), expected)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    swapped = {name: torch.zeros_like(param) for name, param in net.named_parameters()}
    assert not torch.func.functional_call(net, swapped, (x,)).any()
    assert torch.equal(torch.vmap(net)(x), torch.vmap(copy.deepcopy(net))(x))
    jacobian = torch.func.jacfwd(net)(x[0])
    torch.testing.assert_close(jacobian, torch.func.jacrev(net)(x[0]))
    torch.testing.assert_close(torch.func.grad(lambda scale: (net(x) * scale).sum())(torch.ones(())), net(x).sum())
    assert torch.equal(torch.jit.script(copy.deepcopy(net))(x), expected)
    del model
    gc.collect()
    assert "forward" not in vars(net[0])
    net[0].forward = lambda x: x
    lockstep.DataParallel(net)
    assert torch.equal(net[0](x), x), "a forward of the script's own stays"


def test_the_module_stays_what_it_is(started_pool):
    started_pool.run(2, leave, timeout=120)


def wrap_others(world):
    """Layers whose weight is computed from another, or is none of the wrapper's business."""
    pruned, normed, ignored = (nn.Sequential(nn.Linear(512, 512)) for _ in range(3))
    prune.random_unstructured(pruned[0], "weight", amount=0.5)
    nn.utils.spectral_norm(normed[0])
    ignored._ddp_params_and_buffers_to_ignore = ["0.weight"]
    for net in (pruned, normed, ignored):
        model = lockstep.DataParallel(net)
        assert "forward" not in vars(net[0])
        for _ in range(3):
            model(torch.randn(4, 512)).sum().backward()


def test_layers_without_a_weight_of_their_own(started_pool):
    started_pool.run(2, wrap_others)


def feed_back(world, least_bytes):
    """A layer whose input is its own last gradient, which lies in the slot."""
    before, lending.LEAST_BYTES = lending.LEAST_BYTES, least_bytes
    torch.manual_seed(0)
    net = nn.Linear(128, 128, bias=False)
    model = lockstep.DataParallel(net)
    lending.LEAST_BYTES = before
    x = torch.randn(128, 128)
    for _ in range(4):
        net.weight.grad = None
        model(x).square().sum().backward()
        x = net.weight.grad
        x.div_(x.norm())
    return net.weight.grad.clone()


def test_a_gradient_that_is_computed_from_the_one_before(started_pool):
    assert torch.equal(started_pool.run(2, feed_back, 1 << 10)[0], started_pool.run(2, feed_back, NEVER)[0])
