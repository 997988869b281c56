"""Step time of lockstep.DataParallel against torch DDP and the no-communication limit, on one host.

    python bench/step.py --model gpt-10m --backend gloo           2 workers on the CPU, over gloo
    python bench/step.py --model gpt-10m --variants limit ddp/gloo ddp lockstep zero1 zero3      over shm
    python bench/step.py --workers 1 --device cuda --dtype bf16 --model gpt2-124m --batch 4 --context 1024

Every variant has its own model and fused AdamW and takes the same batches. A step is forward, backward,
optimizer.step and zero_grad. The variants are interleaved step by step in one run, and the time of a step is the
largest over the workers (see lockstep.bench.interleave). Printed: median and 10-90 % spread of each variant, and the
median of the per-round ratios to the first variant and to DDP with 95 % bootstrap intervals.

On the CPU all variants live in the same workers here, and share what C's allocator keeps: to compare with the limit,
take `lockstep bench step`, which gives each workers of its own.

Several workers on one GPU: NCCL refuses that unless they say to be different hosts, so they do, and then talk over
loopback sockets. Read such a run as a comparison of the variants, not as a speed of NCCL.

Without installation, from the repository's root: PYTHONPATH=src python bench/step.py ...
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
import variants
from models import SIZES
from variants import Setup, Variant

import lockstep
from lockstep.bench import interleave, machine
from lockstep.bench.interleave import Estimate, Times


def main() -> None:
    """Start the workers and print what they measured."""
    options = _options()
    results = lockstep.launch(train, workers=options.workers, args=(options,))
    _print(options, results[0])
    if options.json:
        Path(options.json).write_text(json.dumps(results[0], indent=1, default=dataclasses.asdict) + "\n")


def train(options: argparse.Namespace) -> dict[str, Any]:
    """What one worker does: take the steps of all variants in turn. Every worker returns the same results."""
    world = _join(options)
    setup = Setup(options.model, options.batch, options.context, options.dtype == "bf16")
    trained = {name: Variant(name, setup, world) for name in options.variants}
    fed = variants.batches(setup, world)
    actions = {name: _stepper(variant, fed) for name, variant in trained.items()}
    measured = interleave.measure(world, actions, rounds=options.steps, warmup=options.warmup)
    return {
        "options": vars(options),
        "machine": machine.describe(world),
        "parameters": sum(param.numel() for param in trained[options.variants[0]].model.parameters()),
        "rounds": str(measured),
        "seconds": {name: seconds.tolist() for name, seconds in measured.times.items()},
        "ratios": _ratios(measured.times),
        "weights apart": _weights_apart(trained),
    }


def _join(options: argparse.Namespace) -> lockstep.World:
    torch.set_num_threads(max(1, machine.cores() // options.workers))
    if options.device == "cuda":
        os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        if options.workers > torch.cuda.device_count():
            os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    return lockstep.join(device=options.device, backend=options.backend)


def _stepper(variant: Variant, fed: list[variants.Batch]) -> interleave.Action:
    return lambda number: variant.step(fed[number % len(fed)])


def _ratios(times: Times) -> dict[str, dict[str, Estimate]]:
    """Of each variant's time to the first variant's and to DDP's."""
    bases = [base for base in dict.fromkeys([next(iter(times)), "ddp"]) if base in times]
    return {
        base: {name: interleave.compare(times, interleave.ratio, name, base) for name in times if name != base}
        for base in bases
    }


def _weights_apart(trained: dict[str, Variant]) -> float | None:
    """How far lockstep's weights are from DDP's at the end: they must have done the same work.

    None where that says nothing: some of a GPU's kernels give other bits in every run.
    """
    if not {"ddp", "lockstep"} <= trained.keys() or trained["ddp"].loss.is_cuda:
        return None
    difference = trained["ddp"].weights() - trained["lockstep"].weights()
    return float(difference.abs().max())


def _print(options: argparse.Namespace, results: dict[str, Any]) -> None:
    print(
        f"{options.model}: {results['parameters'] / 1e6:.1f}M parameters, {options.dtype}; per worker and step "
        f"{options.batch} x {options.context} tokens"
    )
    print(results["rounds"])
    print(", ".join(f"{name}: {fact}" for name, fact in results["machine"].items()))
    bases = list(results["ratios"])
    print(f"\n{'':10}{'median ms':>10}{'10-90 %':>18}", *(f"{'to ' + base + ' (95 %)':>24}" for base in bases))
    for name, seconds in results["seconds"].items():
        low, median, high = (1e3 * quantile for quantile in interleave.spread(seconds))
        cells = (_cell(results["ratios"][base].get(name)) for base in bases)
        print(f"{name:10}{median:10.1f}{f'{low:.1f} - {high:.1f}':>18}", *(f"{cell:>24}" for cell in cells))
    if results["weights apart"] is not None:
        print(f"\nLargest difference between DDP's and lockstep's weights at the end: {results['weights apart']:.1e}")


def _cell(estimate: Estimate | None) -> str:
    return f"{estimate.median:.3f} ({estimate.low:.3f}-{estimate.high:.3f})" if estimate else "1"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="gpt-10m")
    parser.add_argument("--batch", type=int, default=4, help="sequences per worker and step (default 4)")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence (default 128)")
    parser.add_argument("--steps", type=int, default=50, help="timed steps of each variant (default 50)")
    parser.add_argument("--warmup", type=int, default=5, help="steps before those, not timed (default 5)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", choices=["shm", "gloo"], help="default: what lockstep chooses")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast in the forward pass")
    parser.add_argument(
        "--variants",
        nargs="+",
        type=variants.checked,
        metavar="NAME",
        help="limit, plain, ddp, lockstep, zero1 to 3, fsdp2, wires, DDP with hooks; see variants.py (default: limit "
        "ddp lockstep)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all times there too")
    options = parser.parse_args()
    if options.variants is None:
        options.variants = ["limit" if options.workers > 1 else "plain", "ddp", "lockstep"]
    if options.context > SIZES[options.model].context:
        parser.error(f"{options.model} takes at most {SIZES[options.model].context} tokens per sequence.")
    return options


if __name__ == "__main__":
    main()
