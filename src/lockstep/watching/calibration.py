"""How long the passes of a step take without communication: T_1 of `Trainer`, see scaling.py."""

import time
from collections.abc import Callable

import torch

_TRIES = 3
"""The first allocates and compiles; of the others the quicker one counts."""


def calibrated(run_passes: Callable[[], None], device: torch.device) -> float | None:
    """Seconds that `run_passes` takes; None if it fails, which then shows where it counts, in the step itself."""
    took = []
    try:
        for _ in range(_TRIES):
            begun = _now(device)
            run_passes()
            took.append(_now(device) - begun)
    except Exception:
        return None
    return min(took[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # Before the first step there is nothing to disturb.
    return time.perf_counter()
