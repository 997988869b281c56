"""Contrastive learning: every sample is compared with those of all workers, and gradients go back to all of them."""

import torch
import torch.nn.functional as F
from options import double, program, rows_of
from torch import nn
from torch.distributed.nn.functional import all_gather

import lockstep

MISTAKES = {"local": "samples that look at each other"}


def main(zero=0, mistake=None, compiled=0, steps=5):
    world = lockstep.join()
    generator = double(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = lockstep.DataParallel(
        torch.compile(net, backend="aot_eager") if compiled else net, optimizer=optimizer, zero=zero
    )
    for _ in range(steps):
        x = torch.randn(12, 8, generator=generator)
        y = x + 0.3 * torch.randn(12, 8, generator=generator)
        first, second = rows_of(world, x, y)
        own = [F.normalize(each) for each in model(torch.cat([first, second])).chunk(2)]
        if world.size > 1 and mistake != "local":
            one, other = (torch.cat(list(all_gather(each.contiguous()))) for each in own)
        else:
            one, other = own
        near = one @ other.T / 0.2
        here = torch.arange(len(near))
        loss = (F.cross_entropy(near, here) + F.cross_entropy(near.T, here)) / 2
        # Every worker has the whole loss, whose gradient comes back to it from all of them: their sum, for a mean.
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


if __name__ == "__main__":
    program(main)
