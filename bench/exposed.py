"""Is exposed communication what it is called? What `lockstep.watch` finds against a step with minus one without it.

    python bench/exposed.py                    2 workers between network namespaces, 300 Mbit/s, gpt-10m
    python bench/exposed.py --mbit 100 1000
    python bench/exposed.py --device cuda      2 NCCL ranks on one GPU, over loopback, gpt2-124m

Steps that send (the watched ones) and steps under `no_sync` take turns, on the same model and batches. Printed for each
speed: the difference of their medians (a step lasts until the slower worker is done), what the watcher calls exposed
in the steps that send, the ratio of the two, waiting, and how far the shares of a step are from its wall time. Needs
root and iproute2, or a GPU.
"""

import argparse
import json
import os
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import mean, median
from typing import Any

import link
import torch
import variants
from variants import GPT2_SIZES, Setup, Variant

import lockstep

KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 34)}
"""For glibc. Else steps that keep their gradients, and do not send them, get new pages for them each time."""
NOT_COUNTED = 4
"""First steps of each kind, in which buckets are laid out."""


def main() -> None:
    """Start one worker in each namespace; a worker measures."""
    options = _options()
    if "RANK" in os.environ:
        train(options, os.environ["EXPOSED_FOLDER"])
        return
    with tempfile.TemporaryDirectory() as folder:
        if options.device == "cuda":
            lockstep.launch(train_on_gpu, workers=2, args=(options, folder))
            return
        with link.Link() as pair:
            pair.run_here(EXPOSED_FOLDER=folder, **KEEPS_MEMORY)


def train(options: argparse.Namespace, folder: str) -> None:
    """One worker on the CPU, at one speed after the other."""
    torch.set_num_threads(1)
    world = lockstep.join(device="cpu")
    setup = Setup(options.model or "gpt-10m", options.batch, options.context or 128, bf16=False)
    for mbit in options.mbit:
        world.barrier()
        link.limit(mbit * 1e6)
        _compare(options, world, setup, Path(folder) / f"{mbit:g}", f"{mbit:g} Mbit/s")


def train_on_gpu(options: argparse.Namespace, folder: str) -> None:
    """One worker of those that share a GPU."""
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_HOSTID=os.environ["RANK"])
    world = lockstep.join(device="cuda")
    setup = Setup(options.model or "gpt2-124m", options.batch, options.context or 1024, bf16=True)
    _compare(options, world, setup, Path(folder), "loopback")


def _compare(options: argparse.Namespace, world: lockstep.World, setup: Setup, folder: Path, where: str) -> None:
    fed = variants.batches(setup, world)
    variant = Variant("lockstep", setup, world)
    watcher = lockstep.watch(variant.model, folder, progress=False)
    taken: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * options.steps):
        sends = number % 2 == 0
        _meet(world)
        begun = time.perf_counter()
        with nullcontext() if sends else variant.model.no_sync():  # type: ignore[operator]
            variant.step(fed[number % len(fed)])
        _meet(world)
        taken[sends].append(1e3 * (time.perf_counter() - begun))
    watcher.close()
    if world.is_main:
        _print(where, taken, [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()])


def _meet(world: lockstep.World) -> None:
    """All workers, and their devices, have nothing left to do."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    world.barrier()


def _print(where: str, taken: dict[bool, list[float]], steps: list[dict[str, Any]]) -> None:
    """What was found; without the first steps."""
    difference = median(taken[True][NOT_COUNTED:]) - median(taken[False][NOT_COUNTED:])
    mine = [step["workers"][0] for step in steps[2 * NOT_COUNTED :] if step["workers"][0]["shares_ms"]["exposed"] > 0]
    found = [each["shares_ms"]["exposed"] for each in mine]
    waiting = median(each["shares_ms"]["waiting"] for each in mine)
    apart = max(abs(sum(each["shares_ms"].values()) / each["wall_ms"] - 1) for each in mine)
    print(
        f"{where}: with minus without {difference:.1f} ms, exposed {median(found):.1f} ms (mean {mean(found):.1f}), "
        f"{median(found) / difference:.3f} of it; waiting {waiting:.1f} ms. Shares and wall time differ by "
        f"{100 * apart:.2f} %.",
        flush=True,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[300], help="speeds of the link")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", choices=GPT2_SIZES, help="default: gpt-10m, on a GPU gpt2-124m")
    parser.add_argument("--batch", type=int, default=4, help="sequences per worker and step (default 4)")
    parser.add_argument("--context", type=int, help="tokens per sequence (default 128, on a GPU 1024)")
    parser.add_argument("--steps", type=int, default=16, help="of each kind (default 16)")
    options = parser.parse_args()
    if options.steps <= NOT_COUNTED:
        parser.error(f"--steps {options.steps}: the first {NOT_COUNTED} of each kind count for nothing, so take more.")
    return options


if __name__ == "__main__":
    main()
