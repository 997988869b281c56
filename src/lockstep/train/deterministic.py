"""Steps of which every kernel gives the same bits each time."""

import contextlib
import os
from collections.abc import Iterator

import torch


class Determinism:
    """Has torch use its deterministic algorithms where there is a choice, within `with determinism():`.

    On a GPU an operation that has none raises torch's error, which names it: a warning would not do, since some kernels
    (cuDNN's attention) take the other algorithm then. On the CPU with one thread there is no choice to make.
    """

    def __init__(self, device: torch.device, threads: int, *, is_wanted: bool) -> None:
        self._is_on = is_wanted and (device.type != "cpu" or threads > 1)
        if self._is_on and device.type == "cuda":
            # cuBLAS reads this when it is first used, and torch refuses to call it deterministic without.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Outside the block everything is as the user has set it."""
        if not self._is_on:
            yield
            return
        before = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        settings = torch.utils.deterministic
        fills = settings.fill_uninitialized_memory  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # It would cost a pass each time.
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warn_only)
            settings.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
