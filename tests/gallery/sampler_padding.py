"""Wrong: DistributedSampler repeats a sample in the last batch of the epoch."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep

generator = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(9, 6, generator=generator), torch.randint(0, 4, (9,), generator=generator))


world = lockstep.join(seed=1)
model = lockstep.DataParallel(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(dataset, num_replicas=world.size, rank=world.rank)
loader = DataLoader(dataset, batch_size=4 // world.size, sampler=sampler)
for _ in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
