"""What a slow worker costs: Async against the synchronous Trainer, and against the workers' speeds alone.

    python bench/asynchronous.py                           4 workers, worker 0 three times as slow
    python bench/asynchronous.py --workers 2 --staleness 1

Every worker's pass over a shard is a small real model and a sleep that stands for compute (so that the cores of this
machine do not matter), three times as long on worker 0. First every worker trains for itself, all at once, with
the same model and no communication: its own speed. Their sum is what no strategy can be above. Then all train together
on one data set, once with Async and once without a strategy, where all wait for the slowest.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import lockstep
from lockstep.bench import machine

SAMPLES = 4
"""Of a shard."""


class Samples:
    """A data set of random vectors."""

    def __init__(self, count: int, width: int) -> None:
        self._x = torch.randn(64, width, generator=torch.Generator().manual_seed(0))
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._x[index % len(self._x)]


def main() -> None:
    """Start the workers and print what they measured."""
    options = _options()
    print(lockstep.launch(measure, workers=options.workers, args=(options,))[0])


def measure(options: argparse.Namespace) -> str:
    """One worker; all return the same text."""
    torch.set_num_threads(1)
    world = lockstep.join(seed=0)
    pause_s = options.pause_ms / 1e3 * (options.slow if world.rank == 0 else 1)
    speeds = world.gather(_alone(options, pause_s, world))
    total = sum(speeds)
    lines = [str(machine.describe(world))]
    lines += [f"worker {rank} alone {speed:18.1f} shards/s" for rank, speed in enumerate(speeds)]
    lines.append(f"sum {total:30.1f} shards/s")
    for name, strategy in (("Async", lockstep.Async(staleness=options.staleness)), ("synchronous", None)):
        rate, stale = _together(options, pause_s, world, strategy)
        lines.append(f"{name:12}{rate:22.1f} shards/s {rate / total:7.2f} of the sum{_about(stale)}")
    lines.append(f"slowest x workers {min(speeds) * world.size:16.1f} shards/s")
    return "\n".join(lines)


def _about(stale: list[int]) -> str:
    if not any(stale):
        return ""
    return f"   staleness: mean {sum(stale) / len(stale):.1f}, largest {max(stale)}"


def _net(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    width = options.width
    return nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


def _loss_fn(pause_s: float) -> Callable[[nn.Module, Any], Any]:
    def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        time.sleep(pause_s)
        return (model(x) - x).square().mean()

    return loss_fn


def _alone(options: argparse.Namespace, pause_s: float, world: lockstep.World) -> float:
    """Shards a second of a plain loop."""
    net = _net(options)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    loss_fn, data = _loss_fn(pause_s), Samples(SAMPLES, options.width)
    world.barrier()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < options.seconds:
        loss_fn(net, torch.stack([data[index] for index in range(SAMPLES)])).backward()
        optimizer.step()
        optimizer.zero_grad()
        count += 1
    return count / (time.perf_counter() - begun)


def _together(
    options: argparse.Namespace, pause_s: float, world: lockstep.World, strategy: lockstep.Async | None
) -> tuple[float, list[int]]:
    """Shards a second of all workers, and how stale each update was."""
    net = _net(options)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    trainer = lockstep.Trainer(net, optimizer, _loss_fn(pause_s), shards=world.size, strategy=strategy, check_every=0)
    num_shards = int(options.seconds * 1e3 / options.pause_ms) * world.size
    begun = ended = 0.0
    results: list[Any] = []
    for count in (4 * world.size, num_shards):  # The first to warm up.
        world.barrier()
        begun, results = time.perf_counter(), []
        for batch in trainer.batches(Samples(SAMPLES * count, options.width), batch_size=SAMPLES * world.size):
            results.append(trainer.step(batch))
            ended = time.perf_counter()
    rates = world.gather(len(results) / (ended - begun))  # Until there was nothing left to claim.
    stale = world.gather([result.staleness for result in results])
    return sum(rates), [each for theirs in stale for each in theirs]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--slow", type=float, default=3.0, help="how many times slower worker 0 is")
    parser.add_argument("--staleness", type=int, default=16)
    parser.add_argument("--pause-ms", type=float, default=100.0, help="what stands for compute, of a shard")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8.0, help="about how long each part takes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
