"""Two models in one graph: a generator against a discriminator, each wrapped, each with its own optimizer.

    python examples/gan.py
    lockstep run -n 2 examples/gan.py

The data are points on a ring of eight heaps. While the generator learns, the discriminator is frozen, as in any such
script; no flag says so. The noise comes from a generator of each worker's own: all workers drawing the same noise would
be one batch, N times.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def heaps(count: int) -> torch.Tensor:
    """Points near eight places on a circle."""
    dice = torch.Generator().manual_seed(0)
    angles = torch.randint(8, (count,), generator=dice) * (torch.pi / 4)
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(count, 2, generator=dice)


def layers(*sizes: int) -> nn.Sequential:
    """Linear layers, with activations between them."""
    pairs = [(nn.Linear(*pair), nn.LeakyReLU(0.2)) for pair in pairwise(sizes)]
    return nn.Sequential(*[module for pair in pairs for module in pair][:-1])


def main() -> None:
    """Play, and say how near to the heaps the generator's points are."""
    world = lockstep.join(seed=0)
    generator = lockstep.DataParallel(layers(8, 64, 64, 2).to(world.device))
    discriminator = lockstep.DataParallel(layers(2, 64, 64, 1).to(world.device))
    optimizers = [torch.optim.Adam(each.parameters(), 2e-3, (0.5, 0.9)) for each in (generator, discriminator)]
    loader = lockstep.shard(DataLoader(TensorDataset(heaps(4096)), batch_size=128, shuffle=True))
    dice = torch.Generator(world.device).manual_seed(1000 * world.seed + world.rank)

    for epoch in range(8):
        for (real,) in loader:
            noise = torch.randn(len(real), 8, generator=dice, device=world.device)
            made = generator(noise)

            discriminator.requires_grad_(True)
            real_loss = F.softplus(-discriminator(real)).mean()
            made_loss = F.softplus(discriminator(made.detach())).mean()
            (real_loss + made_loss).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()

            discriminator.requires_grad_(False)
            loss = F.softplus(-discriminator(made)).mean()
            loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
        said = world.mean(torch.stack([loss.detach(), (real_loss + made_loss).detach()]), weight=len(real)).tolist()
        if world.is_main:
            print(f"epoch {epoch}: generator {said[0]:.3f}, discriminator {said[1]:.3f}")

    with torch.no_grad():
        made = generator(torch.randn(500, 8, generator=dice, device=world.device))
        radius = world.mean(made.norm(dim=1).mean(), weight=500)
    if world.is_main:
        print(f"mean distance of the generator's points from the middle: {float(radius):.2f} (the heaps': 1.00)")


if __name__ == "__main__":
    main()
