"""How much of the communication hides behind the backward pass, on a link slow enough for it to matter.

    sudo python bench/overlap.py --model gpt-40m

Two workers, one core each, sit in two network namespaces joined by a virtual cable (link.py). The backward pass is
timed without communication; then the cable's rate is set, and corrected by trial, so that an all-reduce of all
gradients alone takes as long as that. On this link four things are timed, interleaved in one run (see
lockstep.bench.interleave):

    nocomm         a step of the bare module, no communication
    communication  the all-reduces of a step alone, in lockstep's buckets, nothing computed
    ddp            a step of torch's DistributedDataParallel
    lockstep       a step of lockstep.DataParallel

Reported is the hidden share, 1 - (step - nocomm) / communication: 100 % if the step takes no longer than without
communication, 0 % if all of it is waited for. What cannot hide is the last bucket, which is complete only when the
backward pass ends, and what communication costs in CPU time, since each worker has one core for both.
"""

import argparse
import dataclasses
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import link
import numpy as np
import torch
import torch.distributed as dist
import variants
from variants import GPT2_SIZES, Batch, Setup, Variant

import lockstep
from lockstep.bench import interleave, machine
from lockstep.bench.interleave import Estimate, Times
from lockstep.events import Event, Kind

ENOUGH_HIDDEN = 0.6


def main() -> None:
    """Start this file once more in each namespace, where RANK is set and makes it a worker."""
    options = _options()
    if "RANK" in os.environ:
        work(options)
        return
    with link.Link() as pair:
        pair.run_here()


def work(options: argparse.Namespace) -> None:
    """What one worker does; worker 0 reports."""
    rank, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    with lockstep.join(device="cpu") as world:
        results = _measure(options, world)
        if world.is_main:
            _print(options, results)
            if options.json:
                Path(options.json).write_text(json.dumps(results, indent=1, default=dataclasses.asdict) + "\n")


