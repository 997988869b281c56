"""What saying less does to learning: the demo's GPT, trained with each wire and strategy from the same seeds.

    python bench/learning.py                                         4 workers on this machine's cores
    python bench/learning.py --device cuda                           4 NCCL ranks on one GPU; quick if they share it by
                                                                     MPS (nvidia-cuda-mps-control -d)
    python bench/learning.py --ways full int8 --seeds 1 --steps 100

Every run has the same model, batches in the same order, optimizer and schedule, and as many samples: only the way the
workers exchange differs. Printed is the loss on held-out text after the last step, and its ratio to that of `full` with
the same seed: mean over the seeds, and the smallest and largest.

Without installation, from the repository's root: PYTHONPATH=src python bench/learning.py ...
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import lockstep
from lockstep import wire
from lockstep.bench import machine
from lockstep.demo import corpus
from lockstep.demo.corpus import Windows
from lockstep.demo.gpt import GPT, SHAPES, loss_of
from lockstep.demo.recipe import Recipe

HELD_OUT = 256
"""Windows that are not trained on."""

KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "full": lambda: {"wire": wire.Full()},
    "half": lambda: {"wire": wire.Half("bf16")},
    "int8": lambda: {"wire": wire.Int8()},
    "lowrank": lambda: {"wire": wire.LowRank(4)},
    "topk": lambda: {"wire": wire.TopK(0.01)},
    "sign": lambda: {"wire": wire.Sign()},
    "sign64": lambda: {"wire": wire.Sign(block=64)},
    "topk5": lambda: {"wire": wire.TopK(0.05)},
    "lowrank8": lambda: {"wire": wire.LowRank(8)},
    "diloco": lambda: {"strategy": lockstep.DiLoCo(every=16)},
    "localsgd": lambda: {"strategy": lockstep.LocalSGD(every=16)},
}


def main() -> None:
    """Run all of them, one after the other, and print the table."""
    options = _options()
    losses, described = lockstep.launch(run_all, workers=options.workers, args=(options,))[0]
    _print(options, losses, described)
    if options.json:
        Path(options.json).write_text(json.dumps(losses, indent=1) + "\n")


def run_all(options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """What one worker does: every way with every seed. The same losses on all of them."""
    if options.device == "cuda":
        os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        if options.workers > torch.cuda.device_count():
            os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    world = lockstep.join(device=options.device)
    losses: dict[str, list[float]] = {name: [] for name in options.ways}
    for seed in range(options.seeds):
        for name in options.ways:
            began = time.perf_counter()
            losses[name].append(_train(options, world, KINDS[name](), seed))
            if world.is_main:
                print(f"seed {seed} {name:9} {losses[name][-1]:.4f}  {time.perf_counter() - began:.0f} s", flush=True)
    return losses, machine.describe(world)


def _train(options: argparse.Namespace, world: lockstep.World, way: dict[str, Any], seed: int) -> float:
    """One run; returns the loss on what was held out."""
    recipe = Recipe(options.model, options.steps, options.batch, seed)
    torch.manual_seed(seed)
    net = GPT(recipe.shape).to(world.device)
    optimizer, schedule = recipe.optimizer(net)
    trainer = lockstep.Trainer(
        net,
        optimizer,
        _loss,
        shards=options.workers,
        scheduler=schedule,
        seed=seed,
        threads=max(1, machine.cores() // options.workers),
        deterministic=False,
        check_every=0,
        **way,
    )
    windows = Windows(corpus.read(corpus.folder()), recipe.shape.context)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).tolist()
    epochs = options.steps * options.batch // (len(windows) - HELD_OUT) + 1
    batches = trainer.batches(Subset(windows, order[HELD_OUT:]), options.batch, epochs=epochs)
    for _, batch in zip(range(options.steps), batches, strict=False):
        trainer.step(batch)
    loss = trainer.evaluate(Subset(windows, order[:HELD_OUT]), _loss, options.batch)
    assert isinstance(loss, float)
    return loss


def _loss(model: nn.Module, shard: Any) -> Tensor:
    return loss_of(model(shard[0]), shard[1])


def _print(options: argparse.Namespace, losses: dict[str, list[float]], described: dict[str, Any]) -> None:
    print(
        f"\n{options.model} GPT, {options.steps} steps of {options.batch} windows of {SHAPES[options.model].context} "
        f"bytes, {options.workers} workers, {options.seeds} seeds"
    )
    print(", ".join(f"{name}: {fact}" for name, fact in described.items()))
    print(f"\n{'':10}{'loss':>8}{'lowest - highest':>20}{'to full':>10}{'lowest - highest':>20}")
    for name, found in losses.items():
        ratios = [loss / base for loss, base in zip(found, losses.get("full", found), strict=True)]
        spread, apart = (f"{min(each):.4f} - {max(each):.4f}" for each in (found, ratios))
        print(f"{name:10}{mean(found):8.4f}{spread:>20}{mean(ratios):10.4f}{apart:>20}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=KINDS, default=list(KINDS), metavar="WAY", help=", ".join(KINDS))
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32, help="windows in the global batch (default 32)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", help="write the losses to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
