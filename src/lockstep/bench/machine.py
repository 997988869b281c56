"""What a benchmark runs on, in words, and what a process of it uses: numbers without that mean nothing."""

import ctypes
import gc
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

import lockstep

PERIOD_S = 0.005
"""Between two looks at the memory of a process."""


def describe(world: lockstep.World) -> dict[str, str | int]:
    """The machine and the versions, as plain values."""
    facts: dict[str, str | int] = {
        "workers": world.size,
        "backend": world.backend,
        "threads per worker": torch.get_num_threads(),
        "cpu": f"{_cpu()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lockstep": lockstep.__version__,
    }
    if world.device.type == "cuda":
        facts["gpu"] = f"{torch.cuda.get_device_name(world.device)}, {torch.cuda.device_count()} here"
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


@dataclass(slots=True)
class MemoryGrowth:
    """What came on top of what was used before; filled in at the end of `memory_growth`."""

    peak: int = 0
    """The most bytes that were seen."""
    held: int = 0
    """Bytes that are still used at the end."""


class MemorySampler(threading.Thread):
    """Looks at this process's proportional set size, again and again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self._ends = threading.Event()

    def run(self) -> None:
        """Until `end` is called."""
        while not self._ends.wait(PERIOD_S):
            self.peak = max(self.peak, proportional_bytes())

    def end(self) -> int:
        """The most that was seen."""
        self._ends.set()
        self.join()
        return self.peak


@contextmanager
def memory_growth(device: torch.device) -> Iterator[MemoryGrowth]:
    """Fill in by how much memory grows within the block: the process's, or what torch has allocated on the GPU."""
    grown = MemoryGrowth()
    _settle(device)
    before = used_bytes(device)
    sampler = None if device.type == "cuda" else MemorySampler()
    if sampler is not None:
        sampler.start()
    else:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield grown
    finally:
        peak = torch.cuda.max_memory_allocated(device) if sampler is None else sampler.end()
        _settle(device)
        grown.held = used_bytes(device) - before
        grown.peak = max(peak - before, grown.held)


def used_bytes(device: torch.device) -> int:
    """Bytes that are used now."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else proportional_bytes()


def proportional_bytes() -> int:
    """This process's memory; what it shares with others is divided among them."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return int(lines["Pss"].split()[0]) << 10


def _settle(device: torch.device) -> None:
    """Give back what is not in use any more, as far as that can be done."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return
    with suppress(AttributeError):  # Only glibc has it.
        ctypes.CDLL(None).malloc_trim(0)
