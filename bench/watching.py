"""What watching costs: steps of a GPT with and without it, interleaved in one run.

    python bench/watching.py --model gpt-10m

Two workers, one model. In every round one step is watched and one is not, in an order that is shuffled anew (see
lockstep.bench.interleave): for the latter the listeners and the gauge of norms are taken away, so that the ratio is
what they cost in the path of a step. What the watcher's threads do, they do at any time, also in steps that are not
watched; so their processor time is counted by itself, as a part of one core per watched step. The sum of both is what
watching costs.
"""

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
import variants
from variants import GPT2_SIZES, Setup, Variant

import lockstep
from lockstep.bench import interleave, machine


def main() -> None:
    """Start the workers and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=GPT2_SIZES, default="gpt-10m")
    parser.add_argument("--batch", type=int, default=4, help="sequences per worker and step")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for line in lockstep.launch(train, workers=options.workers, args=(options, folder))[0]:
            print(line)


def train(options: argparse.Namespace, folder: str) -> list[str]:
    """What one worker does; returns what is to be printed."""
    torch.set_num_threads(max(1, machine.cores() // options.workers))
    world = lockstep.join(device="cpu", backend=options.backend)
    setup = Setup(options.model, options.batch, options.context, False)
    variant, fed = Variant("lockstep", setup, world), variants.batches(setup, world)
    for number in range(3):
        variant.step(fed[number % len(fed)])
    watcher = lockstep.watch(variant.model, folder, progress=False)
    listeners, gauge = world.events._listeners, variant.model._engine.reducer.observer

    def step(number: int) -> None:
        variant.step(fed[number % len(fed)])

    def step_unheard(number: int) -> None:
        world.events._listeners, variant.model._engine.reducer.observer = (), None
        step(number)
        world.events._listeners, variant.model._engine.reducer.observer = listeners, gauge

    before, begun = _thread_seconds(), time.perf_counter()
    measured = interleave.measure(world, {"watched": step, "not watched": step_unheard}, rounds=options.steps, warmup=4)
    used, lasted = _thread_seconds() - before, time.perf_counter() - begun
    used = max(world.gather(used))
    watcher.close()
    ratio = interleave.compare(measured.times, interleave.ratio, "watched", "not watched")
    medians = {name: 1e3 * float(np.median(seconds)) for name, seconds in measured.times.items()}
    return [
        str(measured),
        *(f"{name:12} {ms:8.2f} ms a step" for name, ms in medians.items()),
        f"in the path of a step: {ratio.median:.4f} ({ratio.low:.4f} to {ratio.high:.4f}) of one that is not watched",
        f"threads beside it: {100 * used / lasted:.2f} % of a core",
    ]


def _thread_seconds() -> float:
    """Processor time that the watcher's threads have used so far."""
    ticks = 0
    for thread in threading.enumerate():
        if thread.name.startswith(("lockstep-watching", "lockstep-hangs", "lockstep-probes")):
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
