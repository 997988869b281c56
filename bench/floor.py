"""What the sum of two workers' gradients costs by its bytes alone: no message, nobody to wait for, caches cold.

    python bench/floor.py                          40 MB of gradients, 2 workers at once
    python bench/floor.py --megabytes 156

Each worker has memory of its own in the place of everybody's, and does what its half of an all-reduce must do: read
its half of both contributions, and write their sum to both. In every round all kinds take their turn, in an order that
is shuffled anew, each with buffers that have not been touched while 512 MB were. "kept" writes the sum to one of them
only: less than an all-reduce must do.
"""

import argparse
import itertools
from typing import Any

import torch

import lockstep
from lockstep.bench import interleave, machine

COLD_BYTES = 512 << 20
BLOCK = 64 << 10
"""Elements in a block: 256 KB, as in the reduction over shared memory."""


def measure(megabytes: float, rounds: int) -> dict[str, Any]:
    """What one worker does; milliseconds by kind, as 10 %, 50 % and 90 % quantiles, the same on all workers."""
    torch.set_num_threads(1)
    world = lockstep.join(device="cpu")
    numel = int(megabytes * 1e6 / 4 / world.size)
    count = max(2, COLD_BYTES // (8 * numel))
    turns = itertools.cycle([(torch.ones(numel), torch.ones(numel)) for _ in range(count)])

    def read(_: int) -> None:
        mine, theirs = next(turns)
        mine.sum(), theirs.sum()

    def kept(_: int) -> None:
        for mine, theirs in zip(*(half.split(BLOCK) for half in next(turns)), strict=True):
            torch.add(mine, theirs, out=mine)

    def both(_: int) -> None:
        for mine, theirs in zip(*(half.split(BLOCK) for half in next(turns)), strict=True):
            torch.add(mine, theirs, out=mine)
            theirs.copy_(mine)

    measured = interleave.measure(world, {"read": read, "kept": kept, "both": both}, rounds=rounds, warmup=count)
    return {kind: interleave.spread(1e3 * seconds) for kind, seconds in measured.times.items()} | {
        "machine": machine.describe(world)
    }


def main() -> None:
    """Do what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=40.0, help="of gradients (default 40)")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    found = lockstep.launch(measure, workers=2, args=(options.megabytes, options.rounds))[0]
    described = ", ".join(f"{name}: {value}" for name, value in found.pop("machine").items())
    print(f"{options.megabytes:g} MB of gradients, 2 workers at once\n{described}")
    for kind, (low, median, high) in found.items():
        print(f"{kind:5} {median:6.2f} ms ({low:.2f}-{high:.2f})  {median / found['both'][1]:.2f} of the sum's floor")


if __name__ == "__main__":
    main()
