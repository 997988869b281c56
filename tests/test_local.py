"""What LocalSGD and DiLoCo take, and the parts of them that need no other worker."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep import wire
from lockstep.replica.agreement import MESSAGE_BYTES, in_messages
from lockstep.train.local.anchor import Anchor, copy_of, follow
from lockstep.train.local.optimizers import OuterOptimizer, nesterov


@pytest.mark.parametrize("kind", [lockstep.LocalSGD, lockstep.DiLoCo])
@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"every": 0}, "1 or more"),
        ({"every": True}, "1 or more"),
        ({"every": 2.5}, "1 or more"),
        ({"every": 4, "delay": 0}, "1 to 4"),
        ({"every": 4, "overlap": True, "delay": 5}, "1 to 4"),
        ({"every": 4, "wire": "int8"}, "lockstep.wire"),
    ],
)
def test_arguments_that_cannot_be_right(kind, options, word):
    with pytest.raises(lockstep.UsageError, match=kind.__name__) as caught:
        kind(**options)
    assert word in str(caught.value)


def test_outer_is_a_function():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(lockstep.UsageError, match="a function from a list of parameters"):
        lockstep.DiLoCo(every=2, outer=optimizer)


def test_strategies_are_values():
    assert lockstep.LocalSGD(every=4, wire=wire.Int8()) == lockstep.LocalSGD(every=4, wire=wire.Int8())
    assert "every=4" in repr(lockstep.DiLoCo(every=4))


def test_common_weights_follow_the_mean_change():
    common = [nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.tensor([[3.0]]))]
    with torch.no_grad():
        follow(common, [torch.tensor([0.5, -1.0]), torch.tensor([[2.0]])])
    assert [each.tolist() for each in common] == [[1.5, 1.0], [[5.0]]]


def test_outer_steps_against_the_change_and_goes_on_later():
    """Its state comes back by tensors and plain values; that of another kind of optimizer is left out."""
    names, changes = ["a", "b"], [[torch.randn(3), torch.randn(2, 2)] for _ in range(4)]

    def start():
        return [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]

    common, plain = start(), start()
    outer, optimizer = OuterOptimizer(nesterov, common, names), nesterov(plain)
    for number, change in enumerate(changes):
        if number == 2:
            tensors, state = {name: each.clone() for name, each in outer.tensors().items()}, outer.state_dict()
            resumed = [nn.Parameter(each.detach().clone()) for each in common]
            later = OuterOptimizer(nesterov, resumed, names)
            later.load_tensors(tensors)
            later.load_state_dict(state)
        for param, each in zip(plain, change, strict=True):
            param.grad = -each
        optimizer.step()
        if number >= 2:
            later(resumed, [each.clone() for each in change])
        outer(common, [each.clone() for each in change])
    assert all(torch.equal(one, other) for one, other in zip(common, plain, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(common, resumed, strict=True))
    other = OuterOptimizer(lambda params: torch.optim.Adam(params), start(), names)
    other.load_tensors(tensors)
    other.load_state_dict(state)
    assert not other.optimizer.state


def test_state_travels_in_few_messages():
    """Tensors of one kind together, empty ones not at all."""
    half = torch.empty(MESSAGE_BYTES // 4, dtype=torch.float16)
    batches = in_messages([half, torch.empty(3), torch.empty(0), torch.empty(4)] * 3)
    assert sorted(map(len, batches)) == [1, 2, 6]
    assert all(len({each.dtype for each in together}) == 1 for together in batches)


def alone():
    """One worker that has trained on between sending and receiving."""
    world = lockstep.join()
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Linear(4, 5)).to(memory_format=torch.channels_last)
    own = list(net.parameters())
    before = [each.detach().clone() for each in own]
    names = [name for name, _ in net.named_parameters()]
    anchor = Anchor(world, names, lambda: own, None, 1 << 20, copy_of(own))
    with torch.no_grad():
        torch._foreach_add_(own, 0.5)
        anchor.send(keeps=True)
        torch._foreach_mul_(own, 2.0)
        anchor.receive()
    for param, was, common in zip(own, before, anchor.common, strict=True):
        assert common.stride() == param.stride()
        torch.testing.assert_close(common.detach(), was + 0.5)
        torch.testing.assert_close(param.detach(), 2 * (was + 0.5))
    anchor.go_back()
    assert all(torch.equal(one, other) for one, other in zip(own, anchor.common, strict=True))


def test_an_exchange_with_nobody():
    lockstep.launch(alone, workers=1)
