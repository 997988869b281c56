"""Wrong: seeded alike on all workers by torch alone, so that dropout masks are the same everywhere."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

generator = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator))

torch.manual_seed(1)
world = lockstep.join()
model = lockstep.DataParallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(dataset, batch_size=8))
for _ in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
