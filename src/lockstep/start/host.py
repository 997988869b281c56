"""What this machine offers to workers, without importing torch: that takes longer than starting them."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lockstep.errors import UsageError


def num_workers(asked: int | None) -> int:
    """The number of workers asked for; if none was, one per GPU, or per core where there is no GPU."""
    if asked is None:
        return num_gpus(os.environ, (path.name for path in Path("/dev").glob("nvidia*"))) or num_cores()
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
        raise UsageError(f"{asked!r} workers cannot be started: give a whole number, 1 or more.")
    return asked


def num_threads(asked: int | None, workers: int, environ: Mapping[str, str]) -> int | None:
    """Compute threads per worker, such that all workers together fill the cores; None if the user's setting stands."""
    if asked is not None:
        if asked < 1:
            raise UsageError(f"{asked} threads per worker: give 1 or more.")
        return asked
    return None if environ.get("OMP_NUM_THREADS") else max(1, num_cores() // workers)


def num_cores() -> int:
    """The cores that this process may use: its affinity, or what its container is allowed if that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota = cores_in_quota(Path("/sys/fs/cgroup/cpu.max").read_text())
    except OSError:
        quota = None
    return allowed if quota is None else max(1, min(allowed, quota))


def cores_in_quota(cpu_max: str) -> int | None:
    """Whole cores in a cgroup's `cpu.max`, None if it sets no limit: `150000 100000` is one core and a half."""
    match = re.match(r"(\d+) (\d+)", cpu_max)
    return int(match[1]) // int(match[2]) if match else None


def num_gpus(environ: Mapping[str, str], devices: Iterable[str]) -> int:
    """The GPUs among `devices` (names in /dev) that CUDA_VISIBLE_DEVICES leaves visible."""
    present = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in devices)
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    # As CUDA reads it: names and numbers up to the first that is none. Parts of one GPU (MIG) count each.
    valid = re.match(r"(?:\s*(?:\d+|(?:GPU|MIG)-[^,\s]+)\s*(?:,|$))*", visible)
    assert valid is not None
    return len([name for name in valid[0].split(",") if name.strip()])
