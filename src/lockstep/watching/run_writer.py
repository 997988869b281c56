"""Writes the run folder: run.json, steps.jsonl, trace.jsonl; `run_folder` reads it. On worker 0 alone.

A folder that holds an earlier run keeps it, under `earlier/`. Lines are flushed as they are written, so that a run that
is killed loses none but the last; run.json appears whole, and anew when something in it has changed.
"""

import contextlib
import datetime
import json
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

import lockstep
from lockstep.replica.bucket import Bucket
from lockstep.replica.data_parallel import DataParallel
from lockstep.watching.efficiency import StepSpeed
from lockstep.watching.step_record import CombinedStep, WorkerStep
from lockstep.watching.stragglers import LateWorker

_FILES = ("run.json", "steps.jsonl", "trace.jsonl", "report.html", "trace.json", "hangs")


class RunWriter:
    """The files of one run. `see_step` is the training thread's, the rest the background thread's."""

    def __init__(self, folder: Path, model: DataParallel, began_ns: int) -> None:
        self._folder = folder
        self._began = began_ns
        self._reducer = weakref.ref(model._engine.reducer) if model._engine.reducer is not None else lambda: None
        self._facts = _facts(model)
        self._last_bucket: weakref.ref[Bucket] | None = None
        """Tells buckets that were laid out anew from those that run.json lists."""
        self._written: dict[str, Any] = {}
        """What run.json says."""
        self._last_late = -10
        """The last step whose detail was written because of a straggler."""
        self.see_step()
        folder.mkdir(parents=True, exist_ok=True)
        _put_aside(folder)
        self._steps: IO[str] = (folder / "steps.jsonl").open("w")
        self._trace: IO[str] = (folder / "trace.jsonl").open("w")

    def see_step(self) -> None:
        """Look whether buckets have been laid out anew; costs a comparison."""
        reducer = self._reducer()
        if reducer is None or (self._last_bucket is not None and reducer.buckets[-1] is self._last_bucket()):
            return
        self._last_bucket = weakref.ref(reducer.buckets[-1])
        buckets = []
        for bucket in reducer.buckets:
            num_bytes, params = reducer.describe_bucket(bucket.place)
            buckets.append({"place": bucket.place, "num_bytes": num_bytes, "params": list(params)})
        self._facts = {**self._facts, "buckets": buckets}

    def write_run(self, single_ns: float | None, *, is_last: bool = False) -> None:
        """run.json, if buckets have changed or T_1 is known for the first time; at last, as it is."""
        single_ms = self._written.get("single_ms")
        if single_ns is not None and (single_ms is None or is_last):
            single_ms = round(single_ns / 1e6, 3)
        facts = {**self._facts, "single_ms": single_ms}
        if facts != self._written:
            self._written = facts
            whole = self._folder / "run.json.part"
            with self._naming_the_folder():
                whole.write_text(json.dumps(facts, indent=1) + "\n")
                whole.replace(self._folder / "run.json")

    def write_step(self, line: dict[str, Any], step: CombinedStep, *, has_straggler: bool) -> None:
        """A line of steps.jsonl; of trace.jsonl for the first 20 steps, every 50th, and one of ten with a straggler."""
        with self._naming_the_folder():
            self._steps.write(json.dumps(line) + "\n")
        if step.step > 20 and step.step % 50 and not (has_straggler and step.step - self._last_late >= 10):
            return
        if has_straggler:
            self._last_late = step.step
        detail = {"step": step.step, "workers": [_trace_of(each, self._began) for each in step.workers]}
        with self._naming_the_folder():
            self._trace.write(json.dumps(detail) + "\n")

    def flush(self) -> None:
        """Let others see what was written."""
        with self._naming_the_folder():
            self._steps.flush()
            self._trace.flush()

    @contextlib.contextmanager
    def _naming_the_folder(self) -> Iterator[None]:
        """What cannot be written is said with its place: what a write to an open file raises has none."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._folder)) from error

    def close(self, single_ns: float | None) -> None:
        """The end of the run."""
        self.write_run(single_ns, is_last=True)
        self._steps.close()
        self._trace.close()


def step_line(
    step: CombinedStep, speed: StepSpeed, late: LateWorker | None, noted: dict[str, Any], verdict: str, began_ns: int
) -> dict[str, Any]:
    """The line of steps.jsonl. `noted`: time, loss, grad_norm, lr and noise_scale, each a number or None."""
    last = late and {"worker": late.worker, "late_ms": _ms(late.late_ns), "cause": late.cause}
    rounded = {name: _round(getattr(speed, name)) for name in ("samples_per_s", "efficiency", "bus_gb_per_s", "mfu")}
    return {
        "step": step.step,
        "wall_ms": _ms(step.wall),
        **noted,
        "batch": speed.batch,
        "sent_bytes": speed.sent_bytes,
        **rounded,
        "last": last,
        "verdict": verdict,
        "workers": [
            {
                "rank": worker.rank,
                "begin_us": (worker.begin - began_ns) / 1e3,
                "wall_ms": worker.record.wall / 1e6,
                "hidden_ms": _ms(worker.hidden),
                "shares_ms": {name: ns / 1e6 for name, ns in worker.shares.items()},
            }
            for worker in step.workers
        ],
    }


def _trace_of(worker: WorkerStep, began_ns: int) -> dict[str, Any]:
    base = worker.begin - began_ns

    def us(ns: float) -> float:
        return (base + ns) / 1e3

    return {
        "rank": worker.rank,
        "spans": [[span.name, us(span.begin), us(span.end)] for span in worker.spans],
        "buckets": [
            {
                "place": flight.place,
                "num_bytes": flight.num_bytes,
                "ready_us": us(flight.ready),
                "launched_us": us(flight.launched),
                "reduced_us": us(flight.reduced),
            }
            for flight in worker.record.flights
        ],
    }


def _facts(model: DataParallel) -> dict[str, Any]:
    """What of run.json does not change."""
    world, params = model.world, list(model.module.parameters())
    device = world.device
    return {
        "version": 1,
        "lockstep": lockstep.__version__,
        "torch": torch.__version__,
        "started": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "script": Path(sys.argv[0]).name if sys.argv and sys.argv[0] else "",
        "size": world.size,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "backend": world.backend,
        "hosts": [peer.host.partition("/")[0] for peer in world.peers.all],
        "num_params": sum(param.numel() for param in params),
        "grad_bytes": sum(param.numel() * param.element_size() for param in params if param.requires_grad),
        "buckets": [],
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
