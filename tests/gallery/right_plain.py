"""Right: three lines in a plain script; parts of 5 and 4 samples, dropout, a shuffled loader."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

generator = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator))

world = lockstep.join(seed=1)
net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
model = lockstep.DataParallel(net.to(world.device))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = lockstep.shard(DataLoader(dataset, batch_size=9, shuffle=True))
for _ in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
