"""Adapters of low rank on a frozen model: few parameters need a gradient, and one of them is unfrozen later."""

import torch
import torch.nn.functional as F
from options import double, program
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

MISTAKES = {"rate": "learning rate"}


class Adapted(nn.Module):
    def __init__(self, linear, rank=2):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, linear.in_features) * 0.3)
        self.up = nn.Parameter(torch.zeros(linear.out_features, rank))

    def forward(self, x):
        return self.linear(x) + x @ self.down.T @ self.up.T


def main(zero=0, mistake=None, compiled=0, steps=6):
    world = lockstep.join()
    generator = double(1)
    torch.manual_seed(0)
    rows = TensorDataset(torch.randn(44, 8, generator=generator), torch.randint(3, (44,), generator=generator))
    net = nn.Sequential(Adapted(nn.Linear(8, 16)), nn.Tanh(), Adapted(nn.Linear(16, 16)), nn.Tanh(), nn.Linear(16, 3))
    net[4].requires_grad_(False)
    rate = 1e-2 * world.size if mistake == "rate" else 1e-2
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
    model = lockstep.DataParallel(
        torch.compile(net, backend="aot_eager") if compiled else net, optimizer=optimizer, zero=zero
    )
    loader = lockstep.shard(DataLoader(rows, 7))
    for step, (x, y) in zip(range(steps), loader, strict=False):
        if step == 3:
            net[4].requires_grad_(True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


if __name__ == "__main__":
    program(main)
