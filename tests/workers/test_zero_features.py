"""What users do to models, with everything split: the weights must come out as with nothing split."""

import pytest
import torch
import torch.nn.functional as F
from amount import some
from models import GPT, build, difference, part_of, weights_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import lockstep

BACKENDS = some(["gloo"], ["shm", "gloo"])
STAGES = (1, 2, 3)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)


def steps(world, model, optimizer, count, first=0, loss_of=None):
    net = model.module
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        x, y = part_of(type(net).batch(8, generator, torch.float64), world)
        loss = F.cross_entropy(model(x), y) if loss_of is None else loss_of(model, x, y, step)
        lockstep.backward(loss, weight=len(x))
        optimizer.step()
        optimizer.zero_grad()


def whole_weights(model):
    with model.whole_params():
        return weights_of(model.module)


def frozen(world, zero):
    net = build("gpt", torch.float64)
    for param in net.blocks[0].parameters():
        param.requires_grad_(False)
    net.blocks[1].norm1.requires_grad_(False)
    optimizer = adamw(net)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
    steps(world, model, optimizer, 3)
    net.blocks[0].requires_grad_(True)
    steps(world, model, optimizer, 3, first=3)
    return whole_weights(model)


class CheckpointedGPT(GPT):
    reentrant = False

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x).transpose(1, 2)


def checkpointed(world, zero, reentrant):
    torch.manual_seed(3)
    net = CheckpointedGPT().double()
    net.reentrant = reentrant
    optimizer = adamw(net)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
    steps(world, model, optimizer, 4)
    return whole_weights(model)


def checkpointed_by_saving(world, zero):
    return checkpointed(world, zero, False)


def checkpointed_by_reentry(world, zero):
    return checkpointed(world, zero, True)


def compiled(world, zero):
    net = build("gpt", torch.float64)
    for block in net.blocks:
        block.compile(backend="aot_eager")
    optimizer = adamw(net)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    steps(world, model, optimizer, 3)
    assert stats["unique_graphs"] - before <= len(net.blocks)  # Nothing of ours is compiled, or has it compiled anew.
    return whole_weights(model)


