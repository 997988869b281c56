"""Memory per worker at each stage of splitting, against what the arithmetic says.

    python bench/memory.py                               4 CPU workers, 100M parameters, shm and gloo
    python bench/memory.py --device cuda --workers 2     the same on a GPU, over NCCL
    python bench/memory.py --meta --stages 3             the peak while a model from the meta device is wrapped

AdamW in float32: parameters 4, gradients 4, optimizer state 8 bytes each. The arithmetic for P parameters on N workers:
16P, 8P + 8P/N, 4P + 12P/N and 16P/N bytes for zero = 0, 1, 2, 3. Over shm parameters exist once per host as soon as
anything is split: 4P/N instead of 4P. The model is a row of equal blocks and the batch tiny, so that activations hardly
count; one bucket (two from zero=2 on) and, where parameters are gathered, two blocks come on top.

C's allocator keeps freed blocks of up to 32 MB for the next step (see replica/allocator.py). That inflates a process in
which many threads allocate, as gloo's do: where something is split over gloo, blocks of a megabyte are given back.

On the CPU: the peak of the proportional set size of a worker, sampled all the time during the steps, less what it was
after a few steps of a tiny model. On a GPU: the allocator's peak. The largest over the workers counts. Every stage runs
in workers of its own.
"""

import argparse
import gc
import os

import torch
from torch import Tensor, nn

import lockstep
from lockstep.bench import machine
from lockstep.bench.machine import MemorySampler, used_bytes

WIDTH = 1024
MB = 1e6


class Block(nn.Module):
    """A layer of WIDTH x WIDTH."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As wide as it came."""
        return x + torch.tanh(self.linear(x))


def main() -> None:
    """Every stage and backend in turn."""
    options = _options()
    num_params = options.blocks * WIDTH * WIDTH
    print(f"{num_params / 1e6:.1f}M parameters, {options.workers} workers, AdamW in float32; MB per worker")
    print(f"{'backend':10}{'zero':>6}{'arithmetic':>14}{'measured':>12}{'ratio':>8}")
    for backend in ["nccl"] if options.device == "cuda" else options.backends:
        for zero in options.stages:
            peaks = lockstep.launch(train, workers=options.workers, args=(options, backend, zero))
            wanted, peak = arithmetic(num_params, options.workers, zero, backend, built=options.meta), max(peaks)
            print(f"{backend:10}{zero:>6}{wanted / MB:14.0f}{peak / MB:12.0f}{peak / wanted:8.3f}", flush=True)


def train(options: argparse.Namespace, backend: str, zero: int) -> int:
    """The peak of one worker."""
    if options.device == "cuda":
        os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_HOSTID=os.environ["RANK"])
    torch.set_num_threads(max(1, machine.cores() // options.workers))
    world = lockstep.join(device=options.device, backend=None if backend == "nccl" else backend)
    x = torch.randn(4, WIDTH, device=world.device)
    _peak(world, options, zero, x, blocks=2)  # Code is loaded when it is first used: that is not what is asked.
    if options.meta:
        _wrapped_from_meta(world, options, zero, 2)
    gc.collect()
    world.barrier()
    before = used_bytes(world.device)
    world.barrier()
    if options.meta:
        peak = _wrapped_from_meta(world, options, zero, options.blocks) - before
    else:
        peak = _peak(world, options, zero, x, blocks=options.blocks) - before
    world.barrier()
    return peak


def _wrapped_from_meta(world: lockstep.World, options: argparse.Namespace, zero: int, blocks: int) -> int:
    """The peak while a model that was built on the meta device gets its memory, before the first step."""
    with torch.device("meta"):
        net = nn.Sequential(*(Block() for _ in range(blocks)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    sampler = MemorySampler()
    sampler.start()
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, bucket_cap_mb=options.bucket_mb)
    peak = sampler.end()
    del model
    return torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else peak


def _peak(world: lockstep.World, options: argparse.Namespace, zero: int, x: Tensor, *, blocks: int) -> int:
    net = nn.Sequential(*(Block() for _ in range(blocks))).to(world.device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, bucket_cap_mb=options.bucket_mb)
    sampler = MemorySampler()
    for step in range(options.steps):
        if step == 1:  # The first step lays buckets out anew and makes the optimizer's state.
            world.barrier()
            sampler.start()
            if world.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(world.device)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    peak = sampler.end()
    world.barrier()
    return torch.cuda.max_memory_allocated(world.device) if world.device.type == "cuda" else peak


def arithmetic(num_params: int, workers: int, zero: int, backend: str, *, built: bool) -> float:
    """Bytes per worker; `built`: before the first step, when there is no optimizer state yet."""
    params, grads, state = 4.0, 4.0, 8.0
    if built:
        state = 0.0
    if zero >= 1:
        state /= workers
        params /= workers if backend == "shm" else 1
    if zero >= 2:
        grads /= workers
    if zero >= 3 and backend != "shm":
        params /= workers
    return num_params * (params + grads + state)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--backends", nargs="+", choices=["shm", "gloo"], default=["shm", "gloo"])
    parser.add_argument("--stages", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--blocks", type=int, default=96, help=f"layers of {WIDTH} x {WIDTH} (default 96)")
    parser.add_argument("--bucket-mb", type=float, default=8, help="size of a bucket (default 8)")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--meta", action="store_true", help="the peak of building, not of training")
    return parser.parse_args()


if __name__ == "__main__":
    main()
