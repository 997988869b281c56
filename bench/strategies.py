"""What a step takes when workers exchange less often: LocalSGD and DiLoCo against synchronous training and torch DDP.

    python bench/strategies.py                                       2 workers over gloo, gpt-10m
    python bench/strategies.py --every 50 --variants ddp diloco diloco-overlap
    python bench/strategies.py --link-mbit 200                       between two network namespaces (root)
    python bench/strategies.py --device cuda --model gpt2-124m --dtype bf16 --context 1024 --every 50

nocomm           each worker for itself: no communication at all
ddp              torch's DistributedDataParallel in a plain loop
full             lockstep.Trainer, synchronous: the same bits on any number of workers
local, diloco    lockstep.Trainer with that strategy
local-int8, diloco-int8, local-overlap, diloco-overlap
                 the same with the Int8 wire, or overlapped: applied half a round later

Every variant has its own model and fused AdamW and takes the same batches. One round of the measurement is `--every`
steps of each variant, so that each has one exchange in it (an overlapped one ends in the next round); variants are
interleaved round by round in one run, and the time is the largest over the workers (see lockstep.bench.interleave).
Printed: milliseconds a step, and the median of the rounds' ratios to the first variant and to DDP.

Several workers on one GPU: NCCL refuses that unless they say to be different hosts, so they do, and then talk over
loopback sockets: slower than any network between GPUs, which is what these strategies are for.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

import link
import torch
import variants
from variants import GPT2_SIZES, Batch, Setup, Variant, build

import lockstep
from lockstep import wire
from lockstep.bench import interleave, machine
from lockstep.data.source import GlobalBatch, Shard

KINDS = (
    "nocomm",
    "ddp",
    "full",
    *(f"{kind}{how}" for kind in ("local", "diloco") for how in ("", "-int8", "-overlap")),
)


def main() -> None:
    """Start the workers and print what they measured."""
    options = _options()
    if options.link_mbit is None:
        print(lockstep.launch(train, workers=options.workers, args=(options,))[0])
    elif "RANK" in os.environ:  # In a namespace: one of the two workers.
        link.limit(options.link_mbit * 1e6)
        text = train(options)
        if os.environ["RANK"] == "0":
            print(text)
    else:
        _over_a_link(options)


def _over_a_link(options: argparse.Namespace) -> None:
    """This script once more, as a worker in each of two namespaces."""
    if options.workers != 2 or options.device != "cpu":
        raise SystemExit("--link-mbit joins two workers on the CPU.")
    with link.Link() as pair:
        pair.run_here()


def train(options: argparse.Namespace) -> str:
    """One worker; all return the same text."""
    world = _join(options)
    setup = Setup(options.model, options.batch, options.context, options.dtype == "bf16")
    fed = variants.batches(setup, world)
    made = {name: _stepper(name, options, setup, world, fed) for name in options.variants}
    actions = {name: _round(step, options.every) for name, step in made.items()}
    measured = interleave.measure(world, actions, rounds=options.rounds, warmup=1)
    return _table(options, world, measured)


def _join(options: argparse.Namespace) -> lockstep.World:
    torch.set_num_threads(1)
    if options.device == "cuda":
        os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        if options.workers > torch.cuda.device_count():
            os.environ["NCCL_HOSTID"] = os.environ["RANK"]
    return lockstep.join(device=options.device, backend=options.backend if options.device == "cpu" else None)


def _round(step: Callable[[int], Any], every: int) -> interleave.Action:
    def make(number: int) -> None:
        for each in range(number * every, (number + 1) * every):
            step(each)

    return make


def _stepper(
    name: str, options: argparse.Namespace, setup: Setup, world: lockstep.World, fed: list[Batch]
) -> Callable[[int], Any]:
    """What makes step after step of a variant."""
    if name in ("nocomm", "ddp"):
        variant = Variant(name, setup, world)
        return lambda number: variant.step(fed[number % len(fed)])
    torch.manual_seed(0)
    net = build(options.model).to(world.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)

    def loss_fn(model: torch.nn.Module, shard: Batch) -> Any:
        with torch.autocast(world.device.type, torch.bfloat16, enabled=setup.bf16):
            return model(*shard)

    trainer = lockstep.Trainer(
        net, optimizer, loss_fn, shards=world.size, strategy=_strategy(name, options.every), deterministic=False
    )
    return lambda number: trainer.step(_shard(world, fed[number % len(fed)], number))


def _strategy(name: str, every: int) -> Any:
    if name == "full":
        return None
    kind, _, how = name.partition("-")
    delay = max(1, every // 2)
    make = lockstep.LocalSGD if kind == "local" else lockstep.DiLoCo
    return make(every=every, wire=wire.Int8() if how == "int8" else None, overlap=how == "overlap", delay=delay)


def _shard(world: lockstep.World, batch: Batch, number: int) -> GlobalBatch:
    """This worker's batch as its one shard."""
    size = len(batch[0])
    return GlobalBatch(0, number, size * world.size, (Shard(world.rank, size, batch),))


def _table(options: argparse.Namespace, world: lockstep.World, measured: interleave.Measured) -> str:
    times = measured.times
    lines = [
        f"{options.model}, {options.dtype}, {options.workers} workers over {world.backend}; per worker and step "
        f"{options.batch} x {options.context} tokens; a round is {options.every} steps, with one exchange in it",
        str(measured),
        ", ".join(f"{name}: {fact}" for name, fact in machine.describe(world).items()),
    ]
    bases = [base for base in dict.fromkeys([options.variants[0], "ddp"]) if base in times]
    lines.append(f"{'':16}{'ms a step':>10}" + "".join(f"{'to ' + base + ' (95 %)':>24}" for base in bases))
    for name, seconds in times.items():
        line = f"{name:16}{1e3 * interleave.spread(seconds)[1] / options.every:10.1f}"
        for base in bases:
            found = interleave.compare(times, interleave.ratio, name, base)
            line += f"{f'{found.median:.3f} ({found.low:.3f}-{found.high:.3f})':>24}"
        lines.append(line)
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=GPT2_SIZES, default="gpt-10m")
    parser.add_argument("--batch", type=int, default=4, help="sequences per worker and step (default 4)")
    parser.add_argument("--context", type=int, default=128, help="tokens per sequence (default 128)")
    parser.add_argument("--every", type=int, default=16, help="steps between exchanges, and of a round (default 16)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds of each variant (default 5)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backend", choices=["shm", "gloo"], default="gloo", help="on the CPU (default gloo)")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast in the forward pass")
    parser.add_argument("--link-mbit", type=float, help="two namespaces joined by a link of that many Mbit/s")
    parser.add_argument("--variants", nargs="+", choices=KINDS, default=["ddp", "full", "local", "diloco"])
    options = parser.parse_args()
    if options.context > GPT2_SIZES[options.model].context:
        parser.error(f"{options.model} takes at most {GPT2_SIZES[options.model].context} tokens per sequence.")
    return options


if __name__ == "__main__":
    main()
