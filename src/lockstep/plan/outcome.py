"""`lockstep.plan(...)`: a workload and a machine in, all that is predicted of them out."""

import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.errors import UsageError
from lockstep.plan import machine as machines
from lockstep.plan import models, published, timing
from lockstep.plan.advice import Advice, Way, advise, ways
from lockstep.plan.machine import Machine
from lockstep.plan.memory import Memory
from lockstep.plan.published import Errors, Run
from lockstep.plan.timing import WIRE_FACTORS, Choices, Effort, Speed
from lockstep.plan.workload import PRECISIONS, Checkpointing, Workload

USUAL_BATCH_PER_WORKER = {"tokens": 500_000, "images": 64, "samples": 64}
"""Of all workers together for tokens, of each for the others: what is assumed where no batch is said."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured point over the predicted curve."""

    workers: int
    efficiency: float
    label: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What is predicted; durations in seconds, sizes in bytes."""

    workload: Workload
    """As it is planned: with its micro-batch, accumulation, split and checkpointing."""
    machine: Machine
    choices: Choices
    memory: Memory
    """Of one worker."""
    speed: Speed
    deviation: float
    """Relative standard deviation of the predicted speed, by what runs of the like have in common."""
    ways: tuple[Way, ...]
    """All that were looked at, the best first."""
    strong: tuple[Speed, ...]
    """The same batch on 1 to 16,384 workers, as far as there is a sample for each."""
    weak: tuple[Speed, ...]
    """The same work for each of 1 to 16,384 workers."""
    effort: Effort | None
    """Time, energy and price of a whole training; None where no target was given."""
    advice: tuple[Advice, ...]
    multi_host: Errors
    """How far published runs on several hosts were off, predicted from those on one."""
    left_out: Errors
    """How far published series were off, each predicted from the others."""
    noise_scale: float | None
    """Of a run that was given, in samples."""
    points: tuple[Point, ...]
    """Measured efficiencies: of the run that was given, and published ones of the same model."""
    remarks: tuple[str, ...]
    """What is assumed, a sentence each."""

    @property
    def shown_ways(self) -> list[Way]:
        """The best for each split, with each kind of checkpointing."""
        found: dict[tuple[int, str], Way] = {}
        for way in self.ways:
            found.setdefault((way.workload.zero, way.workload.checkpointing), way)
        return sorted(found.values(), key=lambda way: (way.workload.zero, way.workload.checkpointing != "none"))

    def to_json(self) -> dict[str, Any]:
        """All of it but the events, as plain values."""
        work, machine = self.workload, self.machine
        return {
            "workload": {
                "name": work.name, "params": work.num_params, "precision": work.precision, "batch": work.batch,
                "micro_batch": work.micro_batch, "accumulation": work.accumulation, "zero": work.zero,
                "checkpointing": work.checkpointing, "unit": work.unit, "optimizer": work.optimizer,
            },
            "machine": {
                "name": machine.name, "device": machine.device.name, "workers": machine.workers,
                "per_host": machine.per_host, "hosts": machine.hosts,
            },
            "memory": dict(self.memory.components()) | {
                "total": self.memory.total, "capacity": self.memory.capacity, "fits": self.memory.fits,
            },
            "speed": _speed(self.speed),
            "deviation": self.deviation,
            "ways": [
                {
                    "zero": way.workload.zero, "checkpointing": way.workload.checkpointing,
                    "micro_batch": way.workload.micro_batch, "total": way.memory.total, "fits": way.memory.fits,
                    "units_per_s": way.speed.units_per_s,
                }
                for way in self.ways
            ],
            "strong": [_speed(each) for each in self.strong],
            "weak": [_speed(each) for each in self.weak],
            "effort": asdict(self.effort) if self.effort is not None else None,
            "advice": [asdict(each) for each in self.advice],
            "errors": {"multi_host": asdict(self.multi_host), "left_out": asdict(self.left_out)},
            "noise_scale": self.noise_scale,
            "points": [asdict(each) for each in self.points],
            "remarks": list(self.remarks),
        }  # fmt: skip


def _speed(speed: Speed) -> dict[str, Any]:
    times = asdict(speed.times)
    del times["spans"]
    return {
        "workers": speed.workers, "micro_batch": speed.micro_batch, "accumulation": speed.accumulation,
        "batch": speed.batch, "units_per_s": speed.units_per_s, "units_per_s_per_worker": speed.units_per_s_per_worker,
        "efficiency": speed.efficiency, "mfu": speed.mfu, **times,
    }  # fmt: skip


def plan(
    model: str | Workload | None = None,
    *,
    on: str | Path | Machine | None = None,
    params: float | str | None = None,
    layers: int | None = None,
    hidden: int | None = None,
    seq: int | None = None,
    vocab: int | None = None,
    batch: int | None = None,
    micro_batch: int | None = None,
    zero: int | None = None,
    precision: str | None = None,
    optimizer: str | None = None,
    checkpointing: Checkpointing | None = None,
    wire: str = "none",
    bucket_mb: float | None = None,
    loader_s: float = 0.0,
    straggler: float = 1.0,
    units: float | str | None = None,
    mtbf_hours: float | None = None,
    elastic: bool = False,
    price: float | None = None,
    run: str | Path | None = None,
    base_batch: int | None = None,
    base_lr: float | None = None,
) -> Plan:
    """What a training needs and how fast it is, before it is run: pure arithmetic, no process, no GPU.

    model: a name of the catalogue ("gpt2-xl", "llama-8b", "resnet50"), or a Workload. Or leave it out, and say
        `params` (7.5e9 or "7.5B"), and as much of `layers`, `hidden`, `seq` and `vocab` as is known.
    on: the machine: "64xH100/8@400Gb", a TOML file, or a Machine; if not given, this one, looked at for a moment.
    batch: samples of one update, over all workers. What of `micro_batch`, `zero` and `checkpointing` is not given
        is chosen: the fastest that fits.
    wire, bucket_mb: as with DataParallel. loader_s: what the loader takes for a sample. straggler: how many times as
        long as the others a slow worker takes.
    units: tokens or samples of the whole training, for its time, energy and price (`price`: of a device for an hour).
        mtbf_hours: of one worker, between faults; `elastic`: the others go on.
    run: the folder of a watched run, for its noise scale and efficiency. base_batch, base_lr: what was tuned.
    """
    remarks: list[str] = []
    machine = _machine(on, remarks)
    if price is not None:
        machine = replace(machine, price_per_hour=price)
    work = _workload(model, machine, params, layers, hidden, seq, vocab, precision, optimizer, remarks)
    _check(wire, zero, batch, micro_batch)
    if batch is None:
        batch = work.batch if isinstance(model, Workload) and work.batch > 1 else _usual_batch(work, machine)
        remarks.append(f"no batch is said: {batch:,} samples are assumed.")
    if batch < machine.workers:
        raise UsageError(
            f"a batch of {batch} samples cannot be cut for {machine.workers} workers: each needs one at least. Give a "
            f"--batch of {machine.workers} or more, or fewer workers."
        )
    work = replace(work, batch=batch)
    if isinstance(model, Workload):
        checkpointing = checkpointing or model.checkpointing  # What a script does is in what was seen of it.
    known = published.built_in()
    asked = _as_run(work, machine)
    if machine.measured is None:
        slowdown, deviation = known.calibration.slowdown(asked)
    else:
        slowdown, deviation = 0.0, 0.1
    choices = Choices(
        wire=wire, bucket_mb=bucket_mb, loader_s=loader_s, straggler=straggler, slowdown=math.exp(slowdown)
    )
    found = ways(work, machine, choices, zero=zero, micro_batch=micro_batch, checkpointing=checkpointing)
    best = found[0]
    if not best.memory.fits:
        remarks.append("it does not fit, in no way that was looked at: times are as if it did.")
    made = machine.workers * best.workload.micro_batch * best.workload.accumulation
    if made != batch:
        remarks.append(f"{batch:,} samples do not divide: a step takes as long as one of {made:,} would.")
    noise_scale, points = _recorded(run) if run is not None else (None, [])
    return Plan(
        best.workload,
        machine,
        choices,
        best.memory,
        best.speed,
        deviation,
        tuple(found),
        tuple(timing.strong_scaling(best.workload, machine, choices)),
        tuple(timing.weak_scaling(best.workload, machine, choices)),
        _effort(units, best, machine, mtbf_hours, elastic=elastic),
        tuple(advise(found, machine, choices, noise_scale=noise_scale, base_lr=base_lr, base_batch=base_batch)),
        known.multi_host,
        known.left_out,
        noise_scale,
        (*points, *_published_points(known.calibration.runs, asked)),
        (*remarks, *machine.remarks),
    )


def _check(wire: str, zero: int | None, batch: int | None, micro_batch: int | None) -> None:
    if wire not in WIRE_FACTORS:
        raise UsageError(f"wire={wire!r} is not known: give one of {', '.join(WIRE_FACTORS)}.")
    if zero not in (None, 0, 1, 2, 3):
        raise UsageError(f"zero={zero!r} is not known: give 0, 1, 2 or 3.")
    for name, value in (("batch", batch), ("micro_batch", micro_batch)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} must be at least 1.")


def _machine(on: str | Path | Machine | None, remarks: list[str]) -> Machine:
    if isinstance(on, Machine):
        return on
    if on is None:
        from lockstep.plan.measure import this_machine

        found = this_machine()
        remarks.append(f"no machine is said: {found.name}, this one, is assumed; --measure measures it.")
        return found
    if isinstance(on, Path) or str(on).endswith(".toml"):
        return machines.from_toml(Path(on))
    return machines.named(on)


def _workload(
    model: str | Workload | None,
    machine: Machine,
    params: float | str | None,
    layers: int | None,
    hidden: int | None,
    seq: int | None,
    vocab: int | None,
    precision: str | None,
    optimizer: str | None,
    remarks: list[str],
) -> Workload:
    if isinstance(model, Workload):
        return model
    if precision is None:
        precision = usual_precision(machine)
        remarks.append(f"no precision is said: {precision} is assumed, usual on {machine.device.name}.")
    elif precision not in PRECISIONS:
        raise UsageError(f"precision={precision!r} is not known: give one of {', '.join(PRECISIONS)}.")
    more: dict[str, Any] = {"precision": precision}
    if optimizer is not None:
        more["optimizer"] = optimizer
    if model is not None and params is None:
        return models.named(model, seq=seq, **more)
    if params is None and (layers is None or hidden is None):
        raise UsageError(
            "there is nothing to plan: give a model (--model gpt2-xl), a size (--params 7.5B --layers 32 --hidden 4096 "
            "--seq 2048), or a script (lockstep plan train.py)."
        )
    size = counted(params) if params is not None else None
    return models.sized(size, layers=layers, hidden=hidden, seq=seq, vocab=vocab, name=model or "", **more)


def usual_precision(machine: Machine) -> str:
    """What most train in on such a device."""
    if machine.device.kind == "cpu":
        return "fp32"
    return "bf16" if "bf16" in machine.device.flops else "amp" if machine.device.has_tensor_cores("amp") else "fp32"


def counted(text: float | str) -> float:
    """7.5B, 300M or 1e9 as a number."""
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?\d+)?)\s*([kmbt]?)", str(text).strip().lower().replace(",", ""))
    scale = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    try:
        value = float(found[1]) * scale[found[2]] if found else 0.0
    except ValueError:
        value = 0.0
    if value <= 0:
        raise UsageError(f"{text!r} is no number above 0: give one as 7.5B, 300M or 1e9.")
    return value


def _usual_batch(work: Workload, machine: Machine) -> int:
    usual = USUAL_BATCH_PER_WORKER.get(work.unit, 64)
    if work.unit == "tokens":
        return max(machine.workers, usual // work.units_per_sample // machine.workers * machine.workers)
    return usual * machine.workers


def _as_run(work: Workload, machine: Machine) -> Run:
    """The plan as a row of the published table, to find its like."""
    return Run(
        id="", source="", model=work.name, params=float(work.num_params), layers=None, hidden=None,
        seq_len=work.units_per_sample, precision=work.precision, zero=work.zero, checkpointing=work.checkpointing,
        micro_batch=work.micro_batch, accumulation=None, global_batch=work.batch, device=machine.device.name,
        device_text=machine.device.name, gpus=machine.workers, per_host=machine.per_host, gbit=None,
        unit=f"{work.unit}/s/gpu", measured=None,
    )  # fmt: skip


def _effort(
    units: float | str | None, best: Way, machine: Machine, mtbf_hours: float | None, *, elastic: bool
) -> Effort | None:
    if units is None:
        return None
    work = best.workload
    state = work.num_params * (work.param_bytes + work.optimizer_bytes + work.master_bytes)
    return timing.effort(best.speed, machine, counted(units), mtbf_hours=mtbf_hours, elastic=elastic, state_bytes=state)


def _recorded(run: str | Path) -> tuple[float | None, list[Point]]:
    """The noise scale of a watched run, and its efficiency."""
    from lockstep.watching.run_folder import RunFolder

    folder = RunFolder(Path(run))
    steps = list(folder.steps())
    last = steps[len(steps) // 2 :]
    noise = [step["noise_scale"] for step in last if step.get("noise_scale")]
    shares = [step["efficiency"] for step in last if step.get("efficiency")]
    points = [Point(folder.run.size, median(shares), f"{folder.run.script}, measured")] if shares else []
    return (median(noise) if noise else None), points


def _published_points(runs: list[Run], asked: Run) -> list[Point]:
    """Published runs of a model of this size on this device, as shares of what a device does on one host."""
    points = []
    for run in runs:
        alike = run.params and asked.params and abs(math.log(run.params / asked.params)) < 0.3
        if not (alike and run.device == asked.device and run.measured and run.is_multi_host):
            continue
        single = published.one_host_figure(runs, run)
        if single:
            points.append(Point(run.gpus, run.measured / single, f"{run.source}: {run.model} on {run.gpus}"))
    return points
