"""Writes the run folder: run.json, steps.jsonl, trace.jsonl. Worker 0's background thread is its only caller.

A folder that holds an earlier run keeps it, under `earlier/`. Lines are flushed as they are written, so that a run that
is killed loses none but the last; run.json appears whole.
"""

import json
from pathlib import Path
from typing import IO, Any

from lockstep.watching.combined import CombinedStep, WorkerStep
from lockstep.watching.scaling import Scaling
from lockstep.watching.straggler import Late

_FILES = ("run.json", "steps.jsonl", "trace.jsonl", "report.html", "trace.json", "hangs")


class RunWriter:
    """The files of one run."""

    def __init__(self, folder: Path, began_ns: int) -> None:
        self.folder = folder
        self._began = began_ns
        folder.mkdir(parents=True, exist_ok=True)
        _put_aside(folder)
        self._steps: IO[str] = (folder / "steps.jsonl").open("w")
        self._trace: IO[str] = (folder / "trace.jsonl").open("w")
        self._last_late = -10

    def write_run(self, described: dict[str, Any]) -> None:
        """run.json, anew."""
        written = self.folder / "run.json.part"
        written.write_text(json.dumps(described, indent=1) + "\n")
        written.replace(self.folder / "run.json")

    def write_step(self, line: dict[str, Any]) -> None:
        """A line of steps.jsonl."""
        self._steps.write(json.dumps(line) + "\n")

    def write_trace(self, step: CombinedStep, *, has_straggler: bool) -> None:
        """A line of trace.jsonl, for the first 20 steps, every 50th, and one of ten with a straggler."""
        if step.step > 20 and step.step % 50 and not (has_straggler and step.step - self._last_late >= 10):
            return
        if has_straggler:
            self._last_late = step.step
        line = {"step": step.step, "workers": [_trace_of(each, self._began) for each in step.workers]}
        self._trace.write(json.dumps(line) + "\n")

    def flush(self) -> None:
        """Let others see what was written."""
        self._steps.flush()
        self._trace.flush()

    def close(self) -> None:
        """The end of the run."""
        self._steps.close()
        self._trace.close()


def step_line(
    step: CombinedStep, scaling: Scaling, late: Late | None, noted: dict[str, Any], verdict: str, began_ns: int
) -> dict[str, Any]:
    """The line of steps.jsonl. `noted`: time, loss, grad_norm, lr, noise_scale."""
    last = late and {"worker": late.worker, "late_ms": _ms(late.late_ns), "cause": late.cause}
    return {
        "step": step.step,
        "time": noted.get("time"),
        "wall_ms": _ms(step.wall),
        "loss": noted.get("loss"),
        "grad_norm": noted.get("grad_norm"),
        "lr": noted.get("lr"),
        "batch": scaling.batch,
        "samples_per_s": _round(scaling.samples_per_s),
        "efficiency": _round(scaling.efficiency),
        "sent_bytes": scaling.sent_bytes,
        "bus_gb_per_s": _round(scaling.bus_gb_per_s),
        "mfu": _round(scaling.mfu),
        "noise_scale": _round(noted.get("noise_scale")),
        "last": last,
        "verdict": verdict,
        "workers": [_worker_line(each, began_ns) for each in step.workers],
    }


def _worker_line(worker: WorkerStep, began_ns: int) -> dict[str, Any]:
    return {
        "rank": worker.rank,
        "begin_us": (worker.begin - began_ns) / 1e3,
        "wall_ms": worker.wall / 1e6,
        "hidden_ms": _ms(worker.hidden),
        "shares_ms": {name: ns / 1e6 for name, ns in worker.shares.items()},
    }


def _trace_of(worker: WorkerStep, began_ns: int) -> dict[str, Any]:
    base = worker.begin - began_ns

    def us(ns: int) -> float:
        return (base + ns) / 1e3

    return {
        "rank": worker.rank,
        "spans": [[span.name, us(span.begin), us(span.end)] for span in worker.spans],
        "buckets": [
            {
                "place": bucket.place,
                "num_bytes": bucket.num_bytes,
                "ready_us": us(bucket.ready),
                "launched_us": us(bucket.launched),
                "reduced_us": us(bucket.reduced),
            }
            for bucket in worker.buckets
        ],
    }


def _put_aside(folder: Path) -> None:
    """Move what an earlier run left into a folder of its own."""
    if not (folder / "steps.jsonl").exists():
        return
    number = 1
    while (aside := folder / "earlier" / str(number)).exists():
        number += 1
    aside.mkdir(parents=True)
    for name in _FILES:
        if (folder / name).exists():
            (folder / name).rename(aside / name)


def _ms(ns: float) -> float:
    return round(ns / 1e6, 4)


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
