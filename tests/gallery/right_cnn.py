"""Right: a residual network with SyncBatchNorm, as for images, whose ReLUs and max-pooling make much of rounding.

Wrapped only where there are several workers, as scripts for DDP do. Argument: the seed.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

SEED = int(sys.argv[1])
generator = torch.Generator().manual_seed(SEED)
dataset = TensorDataset(
    torch.randn(64, 3, 64, 64, generator=generator), torch.randint(0, 10, (64,), generator=generator)
)


class Block(nn.Module):
    def __init__(self, num_in, num_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(num_out)
        self.short = nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


world = lockstep.join(seed=SEED)
stem = [nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
blocks = [Block(*sizes) for sizes in ((8, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2), (32, 64, 2))]
model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
if world.size > 1:
    model = lockstep.DataParallel(lockstep.SyncBatchNorm.convert(model))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=1e-4)
loader = lockstep.shard(DataLoader(dataset, batch_size=16, shuffle=True))
for x, y in loader:
    loss = nn.CrossEntropyLoss()(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
