"""What saying less does to learning: the demo's GPT, trained with each wire and strategy from the same seeds.

    python bench/learning.py                                         4 workers on this machine's cores
    python bench/learning.py --device cuda                           4 NCCL ranks on one GPU; quick if they share it by
                                                                     MPS (nvidia-cuda-mps-control -d)
    python bench/learning.py --ways full sign sign+150 --seeds 1 --steps 100

Every run has the same model, batches in the same order, optimizer and schedule, and as many samples: only the way the
workers exchange differs. A way with a number, as sign+150, begins with so many steps of plain training. Printed is the
loss on held-out text after the last step, and its ratio to that of `full` with the same seed: mean over the seeds, and
the smallest and largest.

Without installation, from the repository's root: PYTHONPATH=src python bench/learning.py ...
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import lockstep
from lockstep import wire
from lockstep.bench import machine
from lockstep.demo.gpt import SHAPES, ByteGPT, Recipe, loss_of
from lockstep.demo.train_gpt import corpus_folder, read_corpus, windows_of

HELD_OUT = 256
"""Windows that are not trained on."""

WAYS: dict[str, dict[str, Any]] = {
    "full": {"wire": wire.Full()},
    "half": {"wire": wire.Half("bf16")},
    "int8": {"wire": wire.Int8()},
    "lowrank": {"wire": wire.LowRank(4)},
    "topk": {"wire": wire.TopK(0.01)},
    "sign": {"wire": wire.Sign()},
    "localsgd": {"strategy": lockstep.LocalSGD(every=16, average_state=True)},
    "diloco": {"strategy": lockstep.DiLoCo(every=16)},
    "diloco-mild": {"strategy": lockstep.DiLoCo(every=16, outer=lambda p: _mild(p), average_state=True)},
}


def _mild(params: list[Tensor]) -> torch.optim.Optimizer:
    """An outer optimizer for short runs: the usual one's momentum has hardly begun after thirty rounds."""
    return torch.optim.SGD(params, lr=0.7, momentum=0.5, nesterov=True)


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
    for seed in options.seeds:
        for name in options.ways:
            began = time.perf_counter()
            losses[name].append(_train(options, world, name, seed))
            if world.is_main:
                print(f"seed {seed} {name:9} {losses[name][-1]:.4f}  {time.perf_counter() - began:.0f} s", flush=True)
    return losses, machine.describe(world)


def _train(options: argparse.Namespace, world: lockstep.World, name: str, seed: int) -> float:
    """One run; returns the loss on what was held out."""
    way, _, first = name.partition("+")
    plain = int(first or 0)
    windows = windows_of(read_corpus(corpus_folder()), SHAPES[options.model].context)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).tolist()
    kept, held_out = Subset(windows, order[HELD_OUT:]), Subset(windows, order[:HELD_OUT])
    trainer = _trainer(options, world, "full" if plain else way, seed)
    _go_on(options, trainer, kept, plain or options.steps)
    if plain:
        later = _trainer(options, world, way, seed)
        later.load_state_dict(trainer.state_dict())
        trainer = later
        _go_on(options, trainer, kept, options.steps)
    loss = trainer.evaluate(held_out, _loss, options.batch)
    assert isinstance(loss, float)
    return loss


def _trainer(options: argparse.Namespace, world: lockstep.World, way: str, seed: int) -> lockstep.Trainer:
    recipe = Recipe(options.model, options.steps, options.batch, seed)
    torch.manual_seed(seed)
    net = ByteGPT(recipe.shape).to(world.device)
    optimizer, schedule = recipe.optimizer(net)
    return lockstep.Trainer(
        net,
        optimizer,
        _loss,
        shards=options.workers,
        scheduler=schedule,
        seed=seed,
        threads=max(1, machine.cores() // options.workers),
        deterministic=False,
        check_every=0,
        **WAYS[way],
    )


def _go_on(options: argparse.Namespace, trainer: lockstep.Trainer, windows: Any, until: int) -> None:
    epochs = options.steps * options.batch // len(windows) + 1
    for batch in trainer.batches(windows, options.batch, epochs=epochs):
        trainer.step(batch)
        if trainer.steps == until:
            return


def _loss(model: nn.Module, shard: Any) -> Tensor:
    return loss_of(model(shard[0]), shard[1])


def _print(options: argparse.Namespace, losses: dict[str, list[float]], described: dict[str, Any]) -> None:
    print(
        f"\n{options.model} GPT, {options.steps} steps of {options.batch} windows of {SHAPES[options.model].context} "
        f"bytes, {options.workers} workers, seeds {options.seeds}"
    )
    print(", ".join(f"{name}: {fact}" for name, fact in described.items()))
    print(f"\n{'':16}{'loss':>8}{'lowest - highest':>20}{'to full':>10}{'lowest - highest':>20}")
    for name, found in losses.items():
        ratios = [loss / base for loss, base in zip(found, losses.get("full", found), strict=True)]
        spread, apart = (f"{min(each):.4f} - {max(each):.4f}" for each in (found, ratios))
        print(f"{name:16}{mean(found):8.4f}{spread:>20}{mean(ratios):10.4f}{apart:>20}")


def _way(name: str) -> str:
    if name.partition("+")[0] not in WAYS or not name.partition("+")[2].isdigit() ^ ("+" not in name):
        raise argparse.ArgumentTypeError(f"there is no way {name!r}; there are {', '.join(WAYS)}, and each +STEPS.")
    return name


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", type=_way, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=32, help="windows in the global batch (default 32)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", help="write the losses to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
