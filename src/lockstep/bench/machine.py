"""What a benchmark ran on, in words: numbers without it mean nothing."""

import os
import platform
from pathlib import Path

import torch

import lockstep


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
