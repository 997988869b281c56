"""Wrong: the gradients that the optimizer gets were never reduced, or changed before; the argument says how."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep

generator = torch.Generator().manual_seed(7)
dataset = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 4, (64,), generator=generator))

world = lockstep.join(seed=1)
model = lockstep.DataParallel(nn.Linear(6, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = lockstep.shard(DataLoader(dataset, batch_size=8))
mistake = sys.argv[1]

if mistake == "hook":
    model.module.weight.register_hook(lambda grad: grad.clamp(-0.05, 0.05))

for x, y in loader:
    if mistake == "bypass":
        F.cross_entropy(model.module(x), y).backward()
    elif mistake == "no_sync":
        with model.no_sync():
            F.cross_entropy(model(x), y).backward()
    elif mistake == "early_clip":
        with model.no_sync():
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        F.cross_entropy(model(x), y).backward()
    else:
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
