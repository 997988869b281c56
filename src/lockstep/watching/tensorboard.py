"""A watched run's numbers in TensorBoard, where it is installed."""

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_GROUPS = {
    "loss": "training", "grad_norm": "training", "lr": "training", "batch": "training", "noise_scale": "training",
    "samples_per_s": "speed", "efficiency": "speed", "wall_ms": "speed", "mfu": "speed",
    "sent_bytes": "communication", "bus_gb_per_s": "communication",
}  # fmt: skip
"""Which group of charts a number of a step belongs to."""


class TensorBoard:
    """Writes records to `folder`; without tensorboard it says so once, and does nothing."""

    def __init__(self, folder: str | Path) -> None:
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            warnings.warn(
                "tensorboard is not installed, so the run's numbers do not go there: pip install tensorboard. "
                "`lockstep report` shows them too.",
                stacklevel=2,
            )
        else:
            self._writer = SummaryWriter(str(folder))

    def write(self, record: Mapping[str, Any]) -> None:
        """Write the numbers of a step, given as a line of `steps.jsonl`."""
        if self._writer is not None:
            for name, value in scalars(record):
                self._writer.add_scalar(name, value, global_step=record["step"], walltime=record.get("time"))

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


def scalars(record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers that a record has, by the names they get: finite ones, and the loss whatever it is."""
    for name, group in _GROUPS.items():
        value = record.get(name)
        if value is not None and (name == "loss" or math.isfinite(value)):
            yield f"{group}/{name}", float(value)
    workers = record.get("workers") or ()
    kinds = dict.fromkeys(kind for worker in workers for kind in worker["shares_ms"])
    for kind in kinds:
        yield f"time/{kind}_ms", sum(worker["shares_ms"].get(kind, 0.0) for worker in workers) / len(workers)
    if record.get("last") is not None:
        yield "straggler/worker", float(record["last"]["worker"])
        yield "straggler/late_ms", float(record["last"]["late_ms"])
