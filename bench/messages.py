"""What torch DDP's messages take by themselves over gloo and over shm: its buckets of one step, nothing computed.

    python bench/messages.py                                            gpt-10m, gpt-40m and gpt-40m-small, 2 workers
    python bench/messages.py --workload gpt-10m --rounds 60

The buckets are DDP's own, as it lays them out after its first step, in memory of its own: over shm they are staged. All
of a step are started, then waited for. In every round both backends take their turn, in an order that is shuffled anew.
What DDP gains by the change of backend (`lockstep bench step --variants ddp/gloo ddp/shm`) is to be compared with what
is printed as saved.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.bench import catalogue, interleave, machine, workloads
from lockstep.comm.backend import new_group


def measure(workload: str, rounds: int) -> dict[str, Any]:
    """What one worker does; milliseconds by backend, as 10 %, 50 % and 90 % quantiles, the same on all workers."""
    torch.set_num_threads(1)
    world = lockstep.join(device="cpu", backend="shm")
    assert world.group is not None
    groups = {"gloo": new_group(world.group, "gloo"), "shm": world.group}
    buckets = _buckets(workload, world)

    def send(backend: str) -> interleave.Action:
        def act(_: int) -> None:
            works = [dist.all_reduce(bucket, group=groups[backend], async_op=True) for bucket in buckets]
            for work in works:
                work.wait()

        return act

    measured = interleave.measure(world, {name: send(name) for name in groups}, rounds=rounds, warmup=3)
    return {name: interleave.spread(1e3 * seconds) for name, seconds in measured.times.items()} | {
        "megabytes": [bucket.nbytes / 1e6 for bucket in buckets],
        "machine": machine.describe(world),
    }


def _buckets(workload: str, world: lockstep.World) -> list[torch.Tensor]:
    model = DistributedDataParallel(workloads.build(workload), gradient_as_bucket_view=True)
    for batch in workloads.batches(workload, catalogue.WORKLOADS[workload].batch, world.rank, world.device)[:2]:
        model(*batch).backward()
        model.zero_grad()
    return [bucket.buffer() for bucket in model.reducer._get_zeros_like_grad_buckets()]


def main() -> None:
    """Do what the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = catalogue.workloads(on_gpu=False)
    parser.add_argument("--workload", nargs="+", choices=named, default=["gpt-10m", "gpt-40m", "gpt-40m-small"])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    for workload in options.workload:
        found = lockstep.launch(measure, workers=2, args=(workload, options.rounds))[0]
        print(", ".join(f"{name}: {value}" for name, value in found["machine"].items()))
        print(f"{workload}: buckets of {', '.join(f'{size:.1f}' for size in found['megabytes'])} MB")
        for backend in ("gloo", "shm"):
            low, median, high = found[backend]
            print(f"  {backend:5} {median:7.2f} ms ({low:.2f}-{high:.2f})")
        print(f"  saved {found['gloo'][1] - found['shm'][1]:7.2f} ms", flush=True)


if __name__ == "__main__":
    main()
