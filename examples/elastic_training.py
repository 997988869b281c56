"""A worker is killed in mid-run, and the weights at the end are the same to the bit.

    python examples/elastic_training.py
    lockstep run -n 2 examples/elastic_training.py
    lockstep run -n 2 --elastic examples/elastic_training.py --kill 7      # worker 1 kills itself after step 7

All three print the same hash. A script for `--elastic` trains with `lockstep.Trainer` and takes its batches from
`trainer.batches`; nothing in it speaks of failures but the line that causes one.
"""

import argparse
import hashlib
import os
import signal

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep


def loss_fn(model: nn.Module, shard: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The mean over a shard's samples."""
    x, y = shard
    return F.cross_entropy(model(x), y)


def main() -> None:
    """Train, and say the hash of the weights."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kill", type=int, metavar="STEP", help="worker 1 kills itself after this step")
    args = parser.parse_args()

    world = lockstep.join(seed=0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)).to(world.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=8, clip=1.0)

    x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :4].argmax(1))
    for batch in trainer.batches(data, batch_size=64, epochs=2, shuffle=True):
        out = trainer.step(batch)
        if out.step == args.kill and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    sha = hashlib.sha256(b"".join(param.detach().cpu().numpy().tobytes() for param in net.parameters()))
    if world.is_main:
        print(f"step {out.step}, loss {out.loss:.3f}")
        print("weights:", sha.hexdigest()[:16])


if __name__ == "__main__":
    main()
