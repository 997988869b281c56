"""Small real models for tests."""

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 24), nn.GELU(), nn.Linear(24, 5))

    def forward(self, x):
        return self.net(x)

    @staticmethod
    def batch(size, generator, dtype):
        return torch.randn(size, 12, generator=generator, dtype=dtype), torch.randint(5, (size,), generator=generator)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, stride=2, bias=False),
            nn.BatchNorm2d(12),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Linear(12, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 5))

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))

    @staticmethod
    def batch(size, generator, dtype):
        x = torch.randn(size, 3, 8, 8, generator=generator, dtype=dtype)
        return x, torch.randint(5, (size,), generator=generator)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        # No bias on the keys: its true gradient is zero, and Adam turns the rounding noise into whole steps.
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width=16, vocabulary=32, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)

    @staticmethod
    def batch(size, generator, dtype):
        tokens = torch.randint(32, (size, 9), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


MODELS = {"mlp": MLP, "cnn": CNN, "gpt": GPT}


def build(name, dtype=torch.float32, seed=3):
    torch.manual_seed(seed)
    return MODELS[name]().to(dtype)


def optimizer_for(name, params):
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(params, lr=1e-3)


def part_of(batch, world):
    """This worker's contiguous part, larger parts first."""
    size = len(batch[0])
    base, rest = divmod(size, world.size)
    start = world.rank * base + min(world.rank, rest)
    stop = start + base + (world.rank < rest)
    return tuple(t[start:stop] for t in batch)


def weights_of(module):
    real = {k: torch.view_as_real(v) if v.is_complex() else v for k, v in module.state_dict().items()}
    return {name: tensor.detach().double().numpy().copy() for name, tensor in real.items()}


def difference(a, b):
    """Largest relative difference between two dicts of weights: per tensor, in the norm."""
    import numpy as np

    assert a.keys() == b.keys()
    return max(np.linalg.norm(a[k] - b[k]) / max(np.linalg.norm(b[k]), 1e-6) for k in a)
