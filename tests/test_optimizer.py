"""The trial whether an optimizer treats every element by itself: right, and without a trace."""

import torch
from torch import nn

from lockstep.replica.optimizer import Grain, grain_of

CPU = torch.device("cpu")


class Counting(torch.optim.SGD):
    """Counts its steps in attributes of its own, and may add noise."""

    def __init__(self, params, noise):
        super().__init__(params, lr=0.1)
        self.noise = noise
        self.counts, self.seen, self.total = {"steps": 0}, [], torch.zeros(())

    def step(self, closure=None):
        self.counts["steps"] += 1
        self.seen.append(len(self.param_groups[0]["params"]))
        self.total += 1
        super().step(closure)
        for param in self.param_groups[0]["params"] if self.noise else ():
            param.data.add_(torch.randn_like(param))


def test_the_optimizer_is_left_as_it_was():
    optimizer = Counting([nn.Parameter(torch.ones(3))], noise=False)
    assert grain_of(optimizer, CPU) is Grain.ELEMENT
    assert (optimizer.counts, optimizer.seen, optimizer.total.item()) == ({"steps": 0}, [], 0)
    assert not optimizer.state


def test_nothing_is_drawn_from_the_scripts_generator():
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    assert grain_of(Counting([nn.Parameter(torch.ones(3))], noise=True), CPU) is Grain.TENSOR
    assert torch.equal(torch.rand(4), expected)
