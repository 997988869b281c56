"""Right: everything split (zero=3), batch norm synced, tokens weighted, clipped after the reduction; not seeded."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

generator = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)


world = lockstep.join()
net = lockstep.SyncBatchNorm.convert(Net())
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
model = lockstep.DataParallel(net, optimizer=optimizer, zero=3)
loader = lockstep.shard(DataLoader(dataset, batch_size=8))

for x, y in loader:
    counted = x[:, 0] > 0
    loss = F.cross_entropy(model(x)[counted], y[counted])
    lockstep.backward(loss, weight=counted.sum())
    model.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
