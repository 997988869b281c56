"""Wrong: the same, kept as a plain attribute, of which no wrapper can know."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

generator = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator))


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = torch.zeros(6)
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        out = self.layer(x - self.centre)
        self.centre = self.centre.lerp(x.mean(0), 0.5)
        return out


world = lockstep.join(seed=1)
model = lockstep.DataParallel(Centred())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(dataset, batch_size=8))
for _ in range(2):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
