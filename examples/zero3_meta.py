"""A model that fits on no worker: built on the meta device, made block by block, split with zero=3.

    python examples/zero3_meta.py
    lockstep run -n 2 examples/zero3_meta.py

`torch.device("meta")` makes shapes without memory. `DataParallel` gives each block its values when its turn comes and
cuts it at once, so no worker ever has more than its parts and one block. At the end one file with the whole model is
written, for other tools, without any worker holding all of it.
"""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep import keep

WIDTH, BLOCKS = 256, 6


class Block(nn.Module):
    """Two layers beside a shortcut."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What comes in, and something added."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks between an entry and a head."""

    def __init__(self):
        super().__init__()
        self.entry, self.head = nn.Linear(32, WIDTH), nn.Linear(WIDTH, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ten numbers for each sample."""
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main() -> None:
    """Build, train, write."""
    world = lockstep.join(seed=0)
    with torch.device("meta"):
        net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=3)

    dice = torch.Generator().manual_seed(0)
    x = torch.randn(640, 32, generator=dice)
    data = TensorDataset(x, x[:, :10].argmax(1))
    for x, y in lockstep.shard(DataLoader(data, batch_size=32, shuffle=True)):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        model.clip_grad_norm_(1.0)  # Of the whole model, though each worker has a part of the gradients.
        optimizer.step()
        optimizer.zero_grad()
    loss = world.mean(loss.detach(), weight=len(x))

    state = sum(value.numel() for each in optimizer.state.values() for value in each.values() if value.dim())
    whole = sum(param.numel() for param in net.parameters())
    folder = Path(world.broadcast(tempfile.mkdtemp() if world.is_main else None))
    lockstep.save(folder, model, optimizer, step=20)
    if world.is_main:
        with keep.open_checkpoint(folder) as checkpoint:
            keep.export(checkpoint, folder / "model.safetensors", prefix="model/")
        size = (folder / "model.safetensors").stat().st_size
        print(f"{whole:,} parameters, loss {float(loss):.3f}")
        print(f"this worker has {state:,} of AdamW's {2 * whole:,} numbers")
        print(f"model.safetensors has {size:,} bytes")


if __name__ == "__main__":
    main()
