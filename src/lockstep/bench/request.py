"""What `lockstep bench` is to measure, checked before any worker starts, and without importing torch.

`bench step` and `bench gpu` hold contests: one workload, a number of workers, and the variants that take turns. `bench
comm` sums tensors of several sizes over several backends.
"""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.bench import catalogue
from lockstep.bench.catalogue import WORKLOADS
from lockstep.errors import UsageError
from lockstep.start import host

MOST_PER_CORE = 4
"""More workers than this on a core measure the scheduler."""
MOST_PER_GPU = 8
"""Each takes a context and buffers of NCCL's."""
BYTES_PER_PARAM = 20
"""Of a variant that splits nothing, in float32: parameter, gradient, two of Adam's, and a bucket."""
PROCESS_BYTES = 200 << 20
"""Of a worker before it has made anything."""
BACKENDS = ("shm", "gloo")
"""Those that can be measured, in the order in which they are."""
ITEM_BYTES = 4
"""Tensors are float32."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Contest:
    """What is to be measured in one run; made by `checked_contests`."""

    workload: str
    variants: tuple[str, ...]
    workers: int
    device: str
    """cpu or cuda."""
    batch: int
    """Samples per worker and step."""
    steps: int
    """Timed steps of each variant."""
    warmup: int
    """Steps before those."""
    crews: int = 1
    """How often all workers are started anew, for as many steps each time."""

    @property
    def has_own_workers(self) -> bool:
        """Whether every variant has workers of its own: on CPUs."""
        return self.device == "cpu"

    @property
    def is_bf16(self) -> bool:
        """Whether the forward pass runs under bfloat16 autocast: on GPUs."""
        return self.device == "cuda"


def checked_contests(
    device: str,
    workers: int | None,
    workloads: Sequence[str],
    variants: Sequence[str] | None,
    steps: int,
    warmup: int,
    batch: int | None,
    crews: int = 1,
) -> list[Contest]:
    """A contest for each workload; raises UsageError if one cannot be held.

    workers: None for 2 on the CPU, and on GPUs for one per GPU.
    variants: None for all that there are for the device.
    batch: samples per worker and step, None for each workload's own.
    """
    size = _checked_size(device, workers)
    names = tuple(dict.fromkeys(variants or (catalogue.ON_GPU if device == "cuda" else catalogue.ON_CPU)))
    for name in names:
        if catalogue.spelled(name).backend and device == "cuda":
            raise UsageError(
                f"variant {name!r}: on GPUs there is one backend, nccl. Leave out what is behind the slash."
            )
    return [
        Contest(name, names, size, device, batch or WORKLOADS[name].batch, steps, warmup, crews)
        for name in dict.fromkeys(workloads)
    ]


def room(contest: Contest, num_bytes: int) -> int:
    """How many variants of a contest fit into that many bytes of memory, all workers together."""
    process = PROCESS_BYTES if contest.has_own_workers else 0
    each = contest.workers * (process + BYTES_PER_PARAM * WORKLOADS[contest.workload].num_params)
    return int(0.8 * num_bytes / each)


def free_bytes() -> int:
    """The memory of this machine that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kilobytes << 10


def _checked_size(device: str, workers: int | None) -> int:
    if device == "cuda":
        units, most, what = _num_gpus(), MOST_PER_GPU, "GPU(s)"
        size = units if workers is None else workers
    else:
        units, most, what = host.num_cores(), MOST_PER_CORE, "core(s)"
        size = 2 if workers is None else workers
    if size > most * units:
        raise UsageError(
            f"{size} workers on {units} {what} would mostly wait for their turn, which says nothing about any variant: "
            f"give -n {most * units} or fewer."
        )
    return size


def _num_gpus() -> int:
    """How many GPUs there are; raises UsageError if torch can use none."""
    import torch  # Takes seconds: only here.

    if not torch.cuda.is_available():
        raise UsageError(
            f"there is no CUDA device here that torch {torch.__version__} can use: install a torch that is built for "
            "CUDA, or measure on the CPU, with lockstep bench step."
        )
    return torch.cuda.device_count()


@dataclass(frozen=True, slots=True)
class CommRequest:
    """What `bench comm` is to measure; made by `checked_comm`."""

    workers: int
    sizes: tuple[int, ...]
    """Bytes of the tensors to reduce."""
    backends: tuple[str, ...] | None
    """None: all that work on this host."""
    rounds: int
    """How often each algorithm is timed for each size and backend."""


def checked_comm(workers: int | None, sizes: Sequence[int], backends: Sequence[str] | None, rounds: int) -> CommRequest:
    """The request in these numbers; raises UsageError if it would fill the machine.

    workers: None for one per core, but two at least. backends: None for all that work on this host.
    """
    workers = max(2, host.num_cores()) if workers is None else workers
    needed = workers * workers * max(sizes)  # In the naive way every worker holds everybody's tensor.
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > present // 2:
        raise UsageError(
            f"{workers} workers that send {max(sizes) >> 20} MB each to everyone take {needed >> 30} GB together, more "
            f"than half of this machine's {present >> 30} GB: give smaller --sizes or fewer workers with -n."
        )
    chosen = None if backends is None else tuple(dict.fromkeys(backends))
    return CommRequest(workers, tuple(dict.fromkeys(sizes)), chosen, rounds)


def parse_size(text: str) -> int:
    """A type for argparse: bytes in words such as 512, 64K or 16M, a whole number of float32."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    num_bytes = int(match[1]) * _UNITS[match[2]] if match else 0
    if num_bytes == 0 or num_bytes % ITEM_BYTES:
        raise argparse.ArgumentTypeError(
            f"size {text!r}: give bytes as a whole number, with K, M or G behind it if you like (64K, 16M), above zero "
            f"and divisible by {ITEM_BYTES}, since tensors are float32"
        )
    return num_bytes
