"""Wrong: batches of eight on every worker, and the learning rate of a batch of eight."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep

generator = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator))

world = lockstep.join(seed=1)
model = lockstep.DataParallel(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(dataset, num_replicas=world.size, rank=world.rank)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
for _ in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
