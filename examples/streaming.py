"""A stream: data that are read in order, with loader processes, and a run that is stopped and goes on.

    python examples/streaming.py
    lockstep run -n 2 examples/streaming.py

Every worker reads the same stream and collates its own samples only; between loader processes the stream is split, as
always, with `get_worker_info`. After half of the batches the run is saved and everything is thrown away; a second model
loads it and goes on at the next batch. Save inside the loop: a loop that is left begins the next epoch.
"""

import tempfile
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import lockstep

LINES, BATCH = 1024, 32


class Stream(IterableDataset):
    """Readings of a machine, and whether it broke down: as if from a file that is too long to be held."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        process = get_worker_info()
        first, step = (process.id, process.num_workers) if process else (0, 1)
        for line in range(first, LINES, step):
            readings = torch.randn(16, generator=torch.Generator().manual_seed(line))
            yield readings, (readings[:4].sum() > readings[4:8].prod()).long()


def made(world: lockstep.World) -> tuple:
    """A model, its optimizer and a loader, all as at the beginning."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 2)).to(world.device)
    loader = lockstep.shard(DataLoader(Stream(), batch_size=BATCH, num_workers=2))
    return lockstep.DataParallel(net), torch.optim.AdamW(net.parameters(), lr=5e-3), loader


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, folder: str, save_at: int | None
) -> None:
    """Make as many steps as there are batches left, or save and stop when `save_at` have been made."""
    steps, losses = 0, []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        losses.append(model.world.mean(loss.detach(), weight=len(x)))
        if steps == save_at:
            lockstep.save(folder, model, optimizer, step=steps, loader=loader)
            break
    if model.world.is_main:
        print(f"{steps} steps, loss from {float(losses[0]):.3f} to {float(losses[-1]):.3f}")


def main() -> None:
    """Train half, save, forget, load, train the other half."""
    world = lockstep.join(seed=0)
    folder = world.broadcast(tempfile.mkdtemp() if world.is_main else None)

    model, optimizer, loader = made(world)
    train(model, optimizer, loader, folder, save_at=LINES // BATCH // 2)

    model, optimizer, loader = made(world)
    resumed = lockstep.load(folder, model, optimizer, loader=loader)
    if world.is_main:
        print(f"loaded, after step {resumed.step}")
    train(model, optimizer, loader, folder, save_at=None)


if __name__ == "__main__":
    main()
