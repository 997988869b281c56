"""What a process uses: on the CPU its proportional set size, in which shared memory is divided among its users."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

PERIOD_S = 0.005


@dataclass(slots=True)
class Growth:
    """What came on top of what was used before; filled in at the end of `growth`."""

    peak: int = 0
    """The most bytes that were seen."""
    held: int = 0
    """Bytes that are still used at the end."""


class Sampler(threading.Thread):
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
def growth(device: torch.device) -> Iterator[Growth]:
    """Fill in by how much memory grows within the block: the process's, or what torch has allocated on the GPU."""
    grown = Growth()
    _settle(device)
    before = used(device)
    sampler = None if device.type == "cuda" else Sampler()
    if sampler is not None:
        sampler.start()
    else:
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield grown
    finally:
        peak = torch.cuda.max_memory_allocated(device) if sampler is None else sampler.end()
        _settle(device)
        grown.held = used(device) - before
        grown.peak = max(peak - before, grown.held)


def used(device: torch.device) -> int:
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
