"""Step time between two hosts of several workers: reduced by hosts, or all workers alike, as torch's DDP does.

    python bench/hosts.py                              2 and 4 workers a host, 1 Gbit/s, gpt-10m
    python bench/hosts.py --workers 2 --mbit 10000 --rounds 20
    python bench/hosts.py --chunks 1 2 4               one reduction of 25 MB, by the size of chunks

Two network namespaces stand for hosts, joined by a virtual cable whose speed `tc` limits (link.py). Every variant has
its own model and fused AdamW and takes the same batches; variants are interleaved step by step, and the time of a step
is the largest of all workers'. Needs root and iproute2.

`ddp` is torch's over Lockstep's backend, and `lockstep/gloo` Lockstep over torch's.

Printed: milliseconds a step, the ratio to `ddp/gloo` within a round, and what a host has sent in a step, as the kernel
counts it at the cable, headers included; beside it what the gradients of a step are, all together.
"""

import argparse
import os
from pathlib import Path

import link
import torch
import torch.distributed as dist
import variants
from variants import GPT2_SIZES, Setup, Variant

import lockstep
from lockstep.bench import interleave, machine
from lockstep.comm.hosts.group import HostsGroup

BASE = "ddp/gloo"
DEFAULT = ("nocomm", BASE, "ddp", "lockstep/gloo", "lockstep", "zero1", "zero3", "trainer")
SENT = Path(f"/sys/class/net/{link.INTERFACE}/statistics/tx_bytes")
BUCKET_MB = 25
WORKERS = "HOSTS_BENCH_WORKERS"
"""In the environment of workers: how many each host has."""


def main() -> None:
    """Start the workers of both hosts, one number of them after the other; a worker measures."""
    options = _options()
    if WORKERS in os.environ:
        train(options)
        return
    with link.Link() as pair:
        for workers in options.workers:
            pair.run_here(workers, **{WORKERS: str(workers)})


def train(options: argparse.Namespace) -> None:
    """One worker."""
    torch.set_num_threads(1)
    world = lockstep.join(device="cpu")
    if world.local_rank == 0:
        link.limit(options.mbit * 1e6)
    if world.is_main:
        print(", ".join(f"{name}: {fact}" for name, fact in machine.describe(world).items()))
    if options.chunks:
        chunks(options, world)
        return
    setup = Setup(options.model, options.batch, options.context, bf16=False)
    fed = variants.batches(setup, world)
    trained = {name: Variant(name, setup, world) for name in options.variants}
    meters = {name: Meter(world) for name in trained}
    actions = {name: _stepper(trained[name], meters[name], fed) for name in trained}
    measured = interleave.measure(world, actions, rounds=options.rounds, warmup=4)
    if not world.is_main:
        return
    grads = sum(param.numel() for param in variants.build(options.model).parameters()) * 4e-6
    print(f"\n2 hosts of {os.environ[WORKERS]}, {options.mbit:g} Mbit/s, {grads:.1f} MB of gradients. {measured}")
    print(f"{'':16}{'median ms':>10}{'10-90 %':>20}{f'to {BASE}':>24}{'sent MB':>10}")
    for name, seconds in measured.times.items():
        low, median, high = (1e3 * each for each in interleave.spread(seconds))
        found = interleave.compare(measured.times, interleave.ratio, name, BASE)
        ratio = f"{found.median:.3f} ({found.low:.3f}-{found.high:.3f})"
        sent = f"{meters[name].median_mb():.1f}"
        print(f"{name:16}{median:10.1f}{f'{low:.1f} - {high:.1f}':>20}{ratio:>24}{sent:>10}", flush=True)


class Meter:
    """What this host sends in a step, as the kernel counts it."""

    def __init__(self, world: lockstep.World) -> None:
        self._world = world
        self._sent: list[int] = []

    def __enter__(self) -> None:
        self._before = int(SENT.read_text())

    def __exit__(self, *_: object) -> None:
        self._sent.append(int(SENT.read_text()) - self._before)

    def median_mb(self) -> float:
        """Of a step, in MB."""
        return sorted(self._sent)[len(self._sent) // 2] / 1e6


def _stepper(variant: Variant, meter: Meter, fed: list[variants.Batch]) -> interleave.Action:
    def step(number: int) -> None:
        with meter:
            variant.step(fed[number % len(fed)])

    return step


def chunks(options: argparse.Namespace, world: lockstep.World) -> None:
    """Time one reduction by the size of chunks, in MB of each worker's part, where the bytes lie in shared memory."""
    group = world.group
    assert isinstance(group, HostsGroup)
    flat = group.allocate(BUCKET_MB * 250_000, torch.float32)

    def reduce(mb: float) -> interleave.Action:
        def action(_: int) -> None:
            group.operations.chunk_bytes = int(mb * (1 << 20))
            dist.all_reduce(flat, group=group)

        return action

    measured = interleave.measure(
        world, {f"{mb:g}": reduce(mb) for mb in options.chunks}, rounds=options.rounds, warmup=2
    )
    if world.is_main:
        print(f"2 hosts of {os.environ[WORKERS]}, {options.mbit:g} Mbit/s, {BUCKET_MB} MB. {measured}")
        for name, seconds in measured.times.items():
            low, median, high = (1e3 * each for each in interleave.spread(seconds))
            print(f"chunks of {name} MB: {median:.1f} ms ({low:.1f} - {high:.1f})", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="a host")
    parser.add_argument("--mbit", type=float, default=1000, help="speed of the link")
    parser.add_argument("--model", choices=GPT2_SIZES, default="gpt-10m")
    parser.add_argument("--batch", type=int, default=1, help="sequences per worker and step (default 1)")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--chunks", type=float, nargs="+", default=[])
    parser.add_argument("--variants", nargs="+", type=variants.checked, default=DEFAULT)
    return parser.parse_args()


if __name__ == "__main__":
    main()
