"""What the same bits on any number of workers cost: Trainer's step against DataParallel's, and against accumulation.

    python bench/trainer.py                                2 workers over shm, gpt-10m
    python bench/trainer.py --backend gloo

A step of Trainer with as many shards as workers against one of DataParallel on the same batches, each with fused AdamW
and its own model; and a step with four shards a worker against plain accumulation of four micro-batches in
DataParallel (no_sync). The variants are interleaved step by step in one run (see lockstep.bench.interleave). Trainer
also computes the norm of the gradients, reports the loss over all workers, seeds every shard, and compares the replicas
every 50 steps. Weights are compared at the end: the variants must have done the same work.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import variants
from variants import GPT2_SIZES, Batch, Setup, Variant, build

import lockstep
from lockstep.bench import interleave, machine

MICRO = 4
"""Shards of each worker, and micro-batches, in the second comparison."""


def main() -> None:
    """Start the workers and print what they measured."""
    options = _options()
    print(lockstep.launch(train, workers=options.workers, args=(options,))[0])


def train(options: argparse.Namespace) -> str:
    """One worker; all return the same text."""
    torch.set_num_threads(1)
    world = lockstep.join(backend=options.backend)
    setup = Setup(options.model, options.batch, options.context, bf16=False)
    fed = variants.batches(setup, world)
    plain, accumulated = Variant("lockstep", setup, world), Variant("lockstep", setup, world)
    ordered, several = _trainer(options, world.size), _trainer(options, MICRO * world.size)
    actions: dict[str, Callable[[int], Any]] = {
        "lockstep": lambda number: plain.step(fed[number % len(fed)]),
        "trainer": lambda number: ordered.step(_shards(world, fed, number, 1)),
        "accumulated": lambda number: _accumulate(accumulated, fed, number),
        "trainer x4": lambda number: several.step(_shards(world, fed, number, MICRO)),
    }
    measured = interleave.measure(world, actions, rounds=options.steps, warmup=options.warmup)
    lines = [str(measured), str(machine.describe(world))]
    for name, base in (("trainer", "lockstep"), ("trainer x4", "accumulated")):
        ratio = interleave.compare(measured.times, interleave.ratio, name, base)
        for each in (base, name):
            lines.append(f"{each:12}{1e3 * interleave.spread(measured.times[each])[1]:10.1f} ms")
        lines.append(f"{name} / {base}: {ratio.median:.3f} ({ratio.low:.3f}-{ratio.high:.3f})")
    for trainer, variant in ((ordered, plain), (several, accumulated)):
        weights = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
        lines.append(f"largest difference of weights: {(weights - variant.weights()).abs().max():.1e}")
    return "\n".join(lines)


def _trainer(options: argparse.Namespace, shards: int) -> lockstep.Trainer:
    torch.manual_seed(0)
    net = build(options.model)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)
    return lockstep.Trainer(net, optimizer, lambda model, shard: model(*shard), shards=shards)


def _shards(world: lockstep.World, fed: list[Batch], number: int, count: int) -> Any:
    """This worker's micro-batches of a step, as its shards."""
    from lockstep.data.source import GlobalBatch, Shard

    micro = [fed[(number + each) % len(fed)] for each in range(count)]
    size, first = len(micro[0][0]), world.rank * count
    shards = tuple(Shard(first + each, size, batch) for each, batch in enumerate(micro))
    return GlobalBatch(0, number, size * count * world.size, shards)


def _accumulate(variant: Variant, fed: list[Batch], number: int) -> None:
    for each in range(MICRO - 1):
        with variant.model.no_sync():  # type: ignore[operator]
            variant.forward(fed[(number + each) % len(fed)])
            (variant.loss / MICRO).backward()
    variant.forward(fed[(number + MICRO - 1) % len(fed)])
    (variant.loss / MICRO).backward()
    variant.update()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=GPT2_SIZES, default="gpt-10m")
    parser.add_argument("--batch", type=int, default=4, help="sequences per shard (default 4)")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence (default 128)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each variant (default 30)")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend", choices=["shm", "gloo"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
