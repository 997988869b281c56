"""Right: lockstep.Trainer, with dropout and batch norm, whose bits do not depend on the number of workers."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

generator = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator))


def loss_fn(model, shard):
    x, y = shard
    return F.cross_entropy(model(x), y)


lockstep.join(seed=1)
net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=4, clip=1.0)

for batch in trainer.batches(dataset, batch_size=16, epochs=2):
    trainer.step(batch)