def _measure(options: argparse.Namespace, world: lockstep.World) -> dict[str, Any]:
    setup = Setup(options.model, options.batch, options.context, bf16=False)
    compared = ["ddp", "lockstep", *options.also]
    trained = {name: Variant(name, setup, world) for name in ("nocomm", *compared)}
    fed = variants.batches(setup, world)
    bucket_bytes = _bucket_bytes(world, trained["lockstep"], fed)
    flats = [torch.zeros(num_bytes // 4) for num_bytes in bucket_bytes]
    backward = _backward_seconds(world, trained["nocomm"], fed)
    rate = _calibrate(world, flats, options.share * backward)
    actions: dict[str, interleave.Action] = {
        name: lambda number, variant=variant: variant.step(fed[number % len(fed)]) for name, variant in trained.items()
    }
    backwards: list[float] = []
    actions["nocomm"] = lambda number: _step_noting_backward(trained["nocomm"], fed[number % len(fed)], backwards)
    actions["communication"] = lambda _number: _communicate(world, flats)
    measured = interleave.measure(world, actions, rounds=options.steps, warmup=options.warmup)
    times = measured.times
    return {
        "options": vars(options),
        "machine": machine.describe(world),
        "parameters": sum(param.numel() for param in trained["nocomm"].model.parameters()),
        "bucket bytes": bucket_bytes,
        "backward seconds": statistics.median(backwards),
        "bits per second": rate,
        "rounds": str(measured),
        "seconds": {name: seconds.tolist() for name, seconds in times.items()},
        "hidden": {name: _hidden(times, name) for name in compared},
        "hidden more than ddp": interleave.compare(times, _advantage, "lockstep", "ddp", "communication"),
    }


def _bucket_bytes(world: lockstep.World, variant: Variant, fed: list[Batch]) -> list[int]:
    """The sizes of the messages of one step, as lockstep sends them once it knows the order of gradients."""
    sizes: dict[int, list[int]] = {}

    def note(event: Event) -> None:
        if event.kind is Kind.LAUNCHED:
            sizes.setdefault(event.step, []).append(event.num_bytes)

    end = world.events.subscribe(note)
    for batch in fed[:3]:
        variant.step(batch)
    end()
    return sizes[max(sizes)]


def _backward_seconds(world: lockstep.World, variant: Variant, fed: list[Batch], rounds: int = 12) -> float:
    """Time of a backward pass of the bare module, undisturbed: the shortest of several, on the slowest worker."""
    seconds: list[float] = []
    for number in range(rounds):
        world.barrier()
        _step_noting_backward(variant, fed[number % len(fed)], seconds)
    return max(world.gather(min(seconds)))


def _step_noting_backward(variant: Variant, batch: Batch, seconds: list[float]) -> None:
    variant.forward(batch)
    start = time.perf_counter()
    variant.loss.backward()
    seconds.append(time.perf_counter() - start)
    variant.update()


def _calibrate(world: lockstep.World, flats: list[torch.Tensor], wanted: float) -> float:
    """Limit the link so that `_communicate` takes `wanted` seconds; returns the rate in bits per second."""
    num_bytes = sum(flat.nbytes for flat in flats)
    sent = 2 * (world.size - 1) / world.size * num_bytes  # By each worker: the least that an all-reduce can do with.
    rate = 8 * sent / wanted
    for _ in range(4):
        link.limit(rate)
        alone: dict[str, interleave.Action] = {"communication": lambda _number: _communicate(world, flats)}
        taken = float(np.median(interleave.measure(world, alone, rounds=3, warmup=1).times["communication"]))
        if abs(taken / wanted - 1) < 0.05:
            break
        rate *= taken / wanted
    return rate


def _communicate(world: lockstep.World, flats: list[torch.Tensor]) -> None:
    launched = [dist.all_reduce(flat, group=world.group, async_op=True) for flat in flats]
    for each in launched:
        world.wait(each, "reducing a bucket with nothing else to do")


def _hidden(times: Times, name: str) -> Estimate:
    def share(step: np.ndarray, nocomm: np.ndarray, communication: np.ndarray) -> np.ndarray:
        return 1 - (step - nocomm) / communication

    return interleave.compare(times, share, name, "nocomm", "communication")


def _advantage(ours: np.ndarray, theirs: np.ndarray, communication: np.ndarray) -> np.ndarray:
    return (theirs - ours) / communication


def _print(options: argparse.Namespace, results: dict[str, Any]) -> None:
    buckets = ", ".join(f"{num_bytes / 2**20:.1f}" for num_bytes in results["bucket bytes"])
    print(
        f"{options.model}: {results['parameters'] / 1e6:.1f}M parameters; per worker and step "
        f"{options.batch} x {options.context} tokens"
    )
    print(results["rounds"])
    print(", ".join(f"{name}: {fact}" for name, fact in results["machine"].items()))
    backward, rate = 1e3 * results["backward seconds"], results["bits per second"] / 1e6
    taken = 1e3 * statistics.median(results["seconds"]["communication"]) / backward
    print(f"backward of the bare module: {backward:.0f} ms; link: {rate:.0f} Mbit/s each way")
    print(f"communication alone takes {taken:.2f} of that")
    print(f"lockstep's buckets in the order they leave, MiB: {buckets}")
    print(f"\n{'':14}{'median ms':>10}{'10-90 %':>18}{'hidden (95 %)':>24}")
    for name, seconds in results["seconds"].items():
        low, median, high = (1e3 * quantile for quantile in interleave.spread(seconds))
        share = _percent(results["hidden"][name]) if name in results["hidden"] else ""
        print(f"{name:14}{median:10.1f}{f'{low:.1f} - {high:.1f}':>18}{share:>24}")
    lead = results["hidden more than ddp"]
    print(f"\nlockstep hides {_percent(lead)} more than DDP (points of communication time)")
    print(f"at least {ENOUGH_HIDDEN:.0%} hidden: {_verdict(results['hidden']['lockstep'].median >= ENOUGH_HIDDEN)}")
    print(f"not less than DDP: {_verdict(lead.high >= 0)}")


def _percent(estimate: Estimate) -> str:
    return f"{100 * estimate.median:.1f} % ({100 * estimate.low:.1f} to {100 * estimate.high:.1f})"


def _verdict(holds: bool) -> str:
    return "holds" if holds else "DOES NOT HOLD"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=GPT2_SIZES, default="gpt-40m")
    parser.add_argument("--batch", type=int, default=16, help="sequences per worker and step (default 16)")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence (default 128)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each kind (default 30)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those, not timed (default 3)")
    parser.add_argument(
        "--share", type=float, default=1.0, help="communication alone in units of the backward pass (default 1)"
    )
    parser.add_argument(
        "--also", nargs="+", type=variants.checked, metavar="NAME", default=[], help="further variants, as lockstep@8"
    )
    parser.add_argument("--json", metavar="FILE", help="write all times there too")
    return parser.parse_args()


if __name__ == "__main__":
    main()
