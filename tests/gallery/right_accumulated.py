"""Right: two micro-batches per step, torch.compile, a learning-rate schedule; ends after two steps."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

generator = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator))

torch.manual_seed(3)
model = torch.compile(lockstep.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
loader = lockstep.shard(DataLoader(dataset, batch_size=16))

batches = iter(loader)
for first in batches:
    with model.no_sync():
        (F.cross_entropy(model(first[0]), first[1]) / 2).backward()
    x, y = next(batches)
    (F.cross_entropy(model(x), y) / 2).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
