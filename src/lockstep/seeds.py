"""Random numbers: the same on every worker where weights are made, different and reproducible everywhere else.

`join(seed=...)` seeds every worker alike, so that models built next are the same. `DataParallel` then sends each
worker's generators their own way. Worker 0 is left alone: on one worker, a wrapped script draws the very numbers
that the plain script draws.
"""

import functools
import hashlib
import random
from typing import Any

import numpy
import torch


def derive(seed: int, *path: int | str) -> int:
    """A 63-bit seed for the stream at `path`: the same for the same arguments, unrelated to all others."""
    text = ":".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed torch (with its devices), numpy's global generator and `random`."""
    # Not by torch.manual_seed, which notes down its caller's stack for each kind of device that is not there: 0.1 to
    # 2 ms, for every shard.
    device = _device_module()
    if device is not None and not hasattr(device, "manual_seed_all"):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
        if device is not None and not device._is_in_bad_fork():  # As in a loader's process, which has no use for it.
            device.manual_seed_all(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


@functools.cache
def _device_module() -> Any:
    """torch's module for what this machine computes on besides its processor, or None."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else torch.get_device_module(device)


def diverge(seed: int, rank: int) -> None:
    """From here on this worker draws its own numbers (dropout, augmentation). Worker 0 goes on as it was."""
    if rank:
        seed_everything(derive(seed, "worker", rank))
