"""What would train wrongly without a word: it raises, or warns, with what to do."""

import warnings

import pytest
import torch
from models import MLP, build, difference, weights_of
from torch import nn

import lockstep

BACKENDS = ["shm", "gloo"]


def wrapped(zero, **options):
    net = build("mlp")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, optimizer, lockstep.DataParallel(net, optimizer=optimizer, zero=zero, **options)


def passed(model, world, seed=1):
    x, _ = MLP.batch(4, torch.Generator().manual_seed(seed + world.rank), torch.float32)
    model(x).square().mean().backward()


def stray_optimizer(world, zero, kind):
    net, _, model = wrapped(zero)
    stray = getattr(torch.optim, kind)(net.parameters(), lr=0.1)
    passed(model, world)
    stray.step()


@pytest.mark.parametrize(("zero", "kind"), [(1, "SGD"), (2, "AdamW"), (3, "Adagrad")])
def test_an_optimizer_that_was_not_handed_over(pool, zero, kind):
    for ok, text in pool.run(2, stray_optimizer, zero, kind, expect_failure=True):
        assert not ok and "UsageError" in text and "step the optimizer that was given to DataParallel" in text


def torch_clips(world, zero):
    net, _, model = wrapped(zero)
    passed(model, world)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)


def test_torchs_clipping_of_split_gradients(pool):
    for zero in (1, 2, 3):
        for ok, text in pool.run(2, torch_clips, zero, expect_failure=True):
            assert not ok and "UsageError" in text and "model.clip_grad_norm_" in text


def around_split_gradients(world, zero):
    """Passes of every kind between which a parameter's gradient is not there."""
    net, optimizer, model = wrapped(zero)
    for step in range(3):
        with model.no_sync():
            passed(model, world, 3)
        passed(model, world, step)
        repr(net.net[0].weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        net.zero_grad(set_to_none=step == 1)
        with model.no_sync():
            passed(model, world, 7)
        ((net.net[0].weight ** 2).mean() + model(torch.ones(2, 12)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.whole_params():
        return weights_of(net)


def test_passes_after_split_gradients(pool):
    whole = pool.run(2, around_split_gradients, 0)[0]
    for zero in (1, 3):
        for weights in pool.run(2, around_split_gradients, zero):
            assert difference(weights, whole) <= 1e-6


def loss_fn(model, shard):
    return model(shard[0]).square().mean()


def steps(world, weight, sizes, zero=0):
    """What a step raises, and whether the weights are as before and the next one counts."""
    torch.manual_seed(3)
    net = MLP()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def weighed(model, shard):
        return (loss_fn(model, shard), weight) if weight is not None else loss_fn(model, shard)

    trainer = lockstep.Trainer(net, optimizer, weighed, shards=2, zero=zero)
    generator = torch.Generator().manual_seed(1)
    before = weights_of(net)
    try:
        trainer.step(MLP.batch(sizes[world.rank], generator, torch.float32))
    except (lockstep.UsageError, lockstep.StepVoid) as error:
        found = str(error)
    else:
        found = ""
    assert not found or difference(weights_of(net), before) == 0
    weight = None
    trainer.step(MLP.batch(4, generator, torch.float32))
    return found


@pytest.mark.parametrize("weight", [-1.0, float("inf"), torch.tensor(float("nan")), torch.ones(2), "2"])
def test_weights_that_are_no_counts(pool, weight):
    texts = pool.run(2, steps, weight, (4, 4))
    assert any("loss_fn: weight" in text for text in texts), texts


def test_global_batches_of_different_lengths(pool):
    for text in pool.run(2, steps, None, (6, 4)):
        assert "worker 0 was given a global batch of 6 samples and worker 1 one of 4" in text
    for text in pool.run(2, steps, None, (0, 0)):
        assert "has no samples" in text


def of_another_model(world, wrap):
    optimizer = torch.optim.SGD(MLP().parameters(), lr=0.1)
    if wrap == "trainer":
        lockstep.Trainer(MLP(), optimizer, loss_fn, shards=2)
    else:
        lockstep.DataParallel(MLP(), optimizer=optimizer)


@pytest.mark.parametrize("wrap", ["trainer", "model"])
def test_an_optimizer_of_another_model(pool, wrap):
    for ok, text in pool.run(1, of_another_model, wrap, expect_failure=True):
        assert not ok and "UsageError" in text and "parameter of this model" in text


def idle_steps(world, how):
    """What is warned of."""
    net = MLP()
    optimizer = torch.optim.SGD((MLP() if how == "copy" else net).parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = lockstep.DataParallel(net)
        if how == "dry":
            optimizer.step()
        for _ in range(4):
            passed(model, world)
            optimizer.step()
            optimizer.zero_grad()
    return [str(warning.message) for warning in caught]


def test_an_optimizer_whose_parameters_got_no_gradient(pool):
    for texts in pool.run(2, idle_steps, "copy"):
        assert [text for text in texts if "SGD has made 2 steps, and none of its 6 parameters" in text] == texts != []
    for how in ("right", "dry"):
        assert pool.run(2, idle_steps, how) == [[], []]


def unlike(world, is_unlike):
    torch.manual_seed(world.rank if is_unlike else 3)
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    with torch.no_grad():
        first.weight.fill_(1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lockstep.DataParallel(nn.Sequential(first, second))
    return [str(warning.message) for warning in caught]


def test_values_that_differ_at_wrapping_are_said(pool):
    (text,), *others = pool.run(3, unlike, True)
    assert "'0.bias' first, in 3 of 4 tensors, on worker 1, 2 others" in text and "lockstep.join(seed=...)" in text
    assert others == [[], []]
    assert pool.run(3, unlike, False) == [[], [], []]


class Expanded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 1).expand(3, 4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb=nan: a bucket must have a size"),
        ({"bucket_cap_mb": float("inf")}, "bucket_cap_mb=inf: a bucket must have a size"),
        ({"bucket_cap_mb": "25"}, "bucket_cap_mb='25': a bucket must have a size"),
        ({"bucket_cap_mb_list": [25, 0]}, "bucket_cap_mb=0: a bucket must have a size"),
        ({"wire": lockstep.wire.Half}, "wire=Half is the class: give one of it, as wire=lockstep.wire.Half"),
        ({"device_ids": [7000]}, "device_ids=[7000]: this worker sees"),
        ({"device_ids": ["x"]}, "device_ids=['x'] names no device"),
        ({"device_ids": 3}, "device_ids must be a list of one device, got 3"),
        ({"module": Expanded()}, "'weight' has elements that share memory (shape [3, 4], strides [1, 0]"),
    ],
)
def test_arguments_that_cannot_be_right(options, words):
    with pytest.raises(lockstep.UsageError) as raised:
        lockstep.DataParallel(**{"module": nn.Linear(2, 2), **options})
    assert words in str(raised.value)


def test_a_weight_that_is_no_number():
    for weight, words in ((torch.ones(3), "a Tensor of shape [3]"), ([1, 2], "[1, 2]"), ("3", "'3'")):
        with pytest.raises(lockstep.UsageError) as raised:
            lockstep.backward(torch.zeros((), requires_grad=True), weight=weight)
        assert f"lockstep.backward: weight must be one number, not {words}" in str(raised.value)


@pytest.mark.parametrize("timeout", [float("nan"), float("inf"), "10", 1e30])
def test_a_deadline_that_is_none(timeout):
    with pytest.raises(lockstep.UsageError, match=r"join\(timeout=.*\): a deadline is a number of seconds"):
        lockstep.join(timeout=timeout)
