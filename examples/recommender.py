"""A recommender: large tables of embeddings, of which a batch looks up a few rows. Only these rows travel.

    python examples/recommender.py
    lockstep run -n 2 examples/recommender.py

The gradients are dense and the optimizer is the usual one: neither `sparse=True` nor SparseAdam is needed. Adagrad is
what such models like. The ratings are made here from hidden tastes.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

USERS, ITEMS, RATINGS, WIDTH = 30_000, 10_000, 24_000, 16
"""Most rows get no gradient in a step of 512 ratings."""


def ratings() -> TensorDataset:
    """(user, item) and how much the user likes it: few of the users and items, as in life, have most of the ratings."""
    dice = torch.Generator().manual_seed(0)
    users = (USERS * torch.rand(RATINGS, generator=dice) ** 4).long()
    items = (ITEMS * torch.rand(RATINGS, generator=dice) ** 4).long()
    tastes, traits = torch.randn(USERS, 2, generator=dice), torch.randn(ITEMS, 2, generator=dice)
    likes = (tastes[users] * traits[items]).sum(1) + 0.1 * torch.randn(RATINGS, generator=dice)
    return TensorDataset(torch.stack([users, items], 1), likes)


class Recommender(nn.Module):
    """The product of what is known of a user and of an item."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(USERS, WIDTH), nn.Embedding(ITEMS, WIDTH)
        self.mix = nn.Linear(WIDTH, 1)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        """How much each user will like each item."""
        return self.mix(self.users(pairs[:, 0]) * self.items(pairs[:, 1])).squeeze(1)


def main() -> None:
    """Train, and say how far off it is."""
    world = lockstep.join(seed=0)
    net = Recommender().to(world.device)
    model = lockstep.DataParallel(net)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1)
    loader = lockstep.shard(DataLoader(ratings(), batch_size=512, shuffle=True))
    for epoch in range(4):
        squares = count = 0.0
        for pairs, likes in loader:
            loss = (model(pairs) - likes).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            squares += loss.item() * loader.num_samples
            count += loader.num_samples
        error = (world.sum(squares) / world.sum(count)) ** 0.5
        if world.is_main:
            print(f"epoch {epoch}: off by {error:.3f}")


if __name__ == "__main__":
    main()
