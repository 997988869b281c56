"""Steps of which every kernel gives the same bits each time."""

import contextlib
import os
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def deterministic(device: torch.device, threads: int) -> Iterator[None]:
    """A block in which torch uses its deterministic algorithms where there is a choice; a warning where there is none.

    On the CPU with one thread there is none to make. Outside the block everything is as the user has set it.
    """
    if device.type == "cpu" and threads == 1:
        yield
        return
    # cuBLAS reads this when it is first used, and warns of a result that may differ where it is missing.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=warn_only or not before)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # Costs a pass.
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
