"""This machine: what it is, seen in a moment; what it does, measured in a few seconds.

`this_machine` asks for its parts and times a few products and copies with numpy, so that a plan from numbers need not
wait for torch. `measured_machine` times torch's own products by dtype, and two workers that talk over the backend that
a run would take: latency, bandwidth, and how much computing loses meanwhile.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lockstep.errors import UsageError
from lockstep.plan import machine as machines
from lockstep.plan.machine import Device, Link, Machine, Measured

_SIDE = 512
"""Of the matrices that are multiplied: 3 MB in all, so that they lie in caches, as a layer's tiles do."""
_COPY_BYTES = 32 << 20
"""More than caches hold."""
_TRIES = 5
SMALL_BYTES, LARGE_BYTES = 4 << 10, 16 << 20
"""Sizes of the messages from which latency and bandwidth follow."""
_ROUNDS = 12
_WORK_S = 0.03


def this_machine() -> Machine:
    """This machine, without torch: its GPUs by their names, or its cores, timed for a moment."""
    gpus = _gpus()
    if gpus:
        key = machines.device_key(gpus[0])
        if key is not None:
            return machines.assembled(key, len(gpus), len(gpus), name=f"{len(gpus)}x{key}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    base = machines.assembled("cpu", max(cores, 1), max(cores, 1), name=f"{cores}xCPU, a core each")
    device, copied = _core()
    # A reduction in shared memory reads one byte and writes one for each byte of the tensor, as a copy does.
    link = Link("shared memory", copied / cores, machines.SHARED_MEMORY_LATENCY_S)
    return replace(base, device=replace(device, memory_bytes=_memory_bytes() / max(cores, 1)), intra=link)


def _gpus() -> list[str]:
    """The names of the GPUs of this host."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    names = []
    for line in done.stdout.splitlines():
        name, _, memory = line.partition(",")
        gigabytes = round(float(memory.split()[0]) / 1000) if memory.split() else 0
        names.append(f"{name.strip()} {gigabytes}GB" if "GB" not in name else name.strip())
    return names


def _core() -> tuple[Device, float]:
    """One core as a device, and bytes a second that it copies."""
    import numpy as np

    a = np.ones((_SIDE, _SIDE), dtype=np.float32)
    product = min(_seconds(lambda: a @ a) for _ in range(_TRIES))
    source, target = np.ones(_COPY_BYTES, dtype=np.uint8), np.empty(_COPY_BYTES, dtype=np.uint8)
    copied = _COPY_BYTES / min(_seconds(lambda: np.copyto(target, source)) for _ in range(_TRIES))
    flops = 2.0 * _SIDE**3 / product
    if os.environ.get("OMP_NUM_THREADS") != "1":
        flops /= max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    return Device("cpu", {"fp32": flops}, 0.0, 2 * copied, 10.0, "timed here", "cpu"), copied


def _memory_bytes() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


# Measured with torch


@dataclass(frozen=True, slots=True)
class LinkTest:
    """What two workers or more found of the way between them; alike on all of them."""

    backend: str
    workers: int
    latency_s: float
    """Of one all-reduce of nearly nothing."""
    bytes_per_s: float
    """In the formula of the backend's algorithm: over shared memory bytes of a tensor, else those that one sends."""
    contention: float
    """Share of its speed that computing loses while all-reduces are on their way."""
    crowding: float
    """How many times as long as alone a worker computes when all of them do."""
    copy_s_per_byte: float
    """What copying a gradient into its bucket takes, when all workers do."""


def test_link(world: Any, *, rounds: int = _ROUNDS, large_bytes: int = LARGE_BYTES, quantile: float = 0.5) -> LinkTest:
    """Time all-reduces of the world's backend, small and large, alone and beside computing; every worker calls this.

    quantile: of the times of one thing, which one counts: less than a half where others use the machine too.
    """
    import torch
    import torch.distributed as dist

    if world.size < 2:
        raise UsageError("a link has two ends: start two workers or more (lockstep run -n 2) to test one.")
    small, large = (torch.ones(size // 4, device=world.device) for size in (SMALL_BYTES, large_bytes))

    def reduced(tensor: Any, times: int) -> float:
        world.barrier()
        begin = time.perf_counter()
        for _ in range(times):
            dist.all_reduce(tensor, group=world.group)
        _finish(world)
        return (time.perf_counter() - begin) / times

    alone, together, beside, copied = [], [], [], []
    target = torch.empty_like(large)
    small_s, large_s = [], []
    work = _Work(world)
    for _ in range(rounds):
        small_s.append(reduced(small, 5))
        large_s.append(reduced(large, 1))
        for rank in range(world.size):  # One after the other: the rest wait at the barrier, which takes no core.
            world.barrier()
            if rank == world.rank:
                alone.append(work.seconds())
        world.barrier()
        together.append(work.seconds())
        world.barrier()
        copied.append(_seconds(lambda: target.copy_(large)))
        world.barrier()
        message = dist.all_reduce(large, group=world.group, async_op=True)
        beside.append(work.seconds())
        message.wait()
    figures = [_at(quantile, each) for each in (small_s, large_s, alone, together, beside, copied)]
    # The slowest worker is what a step waits for.
    found = [max(each) for each in zip(*world.gather_json(figures), strict=True)]
    latency, large_time, own, crowded, hindered, copy_s = found
    backend = str(world.backend).split(":")[-1]
    size = world.size
    moved = 1.0 if "shm" in str(world.backend) else 2.0 * (size - 1) / size
    rate = moved * (large_bytes - SMALL_BYTES) / max(large_time - latency, 1e-9)
    crowding = max(1.0, crowded / own, _least_crowding(world))
    # While a message of `large_time` was on its way, this much computing was not done.
    lost = (hindered - crowded) / min(large_time, hindered)
    return LinkTest(backend, size, latency, rate, min(0.95, max(0.0, lost)), crowding, copy_s / large_bytes)


def _least_crowding(world: Any) -> float:
    """How many threads compute for each core of this host: some milliseconds of them may still find cores idle."""
    import torch

    if world.device.type != "cpu":
        return 1.0
    host = world.peers.me.host
    told = world.gather_json([host, sorted(os.sched_getaffinity(0)), torch.get_num_threads()])
    here = [(cores, threads) for where, cores, threads in told if where == host]
    return float(sum(threads for _, threads in here)) / len(set().union(*(cores for cores, _ in here)))


class _Work:
    """Some computing that takes about 30 ms: products that lie in caches, and sums that do not, as a model has both."""

    def __init__(self, world: Any) -> None:
        import torch

        self._world = world
        self._square = torch.ones(_SIDE // 2, _SIDE // 2, device=world.device)
        self._long = torch.ones(_COPY_BYTES // 16, device=world.device)
        self._times = 1
        self.seconds()
        self._times = max(2, int(_WORK_S / max(self.seconds(), 1e-7)))

    def seconds(self) -> float:
        """Do it; returns how long it took."""
        import torch

        begin = time.perf_counter()
        for _ in range(self._times):
            for _ in range(8):
                torch.mm(self._square, self._square)
            self._long.add_(1.0)
        _finish(self._world)
        return time.perf_counter() - begin


def _at(quantile: float, times: Sequence[float]) -> float:
    """The time that so large a share of them is below; the median for a half."""
    if quantile == 0.5:
        return median(times)
    return sorted(times)[min(len(times) - 1, int(quantile * len(times)))]


def _finish(world: Any) -> None:
    if world.device.type == "cuda":
        import torch

        torch.cuda.synchronize(world.device)


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What one worker's step takes by itself, in seconds; medians."""

    forward_s: float
    backward_s: float
    optimizer_s: float
    """With all that the loop does between the backward pass and the next forward pass."""
    numels: tuple[int, ...]
    """Of the trained tensors, in the order in which their gradients came."""
    arrivals: tuple[float, ...]
    """For each the share of the backward pass that was over."""
    deviation: float
    """Of a pass, relative."""


def profile_step(
    model: Any, forward: Callable[[], Any], update: Callable[[], None], *, steps: int = 10, quantile: float = 0.5
) -> StepProfile:
    """Time some steps of `model` on this worker alone: `forward` returns a loss, `update` applies the gradients."""
    import torch

    params = [param for param in model.parameters() if param.requires_grad]
    came: dict[int, list[float]] = {index: [] for index in range(len(params))}
    device = params[0].device
    began = 0.0
    hooks = []

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def arrived(index: int) -> Callable[[Any], None]:
        return lambda _param: came[index].append(time.perf_counter() - began)

    for index, param in enumerate(params):
        hooks.append(param.register_post_accumulate_grad_hook(arrived(index)))
    times = []
    for number in range(steps + 2):
        start = now()
        loss = forward()
        began = now()
        loss.backward()
        end = now()
        update()
        if number >= 2:
            times.append((began - start, end - began, now() - end))
        else:
            for each in came.values():
                each.clear()
    for hook in hooks:
        hook.remove()
    forward_s, backward_s, optimizer_s = (_at(quantile, each) for each in zip(*times, strict=True))
    places = {index: _at(quantile, each) / backward_s for index, each in came.items() if each}
    order = sorted(places, key=places.__getitem__)
    passes = [first + second for first, second, _ in times]
    typical = median(passes)
    deviation = 1.48 * median([abs(each - typical) for each in passes]) / typical
    return StepProfile(
        forward_s,
        backward_s,
        optimizer_s,
        tuple(params[index].numel() for index in order),
        tuple(min(1.0, places[index]) for index in order),
        deviation,
    )


def measured_machine(workers: int | None = None) -> Machine:
    """This machine, measured with torch: a few seconds. Workers of its own are started for the link."""
    import torch

    from lockstep.start.function import launch

    base = this_machine()
    size = workers or base.workers
    is_gpu = torch.cuda.is_available()
    device = replace(base.device, flops=_rates(torch.device("cuda" if is_gpu else "cpu")), source="measured here")
    if size < 2:
        return replace(base, workers=size, per_host=size, device=device, measured=Measured(), name="this machine")
    tests: list[LinkTest] = launch(_test_here, size, threads=None if is_gpu else 1)
    test = tests[0]
    link = Link(test.backend, test.bytes_per_s, test.latency_s / 2)
    share = 1.0 / test.crowding
    return replace(
        base,
        name=f"this machine, {size} workers",
        workers=size,
        per_host=size,
        device=device,
        intra=link,
        measured=Measured(share, 0.0, test.contention, 0.0),
    )


def _test_here() -> LinkTest:
    from lockstep.world import join

    return test_link(join(), rounds=5)


def _rates(device: Any) -> dict[str, float]:
    """Products a second by dtype."""
    import torch

    side = 4096 if device.type == "cuda" else _SIDE
    dtypes: Sequence[tuple[str, Any]] = (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))
    found = {}
    for name, dtype in dtypes if device.type == "cuda" else dtypes[:2]:
        a = torch.ones(side, side, device=device, dtype=dtype)

        def product(a: Any = a) -> None:
            torch.mm(a, a)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        product()
        found[name] = 2.0 * side**3 / min(_seconds(product) for _ in range(_TRIES))
    return found
