"""A long training that must not grow: memory, handles and threads of three workers, from the first tenth to the last.

    python check.py --soak            100,000 steps
    python bench/soak.py --steps 500

A small model, so that steps are many: Trainer with `watch`, batches from loader processes that are started anew in
every epoch, a save every 50 steps (every other one beside the training), and now and then another wrapper that is
dropped. Each worker looks at itself every few steps; the lowest of a tenth counts, since saves and loader processes
come and go. Fails if that has grown from the second tenth (the first warms up) to the last, or if a worker dies.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import lockstep

PARTS = 10
EVERY = 5
"""Steps from one look to the next."""
SAVE_EVERY = 50
ALLOWED = (32.0, 16.0, 4.0)
"""What may be more in the end: megabytes, handles, threads. An allocator's heap wanders by some megabytes, and every
batch that a loader process has ready is a few handles."""
NAMES = ("MB", "handles", "threads")

Held = tuple[float, float, float]


def main() -> None:
    """Start the workers, print what they held, and fail if that grew."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--backend")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = lockstep.launch(soak, workers=options.workers, args=(options, folder))
    faults = [fault for rank, parts in enumerate(seen) for fault in grown(rank, parts)]
    print("\n".join(faults) or f"nothing grew in {options.steps} steps.")
    sys.exit(bool(faults))


def soak(options: argparse.Namespace, folder: str) -> list[Held]:
    """On a worker: train, and return the least that was held in each part of the run."""
    world = lockstep.join(seed=0, backend=options.backend)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    trainer = lockstep.Trainer(
        net,
        torch.optim.AdamW(net.parameters(), lr=1e-3),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        shards=2 * world.size,
        watch=Path(folder) / "watched",
    )
    samples = [(torch.full((16,), i / 4000), i % 4) for i in range(4000)]
    epochs = 1 + options.steps * 4 * world.size // len(samples)
    batches = trainer.batches(samples, 4 * world.size, epochs, num_workers=1, multiprocessing_context="fork")
    parts: list[Held] = []
    looks: list[Held] = []
    began = time.monotonic()
    for batch in batches:
        trainer.step(batch)
        if trainer.steps % SAVE_EVERY == 0:
            trainer.save(Path(folder) / "saves", keep_last=2, wait=trainer.steps % (2 * SAVE_EVERY) == 0)
        if trainer.steps % (20 * SAVE_EVERY) == 0:
            lockstep.DataParallel(nn.Linear(16, 4))(torch.ones(2, 16)).sum().backward()
        if trainer.steps % EVERY == 0:
            looks.append(held())
        if trainer.steps * PARTS >= (len(parts) + 1) * options.steps:
            least = [min(each) for each in zip(*looks, strict=True)]
            parts.append((least[0], least[1], least[2]))
            looks.clear()
            words = told(world.gather(parts[-1]))
            if world.is_main:
                print(f"{trainer.steps} steps, {time.monotonic() - began:.0f} s: {words}", flush=True)
        if trainer.steps == options.steps:
            break
    return parts


def held() -> Held:
    """Megabytes, handles and threads of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    counted = [len(list(Path(f"/proc/self/{what}").iterdir())) for what in ("fd", "task")]
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, counted[0], counted[1]


def told(workers: list[Held]) -> str:
    """What they hold, one after the other."""
    columns = zip(NAMES, *workers, strict=True)
    return ", ".join(f"{'/'.join(f'{value:.0f}' for value in values)} {name}" for name, *values in columns)


def grown(rank: int, parts: list[Held]) -> Iterator[str]:
    """What a worker holds more of in the last part than in the second, in words."""
    for name, early, late, allowed in zip(NAMES, parts[1], parts[-1], ALLOWED, strict=True):
        if late > early + allowed:
            yield f"worker {rank} grew from {early:.0f} to {late:.0f} {name}: something is kept that should be let go."


if __name__ == "__main__":
    main()
