"""Step time over slow networks: every wire, `wire="auto"`, torch DDP and its hooks, between two network namespaces.

    python bench/network.py                                   100 Mbit/s, 1 Gbit/s and 10 Gbit/s, gpt-10m, 2 workers
    python bench/network.py --mbit 1000 --rounds 20

Two workers, one core each, sit in two network namespaces joined by a virtual cable whose speed `tc` limits (link.py).
Every variant has its own model and fused AdamW and takes the same batches; variants are interleaved step by step, and
the time of a step is the larger of the two workers'. `auto` is given the steps that it needs to choose before anything
is measured; `auto-any` may choose any wire, whatever it costs in loss. Needs root and iproute2.

Printed for each speed: milliseconds, the ratio to `lockstep` (gradients as they are) and to `ddp`, and what auto chose.
"""

import argparse
import os
import sys

import link
import torch
import variants
from variants import GPT2_SIZES, Setup, Variant

import lockstep
from lockstep.bench import interleave, machine

DEFAULT = ("lockstep", "ddp", "ddp-fp16", "ddp-powersgd", "half", "int8", "sign", "topk", "lowrank", "auto", "auto-any")
CHOOSING_STEPS = 18
"""More than auto ever takes to choose."""


def main() -> None:
    """Start one worker in each namespace; a worker measures."""
    options = _options()
    if "RANK" in os.environ:
        train(options)
        return
    with link.Link() as pair:
        pair.run_here()


def train(options: argparse.Namespace) -> None:
    """One worker, at one speed after the other."""
    torch.set_num_threads(1)
    world = lockstep.join(device="cpu")
    setup = Setup(options.model, options.batch, options.context, bf16=False)
    fed = variants.batches(setup, world)
    if world.is_main:
        print(", ".join(f"{name}: {fact}" for name, fact in machine.describe(world).items()))
    for mbit in options.mbit:
        world.barrier()
        link.limit(mbit * 1e6)
        trained = {name: Variant(name, setup, world) for name in options.variants}
        for name, variant in trained.items():
            for number in range(CHOOSING_STEPS if name.startswith("auto") else 0):
                variant.step(fed[number % len(fed)])
        actions = {name: _stepper(variant, fed) for name, variant in trained.items()}
        measured = interleave.measure(world, actions, rounds=options.rounds, warmup=4)
        if world.is_main:
            _print(mbit, measured, trained)


def _stepper(variant: Variant, fed: list[variants.Batch]) -> interleave.Action:
    return lambda number: variant.step(fed[number % len(fed)])


def _print(mbit: float, measured: interleave.Measured, trained: dict[str, Variant]) -> None:
    times = measured.times
    print(f"\n{mbit:g} Mbit/s. {measured}")
    print(f"{'':14}{'median ms':>10}{'10-90 %':>20}{'to lockstep':>22}{'to ddp':>22}")
    for name, seconds in times.items():
        low, median, high = (1e3 * quantile for quantile in interleave.spread(seconds))
        cells = [_ratio(times, name, base) for base in ("lockstep", "ddp")]
        print(f"{name:14}{median:10.1f}{f'{low:.1f} - {high:.1f}':>20}{cells[0]:>22}{cells[1]:>22}")
    for name, variant in trained.items():
        if name.startswith("auto"):
            print(f"{name}: {variant.model.wire_report()}")  # type: ignore[operator]
    sys.stdout.flush()


def _ratio(times: interleave.Times, name: str, base: str) -> str:
    if base not in times or base == name:
        return "1"
    found = interleave.compare(times, interleave.ratio, name, base)
    return f"{found.median:.3f} ({found.low:.3f}-{found.high:.3f})"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100, 1000, 10000], help="speeds of the link")
    parser.add_argument("--model", choices=GPT2_SIZES, default="gpt-10m")
    parser.add_argument("--batch", type=int, default=4, help="sequences per worker and step (default 4)")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--variants", nargs="+", type=variants.checked, default=DEFAULT)
    return parser.parse_args()


if __name__ == "__main__":
    main()
