"""What `lockstep bench comm` is to measure, checked before any worker starts and without importing torch."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.start import host

BACKENDS = ("shm", "gloo")
"""Those that can be measured, in the order in which they are."""
ITEM_BYTES = 4
"""Tensors are float32."""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be measured; made by `checked`."""

    workers: int
    sizes: tuple[int, ...]
    """Bytes of the tensors to reduce."""
    backends: tuple[str, ...] | None
    """None: all that work on this host."""
    rounds: int
    """How often each algorithm is timed for each size and backend."""


def checked(workers: int | None, sizes: Sequence[str], backends: Sequence[str] | None, rounds: int) -> Request:
    """The request in these words; raises UsageError if it cannot be met.

    workers: None for one per core, but two at least.
    sizes: such as 1K or 16M.
    backends: None for all that work on this host.
    """
    if workers is None:
        workers = max(2, host.num_cores())
    if workers < 2:
        raise UsageError(f"{workers} worker(s) have nothing to send to each other: give -n 2 or more.")
    if rounds < 1:
        raise UsageError(f"{rounds} rounds measure nothing: give --rounds 1 or more.")
    for name in backends or ():
        if name not in BACKENDS:
            raise UsageError(
                f"backend {name!r} cannot be measured: give --backends one or more of {', '.join(BACKENDS)}."
            )
    num_bytes = tuple(dict.fromkeys(parse_size(text) for text in sizes))
    _check_memory(workers, max(num_bytes))
    return Request(workers, num_bytes, None if backends is None else tuple(dict.fromkeys(backends)), rounds)


def parse_size(text: str) -> int:
    """Bytes in words such as 512, 64K or 16M; raises UsageError if they are no whole number of float32."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    num_bytes = int(match[1]) * _UNITS[match[2]] if match else 0
    if num_bytes == 0 or num_bytes % ITEM_BYTES:
        raise UsageError(
            f"size {text!r}: give bytes as a whole number, with K, M or G behind it if you like (64K, 16M), above zero "
            f"and divisible by {ITEM_BYTES}, since tensors are float32."
        )
    return num_bytes


def writable(path: str, option: str = "--json") -> Path:
    """The file at `path`; raises UsageError if it could not be written, so that no measurement is lost in the end."""
    target = Path(path)
    place = target if target.exists() else target.parent
    if target.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(f"{path!r} cannot be written: give {option} a file in a folder that exists and is yours.")
    return target


def _check_memory(workers: int, num_bytes: int) -> None:
    """Refuse what would fill the machine: in the naive way every worker holds everybody's tensor."""
    needed = workers * workers * num_bytes
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > present // 2:
        raise UsageError(
            f"{workers} workers that send {num_bytes >> 20} MB each to everyone take {needed >> 30} GB together, more "
            f"than half of this machine's {present >> 30} GB: give smaller --sizes or fewer workers with -n."
        )
