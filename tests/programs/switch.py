"""A mixture of experts like Switch: every word goes to one, so workers use different ones, and some nobody uses.

The loss that balances them is made of means over all words of the global batch, so these are summed over the workers.
"""

import torch
import torch.nn.functional as F
from options import double, program
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.data import DataLoader, TensorDataset

import lockstep

MISTAKES = {"local_balance": "not known|samples that look at each other|mean of means|loss is not a mean"}
NUM_EXPERTS = 6


class Switch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, NUM_EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width)) for _ in range(NUM_EXPERTS)
        )

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            here = best == number
            if here.any():  # No worker waits for the others here.
                out[here] = weights[here, number, None] * expert(x[here])
        return x + out, weights, best


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.switch, self.head = nn.Embedding(20, 8), Switch(8), nn.Linear(8, 20)

    def forward(self, tokens):
        x, weights, best = self.switch(self.words(tokens))
        return self.head(x), weights, best


def main(zero=0, mistake=None, compiled=0, steps=5):
    world = lockstep.join()
    generator = double(1)
    torch.manual_seed(0)
    texts = torch.randint(20, (42, 6), generator=generator)
    net = Network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = lockstep.DataParallel(
        torch.compile(net, backend="aot_eager") if compiled else net, optimizer=optimizer, zero=zero
    )
    loader = lockstep.shard(DataLoader(TensorDataset(texts), 6))  # Parts of equal length, since sums are shared.
    for _, (tokens,) in zip(range(steps), loader, strict=False):
        logits, weights, best = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        sums = torch.cat([F.one_hot(best, NUM_EXPERTS).double().sum((0, 1)), weights.sum((0, 1))])
        count = torch.tensor(float(best.numel()))
        if world.size > 1 and mistake != "local_balance":
            sums, count = all_reduce(sums), world.all_reduce(count)
        used, liked = (sums / count).chunk(2)
        (loss + 0.5 * NUM_EXPERTS * (used * liked).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


if __name__ == "__main__":
    program(main)
