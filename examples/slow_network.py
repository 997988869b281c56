"""A slow network: `wire="auto"` tries encodings of the gradients and keeps the one that pays, or none.

    python examples/slow_network.py
    lockstep run -n 2 examples/slow_network.py
    lockstep run --hosts 2 --host-rank R --meet HOST:PORT -n 2 examples/slow_network.py     # on each of two hosts

Within one host nothing is slow, so it keeps `Full()` there: that is what the report at the end is for. Between hosts it
takes half or a quarter of the bytes where that makes the step faster.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep


def main() -> None:
    """Train, and say what was chosen."""
    world = lockstep.join(seed=0)
    net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8))
    model = lockstep.DataParallel(net.to(world.device), wire="auto")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    x = torch.randn(1280, 64, generator=torch.Generator().manual_seed(0))
    loader = lockstep.shard(DataLoader(TensorDataset(x, x[:, :8].argmax(1)), batch_size=32, shuffle=True))
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    loss = world.mean(loss.detach(), weight=len(x))
    if world.is_main:
        print(f"loss {float(loss):.3f} after {len(loader)} steps")
        print(model.wire_report())


if __name__ == "__main__":
    main()