def kept_after_forward(world, zero):
    net = build("gpt", torch.float64)
    optimizer = adamw(net)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, reshard_after_forward=False)
    for step in range(2):
        x, y = part_of(GPT.batch(8, torch.Generator().manual_seed(step), torch.float64), world)
        loss = F.cross_entropy(model(x), y)
        assert not any(is_absent(param) for param in net.parameters())
        lockstep.backward(loss, weight=len(x))
        assert zero < 3 or world.backend == "shm" or all(map(is_absent, net.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    assert zero < 3 or world.backend == "shm" or all(map(is_absent, net.blocks.parameters()))
    return whole_weights(model)


def is_absent(param):
    return param.untyped_storage().nbytes() == param.element_size() < param.numel() * param.element_size()


def accumulated(world, zero):
    net = build("gpt", torch.float64)
    optimizer = adamw(net)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
    for step in range(3):
        for micro in range(3):
            generator = torch.Generator().manual_seed(10 * step + micro)
            x, y = part_of(GPT.batch(8, generator, torch.float64), world)
            model.require_backward_grad_sync = micro == 2
            (F.cross_entropy(model(x), y) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_weights(model)


def synced_twice(world, zero):
    """Two synchronised passes before one step: the second must add to the first."""
    net = build("gpt", torch.float64)
    optimizer = adamw(net)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
    for step in range(3):
        for micro in range(2):
            generator = torch.Generator().manual_seed(10 * step + micro)
            x, y = part_of(GPT.batch(8, generator, torch.float64), world)
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return whole_weights(model)


class Mixed(nn.Module):
    """Two dtypes, a parameter that is used now and then, and one that never is."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 20).float()
        self.second = nn.Linear(20, 5).double()
        self.sometimes = nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.never = nn.Parameter(torch.ones(7))
        self.uses = True

    def forward(self, x):
        out = self.second(self.first(x.float()).double().tanh())
        return out * self.sometimes if self.uses else out

    batch = staticmethod(lambda size, generator, dtype: (
        torch.randn(size, 12, generator=generator), torch.randint(5, (size,), generator=generator)))  # fmt: skip


def mixed(world, zero):
    torch.manual_seed(3)
    net = Mixed()
    optimizer = adamw(net)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)

    def loss_of(model, x, y, step):
        net.uses = step % 2 == 0 and world.rank == 0
        return F.cross_entropy(model(x), y)

    steps(world, model, optimizer, 5, loss_of=loss_of)
    weights = whole_weights(model)
    assert (weights["never"] == 1).all()  # Not even decayed.
    return weights


def late_group(world, zero):
    net = build("gpt", torch.float64)
    optimizer = torch.optim.AdamW(net.blocks.parameters(), lr=1e-3)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
    steps(world, model, optimizer, 2)
    optimizer.add_param_group({"params": [net.embed.weight], "lr": 1e-2})
    steps(world, model, optimizer, 3, first=2)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-2]
    return whole_weights(model)


def begun_before(world, zero):
    """The optimizer has state when the model is wrapped."""
    net = build("gpt", torch.float64)
    optimizer = adamw(net)
    x, y = GPT.batch(8, torch.Generator().manual_seed(99), torch.float64)
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
    steps(world, model, optimizer, 3)
    return whole_weights(model)


def changed_by_hand(world, zero):
    net = build("gpt", torch.float64)
    optimizer = adamw(net)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
    steps(world, model, optimizer, 2)
    with model.whole_params(), torch.no_grad():
        for param in net.parameters():
            param.mul_(0.5)
    steps(world, model, optimizer, 2, first=2)
    state = model.state_dict()
    with torch.no_grad():
        state = {name: value * 2 for name, value in state.items()}
    model.load_state_dict(state)
    with torch.no_grad():
        model(GPT.batch(2, torch.Generator().manual_seed(1), torch.float64)[0])  # Evaluation gathers and releases too.
    steps(world, model, optimizer, 2, first=4)
    return whole_weights(model)


def overflowing(world, zero):
    """A gradient that is infinite on one worker's part alone: all skip that step, and the scale goes down once."""
    net = build("mlp", torch.float32)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        x, y = part_of(type(net).batch(8, torch.Generator().manual_seed(step), torch.float32), world)
        with torch.autocast("cpu", torch.float16):
            out = model(x).float()
        if step == 1 and world.rank == 1:
            out = out * torch.tensor([1.0, float("inf"), 1.0, 1.0, 1.0])
        scaler.scale(F.cross_entropy(out, y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    return whole_weights(model)


def test_all_skip_a_step_together(pool):
    expected = pool.run(2, overflowing, 0)[0]
    for zero in STAGES:
        for weights in pool.run(2, overflowing, zero):
            assert difference(weights, expected) <= 1e-5


CASES = [
    frozen, checkpointed_by_saving, checkpointed_by_reentry, compiled, accumulated, synced_twice, mixed, late_group,
    begun_before, changed_by_hand, kept_after_forward,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_equals_nothing_split(pool, case):
    expected = pool.run(2, case, 0)[0]
    tolerance = 1e-6 if case is mixed else 1e-12
    for zero in some([3], STAGES) if case is compiled else STAGES:
        for weights in pool.run(2, case, zero):
            assert difference(weights, expected) <= tolerance, zero


def with_masters(world, zero, folder):
    net = build("gpt", torch.float32)
    optimizer = adamw(net)
    # Not bfloat16: on some virtual machines torch's own kernels for it crash.
    precision = lockstep.Precision(params=torch.float16, grads=torch.float32, master=torch.float64)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, precision=precision)
    steps(world, model, optimizer, 3)
    assert {param.dtype for param in net.parameters()} == {torch.float16}
    assert {param.dtype for group in optimizer.param_groups for param in group["params"]} <= {torch.float64}
    lockstep.save(folder, model, optimizer, step=3)
    steps(world, model, optimizer, 3, first=3)
    expected = whole_weights(model)
    again = lockstep.DataParallel(net2 := build("gpt", torch.float32), optimizer=(other := adamw(net2)), zero=zero,
                                  precision=precision)  # fmt: skip
    lockstep.load(folder, again, other)
    steps(world, again, other, 3, first=3)
    assert difference(whole_weights(again), expected) == 0
    state = again.state_dict()
    again.load_state_dict({name: value + 1 for name, value in state.items()})
    other.step()  # No gradients: parameters are rounded from the masters again, which must know of the change.
    changed = whole_weights(again)
    assert all(abs(changed[name] - expected[name] - 1).max() < 0.01 for name in expected)
    return expected


@pytest.mark.parametrize("workers", [1, 2])
def test_master_weights(pool, tmp_path, workers):
    results = [pool.run(workers, with_masters, zero, str(tmp_path / str(zero)))[0] for zero in STAGES]
    for weights in results[1:]:
        assert difference(weights, results[0]) <= 1e-3  # A rounding of float16 apart, if at all.


def weighed_in_half(world, zero):
    net = nn.Linear(7, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    precision = lockstep.Precision(params=torch.float16, grads=torch.float32, master=torch.float32)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, precision=precision)
    x = torch.linspace(1, 2, 7)[None] * (world.rank + 1)  # Its own gradient.
    lockstep.backward(model(x).sum(), weight=3 + 2 * world.rank)
    held = torch.zeros(7)
    for part in model._engine.parts:
        held[part.offset : part.offset + part.own.numel()] = part.own.grad
    return (world.sum(held) if world.size > 1 else held).tolist()


@pytest.mark.parametrize("zero", STAGES)
def test_half_gradients_are_weighed_in_float32(pool, zero):
    half = torch.linspace(1, 2, 7)
    expected = (half.half().float() * 3 + (half * 2).half().float() * 5) / 8
    for grads in pool.run(2, weighed_in_half, zero):
        torch.testing.assert_close(torch.tensor(grads), expected, rtol=1e-6, atol=0)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("half-way")


def fails_half_way(world, zero, failing_block):
    torch.manual_seed(3)
    net = GPT(depth=6).double()
    optimizer = adamw(net)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, bucket_cap_mb=0.01)
    begins_to_fail = False
    net.blocks[failing_block].register_forward_pre_hook(
        lambda _, args: (Fails.apply(*args),) if begins_to_fail else args
    )
    outcomes = []
    for step in range(4):
        begins_to_fail = step == 2 and world.rank == 1
        try:
            steps(world, model, optimizer, 1, first=step)
        except (ArithmeticError, lockstep.StepVoid) as error:
            outcomes.append(type(error).__name__)
            optimizer.zero_grad()
    return outcomes, whole_weights(model)


@pytest.mark.parametrize(("zero", "block"), [(1, 3), (2, 3), (3, 0), (3, 3), (3, 5)])
def test_a_void_step_changes_nothing(pool, zero, block):
    (first, weights), (second, others) = pool.run(2, fails_half_way, zero, block)
    assert (first, second) == (["StepVoid"], ["ArithmeticError"])
    assert difference(weights, others) == 0
    (_, expected), _ = pool.run(2, fails_half_way, 0, block)
    assert difference(weights, expected) <= 1e-12


def from_nowhere(world, zero):
    with torch.device("meta"):
        net = GPT()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
    first = whole_weights(model)
    assert not any(param.is_meta for param in net.parameters())
    steps(world, model, optimizer, 2)
    return first, whole_weights(model)


def test_models_built_on_the_meta_device(pool):
    alone, _ = pool.run(1, from_nowhere, 3)[0]
    assert all(abs(values).max() > 0 for name, values in alone.items() if "bias" not in name)
    for zero in STAGES:
        trained = []
        for first, last in pool.run(3, from_nowhere, zero):
            assert difference(first, alone) == 0
            trained.append(last)
        assert difference(trained[0], trained[2]) == 0


def refused(world):
    net = build("gpt")
    foreign = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    texts = []
    for options in (
        {"zero": 4, "optimizer": sgd},
        {"zero": 1},
        {"zero": 1, "optimizer": "sgd"},
        {"zero": 1, "optimizer": foreign},
        {"zero": 1, "optimizer": torch.optim.LBFGS(net.parameters())},
        {"precision": lockstep.Precision(), "optimizer": sgd},
        {"zero": 3, "optimizer": sgd, "precision": "bf16"},
    ):
        with pytest.raises(lockstep.UsageError) as caught:
            lockstep.DataParallel(net, **options)
        texts.append(str(caught.value))
    model = lockstep.DataParallel(net, optimizer=sgd, zero=1)
    for call in (lambda: model.join(), lambda: model.register_comm_hook(None, print)):
        with pytest.raises(lockstep.UsageError, match="zero=0"):
            call()
    return texts


def test_what_cannot_be_is_refused(pool):
    words = ["stages", "optimizer=optimizer", "torch.optim.Optimizer", "no parameter of this model", "closure",
             "zero=1, 2 or 3", "lockstep.Precision"]  # fmt: skip
    for texts in pool.run(2, refused):
        for text, word in zip(texts, words, strict=True):
            assert word in text
