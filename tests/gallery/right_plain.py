"""Right: parts of 5 and 4 samples, dropout, a shuffled loader, two micro-batches a step, torch.compile, a schedule."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

generator = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(36, 6, generator=generator), torch.randint(0, 4, (36,), generator=generator))

world = lockstep.join(seed=1)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
model = torch.compile(lockstep.DataParallel(net.to(world.device)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
loader = lockstep.shard(DataLoader(dataset, batch_size=9, shuffle=True))

batches = iter(loader)
for x, y in batches:
    with model.no_sync():
        (F.cross_entropy(model(x), y) / 2).backward()
    x, y = next(batches)
    (F.cross_entropy(model(x), y) / 2).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
