"""Published runs: what was measured elsewhere, and how far predictions of it are off.

Phases: read a table; turn each row into a workload and a machine; find by how much slower the row's computing was than
physics says (its residual); predict others by physics and what residuals of their like have in common.

Residuals are a Gaussian process over what rows share: the device, the source, both, the model. A row that shares
nothing with any gets physics alone; one that differs in the number of devices only gets the residual of the others, and
physics says what more devices change. A row is never predicted from itself.
"""

import csv
import functools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.plan import machine as machines
from lockstep.plan import models, simulation, timing
from lockstep.plan.machine import Machine
from lockstep.plan.timing import Choices, Constants
from lockstep.plan.workload import Checkpointing, Workload

PUBLISHED = Path(__file__).parent / "data" / "published.csv"


@dataclass(frozen=True, slots=True)
class Run:
    """One row: a run that somebody has measured, or that is to be predicted."""

    id: str
    source: str
    model: str
    params: float | None
    layers: int | None
    hidden: int | None
    seq_len: int | None
    precision: str
    zero: int
    checkpointing: Checkpointing
    micro_batch: int | None
    accumulation: int | None
    global_batch: int | None
    device: str | None
    """A name of the table of devices; None for one that is not in it."""
    device_text: str
    gpus: int
    per_host: int | None
    gbit: float | None
    """Of a host's network; None where it is not said."""
    unit: str
    measured: float | None
    remarks: tuple[str, ...] = ()
    """What was missing or odd, and what is assumed."""

    @property
    def is_multi_host(self) -> bool:
        """Whether it ran on several hosts."""
        return self.gpus > (self.per_host or self.gpus)


# Reading

_COLUMNS = {
    "id": ("id", "row", "name"),
    "source": ("source", "series"),
    "model": ("model", "network", "architecture"),
    "params": ("params", "parameters", "num_params"),
    "layers": ("layers", "num_layers"),
    "hidden": ("hidden", "hidden_size", "width", "d_model"),
    "seq_len": ("seq_len", "seq", "sequence_length", "max_seq_len"),
    "precision": ("precision", "dtype"),
    "strategy": ("strategy", "zero", "parallelism"),
    "activation_checkpointing": ("activation_checkpointing", "checkpointing", "recompute"),
    "micro_batch": ("micro_batch", "micro_batch_size", "batch_per_gpu", "mbs"),
    "grad_accum": ("grad_accum", "accumulation", "gradient_accumulation"),
    "global_batch": ("global_batch", "global_batch_size", "gbs", "batch"),
    "gpu": ("gpu", "device", "accelerator", "gpu_type"),
    "gpus": ("gpus", "workers", "num_gpus", "devices", "n_gpus"),
    "gpus_per_host": ("gpus_per_host", "per_host", "gpus_per_node"),
    "network": ("network", "interconnect"),
    "unit": ("unit", "units"),
    "measured": ("throughput_per_gpu", "measured", "throughput", "value"),
}
_MOST = {"params": 1e15, "layers": 5000, "hidden": 1e6, "seq_len": 1e8, "gpus": 1 << 20, "gpus_per_host": 1 << 20}
"""What more than that cannot be meant, and would take for ever."""
_COUNTED = {"k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def read_table(path: Path) -> list[Run]:
    """The runs of a table; what a row lacks is said in its remarks. Columns may be missing, and more may be there."""
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            rows = list(csv.DictReader(file, restkey="more", restval=""))
    except (OSError, csv.Error) as error:
        raise UsageError(
            f"'{path}' cannot be read ({error}): give a CSV table of the form that docs/plan.md shows."
        ) from error
    if rows and not {name.strip().lower() for name in rows[0] if name} & {
        alias for name in ("model", "params", "gpus", "measured") for alias in _COLUMNS[name]
    }:
        raise UsageError(
            f"'{path}' has none of the columns model, params, gpus, throughput_per_gpu, so nothing can be predicted "
            "from it. docs/plan.md shows the form of such a table."
        )
    return [_run(row, number) for number, row in enumerate(rows, 1)]


def _run(row: Mapping[str | None, str | list[str] | None], number: int) -> Run:
    plain = {
        key.strip().lower(): value.strip()
        for key, value in row.items()
        if isinstance(key, str) and isinstance(value, str)
    }
    remarks: list[str] = []

    def text(name: str) -> str:
        return next((plain[alias] for alias in _COLUMNS[name] if plain.get(alias)), "")

    def count(name: str) -> float | None:
        return _counted(text(name), name, remarks)

    def whole(name: str) -> int | None:
        value = count(name)
        return max(1, round(value)) if value is not None else None

    gpus = whole("gpus")
    if gpus is None:
        gpus = 1
        remarks.append("the number of devices is missing: 1 is assumed")
    per_host = whole("gpus_per_host")
    device = machines.device_key(text("gpu"))
    if device is None:
        remarks.append(f"the device {text('gpu')!r} is not in the table: that of the nearest measured runs is assumed")
    return Run(
        id=text("id") or str(number),
        source=text("source"),
        model=text("model"),
        params=count("params"),
        layers=whole("layers"),
        hidden=whole("hidden"),
        seq_len=whole("seq_len"),
        precision=_precision(text("precision"), remarks),
        zero=_zero(text("strategy"), remarks),
        checkpointing=_checkpointing(text("activation_checkpointing")),
        micro_batch=whole("micro_batch"),
        accumulation=whole("grad_accum"),
        global_batch=whole("global_batch"),
        device=device,
        device_text=text("gpu"),
        gpus=gpus,
        per_host=per_host,
        gbit=_gbit(text("network"), per_host or 8),
        unit=text("unit") or "samples/s/gpu",
        measured=count("measured"),
        remarks=tuple(remarks),
    )


def _counted(text: str, name: str, remarks: list[str]) -> float | None:
    """7.5B, 1,342,000,000 or 8; None where nothing, or nothing sensible, is there."""
    plain = text.replace(",", "").replace("_", "").strip().lower()
    if plain in ("", "-", "n/a", "na", "none", "not stated", "nan", "?"):
        return None
    found = re.fullmatch(r"([0-9.]+(?:e[+-]?\d+)?)\s*([kmbgt]?)", plain)
    try:
        value = float(found[1]) * _COUNTED.get(found[2], 1.0) if found else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value <= _MOST.get(name, math.inf) or value == math.inf:
        remarks.append(f"{name} is {text[:40]!r}, which cannot be: it is left out")
        return None
    return value


def _precision(text: str, remarks: list[str]) -> str:
    plain = text.lower()
    if not plain:
        remarks.append("the precision is missing: bf16 is assumed")
        return "bf16"
    for word, precision in (
        ("fp8", "fp8"), ("float8", "fp8"), ("amp", "amp"), ("mixed", "amp"), ("bf16", "bf16"), ("bfloat16", "bf16"),
        ("fp16", "fp16"), ("float16", "fp16"), ("half", "fp16"), ("tf32", "tf32"), ("fp32", "fp32"),
        ("float32", "fp32"), ("single", "fp32"),
    ):  # fmt: skip
        if word in plain:
            return precision
    remarks.append(f"the precision {text!r} is not known: bf16 is assumed")
    return "bf16"


def _zero(text: str, remarks: list[str]) -> int:
    plain = text.lower()
    found = re.search(r"(?:zero|stage|^)\s*[-_=:]?\s*([0-3])", plain)
    if found:
        zero = int(found[1])
    elif re.search(r"fsdp|hsdp|fully.?sharded", plain):
        zero = 3
    else:
        zero = 0
        if plain and not re.search(r"ddp|data|dp|horovod|all.?reduce", plain):
            remarks.append(f"the strategy {text!r} is not known: plain data parallelism is assumed")
    if re.search(r"\b(tp|pp|cp|ep)\s*[-_=:]?\s*([2-9]|\d\d)", plain):
        remarks.append(f"the strategy {text!r} has model parallelism, whose messages are not in the model")
    return zero


def _checkpointing(text: str) -> Checkpointing:
    plain = text.lower()
    if "sel" in plain or "partial" in plain:
        return "selective"
    return "full" if plain in ("yes", "true", "1", "full", "on", "all") else "none"


def _gbit(text: str, per_host: int) -> float | None:
    """A host's rate: "8x200 Gb/s IB", "400 Gb/s a GPU", "1600 Gb/s a host", "25 GbE", "50 GB/s"."""
    found = re.search(r"(?:(\d+)\s*[x*\u00d7]\s*)?([\d.]+)\s*(gb/?s?|gbit|gbe|gbps|g\b|tb)", text, re.IGNORECASE)
    if not found:
        return None
    rate = float(found[2]) * (float(found[1]) if found[1] else 1.0)
    if found[3].lower().startswith("tb"):
        rate *= 1000
    if re.match(r"GB(/s|ps)", found[3] + text[found.end(3) :]):
        rate *= 8
    is_per_device = re.search(r"(?:a|per|/)\s*gpu|each gpu", text[found.end() :], re.IGNORECASE)
    return (rate * per_host if is_per_device and not found[1] else rate) or None


# From a row to what can be simulated


def machine_of(run: Run, fallback: str = "a100-80") -> Machine:
    """What the run ran on."""
    key = run.device or fallback
    return machines.assembled(key, run.gpus, run.per_host or min(run.gpus, _usual_per_host(key)), run.gbit)


def _usual_per_host(key: str) -> int:
    return machines.named(key).per_host


@functools.lru_cache(maxsize=512)
def workload_of(run: Run) -> Workload:
    """What the run trained, as far as its row says. UsageError where neither model nor size is known."""
    precision = run.precision
    micro, accumulation = _batches(run)
    try:
        if run.params is not None and run.layers is not None and run.hidden is not None:
            work = _sized(run, run.params)
        else:
            work = models.named(run.model, seq=run.seq_len, precision=precision)
    except UsageError:
        if run.params is None:
            raise
        work = (
            _scaled_convolutions(run, run.params)
            if re.search("ima?ge?s?", run.unit.lower())
            else _sized(run, run.params)
        )
    if precision in ("bf16", "fp16") and run.zero < 3:
        # Frameworks that keep half-precision parameters whole add their gradients up, and send them, in fp32.
        work = replace(work, grad_bytes=4)
    units = work.units_per_sample if "tok" in run.unit.lower() else 1
    return replace(
        work,
        units_per_sample=units,
        micro_batch=micro,
        accumulation=accumulation,
        batch=micro * accumulation * run.gpus,
        zero=run.zero,
        checkpointing=run.checkpointing,
    )


_USUAL_MICRO_BATCH = 8


def _batches(run: Run) -> tuple[int, int]:
    """Micro-batch and accumulation, of which a row may have one, both, or what they make together."""
    each = run.global_batch / run.gpus if run.global_batch else None
    if run.micro_batch:
        accumulation = run.accumulation or (max(1, round(each / run.micro_batch)) if each else 1)
        return run.micro_batch, accumulation
    if each:
        accumulation = run.accumulation or 1
        return max(1, round(each / accumulation)), accumulation
    return _USUAL_MICRO_BATCH, run.accumulation or 1


def _sized(run: Run, params: float) -> Workload:
    return models.sized(
        int(params),
        layers=run.layers,
        hidden=run.hidden,
        seq=run.seq_len,
        name=run.model,
        precision=run.precision,
    )


def _scaled_convolutions(run: Run, params: float) -> Workload:
    """A network of pictures that is in no catalogue: as ResNet-50, with its own number of parameters."""
    like = models.named("resnet50", precision=run.precision)
    share = params / like.num_params
    # Operations grow more slowly than parameters, over the networks in use: about as their root.
    layers = tuple(
        replace(
            layer,
            tensors=tuple(max(1, round(numel * share)) for numel in layer.tensors),
            forward_flops=layer.forward_flops * share**0.5,
            winograd_flops=layer.winograd_flops * share**0.5,
        )
        for layer in like.layers
    )
    return replace(like, name=run.model or "convolutions", layers=layers)


def choices_of(run: Run, slowdown: float = 1.0) -> Choices:
    """FSDP and its like send gradients after every micro-batch; others once a step."""
    return Choices(algorithm=simulation.FASTEST, reduces_each=run.zero == 3, slowdown=slowdown)


# Calibration


@dataclass(frozen=True, slots=True)
class Kernel:
    """How far residuals (logarithms) of two runs go together, as standard deviations of what they share."""

    all: float = 0.15
    device: float = 0.10
    """And the kind of arithmetic: tensor cores or not."""
    source: float = 0.15
    source_device: float = 0.08
    neighbour: float = 0.08
    """Of models of one source on one device that are of about one size."""
    size: float = 1.0
    """Logarithm of the ratio of parameters over which they are neighbours."""
    model: float = 0.08
    """Of one and the same model, with the same length of sequences and checkpointing."""
    settings: float = 0.03
    """Of runs that are alike but for the number of devices."""
    noise: float = 0.02

    def __call__(self, a: Run, b: Run) -> float:
        """The covariance of two different runs."""
        total = self.all**2
        same_source = a.source == b.source
        same_device = (a.device or a.device_text) == (b.device or b.device_text)
        if same_device and _arithmetic(a) == _arithmetic(b):
            total += self.device**2
        if same_source:
            total += self.source**2
        if same_source and same_device and a.precision == b.precision:
            total += self.source_device**2
            total += self.neighbour**2 * math.exp(-0.5 * (_size_distance(a, b) / self.size) ** 2)
            if a.model == b.model and a.checkpointing == b.checkpointing and a.seq_len == b.seq_len:
                total += self.model**2
                ratio = math.log((a.micro_batch or 1) / (b.micro_batch or 1))
                total += self.settings**2 * math.exp(-0.5 * ratio**2)
        return total

    @property
    def variance(self) -> float:
        """Of one run's residual, without noise."""
        shared = (self.all, self.device, self.source, self.source_device, self.neighbour, self.model, self.settings)
        return sum(each**2 for each in shared)


def _arithmetic(run: Run) -> str:
    return "plain" if run.precision == "fp32" else "tensor"


def _size_distance(a: Run, b: Run) -> float:
    if a.model == b.model:
        return 0.0
    return math.log(a.params / b.params) if a.params and b.params else 2.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted of one run."""

    run: Run
    value: float | None
    """In the row's unit; None where nothing can be said."""
    deviation: float
    """Relative standard deviation of it, as the process has it."""
    remarks: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """Relative, against what was measured."""
        if self.value is None or not self.run.measured:
            return None
        return self.value / self.run.measured - 1.0


_MOST_ALIKE = 100
"""Runs that a prediction leans on: what it takes grows with their third power."""


class Calibration:
    """What some measured runs say about others."""

    def __init__(
        self, runs: Iterable[Run] = (), constants: Constants | None = None, kernel: Kernel | None = None
    ) -> None:
        self.constants = constants or Constants()
        self._kernel = kernel or Kernel()
        self.runs: list[Run] = []
        self._residuals: list[float] = []
        self.remarks: list[str] = []
        """Rows that say nothing, and why."""
        for run in runs:
            residual = self._residual(run)
            if residual is not None:
                self.add(run, residual)

    def add(self, run: Run, residual: float) -> None:
        """Take a run into account whose residual is known."""
        self.runs.append(run)
        self._residuals.append(residual)

    def residuals(self) -> Iterator[tuple[Run, float]]:
        """The logarithm of how much slower than physics each run computed."""
        return zip(self.runs, self._residuals, strict=True)

    def without(self, drops: Callable[[Run], bool]) -> "Calibration":
        """The same of fewer runs; their residuals are not computed again."""
        less = Calibration((), self.constants, self._kernel)
        for run, residual in self.residuals():
            if not drops(run):
                less.add(run, residual)
        return less

    def predict(self, run: Run) -> Prediction:
        """The run's figure, from the others."""
        known = self.without(lambda other: _is_same(run, other))
        remarks = list(run.remarks)
        mean, deviation = known.slowdown(run)
        try:
            value: float | None = figure(run, self.constants, math.exp(mean), self._fallback_device(run))
        except UsageError as error:
            remarks.append(f"{error} Predicted is the median of the known runs in this unit")
            alike = [other.measured for other in known.runs if other.unit == run.unit and other.measured]
            value = statistics.median(alike) if alike else None
        return Prediction(run, value, deviation, tuple(remarks))

    def slowdown(self, run: Run) -> tuple[float, float]:
        """Mean and deviation of the logarithm of how much slower than physics the run computes."""
        kernel = self._kernel
        if not self.runs:
            return 0.0, math.sqrt(kernel.variance + kernel.noise**2)
        alike = sorted(self.residuals(), key=lambda known: -kernel(run, known[0]))[:_MOST_ALIKE]
        runs = [other for other, _ in alike]
        covariances = [[kernel(a, b) for b in runs] for a in runs]
        for place in range(len(runs)):
            covariances[place][place] = kernel.variance + kernel.noise**2
        towards = [kernel(run, other) for other in runs]
        lower = _cholesky(covariances)
        mean = _dot(towards, _solve(lower, [residual for _, residual in alike]))
        explained = _dot(towards, _solve(lower, towards))
        return mean, math.sqrt(max(kernel.variance - explained, 0.0) + kernel.noise**2)

    def _residual(self, run: Run) -> float | None:
        if not run.measured or _kind_of_unit(run.unit) == "efficiency" or run.device is None:
            return None
        try:
            return _slowdown_of(run, self.constants)
        except UsageError as error:
            self.remarks.append(f"{run.id}: {error}")
            return None

    def _fallback_device(self, run: Run) -> str:
        sizes = [
            (abs(math.log((other.params or 1e9) / (run.params or 1e9))), other.device)
            for other in self.runs
            if other.device
        ]
        return min(sizes)[1] if sizes else "a100-80"


def _is_same(a: Run, b: Run) -> bool:
    """Whether two rows are the same measurement, whatever their remarks."""
    return replace(a, remarks=()) == replace(b, remarks=())


def figure(run: Run, constants: Constants, slowdown: float = 1.0, fallback: str = "a100-80") -> float:
    """What is predicted in the row's unit."""
    work, machine = workload_of(run), machine_of(run, fallback)
    found = timing.speed(work, machine, choices_of(run, slowdown), constants)
    kind, unit = _kind_of_unit(run.unit), run.unit.lower()
    if kind == "efficiency":
        alone = timing.speed(replace(work, batch=1), machine.of(1), choices_of(run, slowdown), constants)
        share = found.units_per_s_per_worker / alone.units_per_s_per_worker
        return share * 100 if "%" in unit or "percent" in unit else share
    if kind == "flops":
        scale = 1e15 if "pflop" in unit else 1e12 if "tflop" in unit else 1.0
        value = found.mfu * machine.device.peak(work.precision) / scale
    elif kind == "mfu":
        return found.mfu * (100 if "%" in unit else 1)
    elif kind == "time":
        return found.times.step_s * (1e3 if re.search(r"\bms\b|milli", unit) else 1.0)
    elif kind == "steps":
        return 1.0 / found.times.step_s
    else:
        value = found.units_per_s_per_worker / (1e3 if re.match(r"k\s?(tok|im|sam|seq)", unit) else 1.0)
    is_total = not re.search(r"/\s*(gpu|device|worker|chip|accelerator)|per gpu", unit)
    return value * (run.gpus if is_total else 1)


def _kind_of_unit(unit: str) -> str:
    plain = unit.lower()
    if "mfu" in plain:
        return "mfu"
    if "efficien" in plain or "%" in plain:
        return "efficiency"
    if "flop" in plain:
        return "flops"
    if re.match(r"(ms|s|sec|seconds)(/|\s+per\s+|\s+a\s+|$)", plain) or "time" in plain:
        return "time"
    if re.match(r"(steps?|it|iterations?|iters?|updates?)\s*/", plain):
        return "steps"
    return "throughput"


def _slowdown_of(run: Run, constants: Constants) -> float:
    """The logarithm of the slowdown of computing with which physics gives what was measured."""
    assert run.measured
    is_time = _kind_of_unit(run.unit) == "time"
    guess = 0.0
    for _ in range(4):
        value = figure(run, constants, math.exp(guess))
        # Steps are nearly proportional to their computing, so this is nearly Newton's way.
        guess += math.log(run.measured / value) if is_time else math.log(value / run.measured)
        guess = min(max(guess, -3.0), 3.0)
    return guess


def _cholesky(matrix: Sequence[Sequence[float]]) -> list[list[float]]:
    lower = [[0.0] * len(matrix) for _ in matrix]
    for row in range(len(matrix)):
        for column in range(row + 1):
            left = matrix[row][column] - _dot(lower[row][:column], lower[column][:column])
            lower[row][column] = math.sqrt(max(left, 1e-12)) if row == column else left / lower[column][column]
    return lower


def _solve(lower: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """x with lower * lower' * x = right."""
    size = len(right)
    forward = [0.0] * size
    for row in range(size):
        forward[row] = (right[row] - _dot(lower[row][:row], forward[:row])) / lower[row][row]
    solved = [0.0] * size
    for row in range(size - 1, -1, -1):
        above = sum(lower[below][row] * solved[below] for below in range(row + 1, size))
        solved[row] = (forward[row] - above) / lower[row][row]
    return solved


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


# How far predictions are off


def constant_efficiency(runs: Sequence[Run], run: Run) -> float | None:
    """The baseline: the row's operations at the median share of the peak of the known runs, of its device if any."""
    alike = [other for other in runs if other.measured and other.device == run.device] or [
        other for other in runs if other.measured and other.device
    ]
    shares = [share for other in alike if (share := _share_of_peak(other)) is not None]
    one = _share_of_peak(replace(run, measured=1.0))
    return statistics.median(shares) / one if shares and one else None


def _share_of_peak(run: Run) -> float | None:
    try:
        work, machine = workload_of(run), machine_of(run)
    except UsageError:
        return None
    if _kind_of_unit(run.unit) != "throughput" or not run.measured:
        return None
    return run.measured / work.units_per_sample * work.step_flops / machine.device.peak(work.precision)


def one_host_figure(runs: Sequence[Run], run: Run) -> float | None:
    """A stricter baseline: what each device did on one host, of the same source, device and model."""
    alike = [
        other
        for other in runs
        if other.measured and not other.is_multi_host
        and other.source == run.source and other.device == run.device
        and other.model == run.model and other.precision == run.precision
    ]  # fmt: skip
    if not alike:
        return None
    nearest = min(alike, key=lambda other: (-other.gpus, abs((other.micro_batch or 0) - (run.micro_batch or 0))))
    return nearest.measured


@dataclass(frozen=True, slots=True)
class Errors:
    """How far a set of predictions was off, relative, as medians."""

    what: str
    count: int
    median: float
    worst: float
    baseline: float
    """Of the constant-efficiency baseline on the same rows."""
    one_host: float | None = None
    """The median error where each device is taken to do what it did on one host, on rows of which that is known."""
    series: Mapping[str, float] = field(default_factory=dict)
    """The median by source, where sources were left out in turn."""
    rows: Mapping[str, float] = field(default_factory=dict)
    """The error of each row, by its id; above 0 where too much was predicted."""


_Predicted = tuple[Run, float | None, float | None]
"""A run, what was predicted of it, and what the baseline says."""


def _errors(what: str, pairs: Sequence[_Predicted], series: Mapping[str, float] | None = None) -> Errors:
    offs = [abs(value / run.measured - 1) for run, value, _ in pairs if value and run.measured]
    base = [abs(value / run.measured - 1) for run, _, value in pairs if value and run.measured]
    return Errors(
        what,
        len(offs),
        statistics.median(offs) if offs else math.nan,
        max(offs, default=math.nan),
        statistics.median(base) if base else math.nan,
        series=series or {},
        rows={run.id: round(value / run.measured - 1, 4) for run, value, _ in pairs if value and run.measured},
    )


def _is_multi_host(run: Run) -> bool:
    return run.is_multi_host


def _is_of(source: str) -> Callable[[Run], bool]:
    return lambda run: run.source == source


def multi_host_errors(runs: Sequence[Run], calibration: Calibration) -> Errors:
    """Calibrated on the single-host rows, the others predicted."""
    single = calibration.without(_is_multi_host)
    pairs: list[_Predicted] = [
        (run, single.predict(run).value, constant_efficiency(single.runs, run)) for run in runs if run.is_multi_host
    ]
    same = [(run, one_host_figure(single.runs, run), None) for run in runs if run.is_multi_host]
    errors = _errors("several hosts, from rows of one host", pairs)
    return replace(errors, one_host=_errors("", same).median)


def left_out_errors(runs: Sequence[Run], calibration: Calibration) -> Errors:
    """Each source predicted from the others."""
    pairs: list[_Predicted] = []
    series: dict[str, float] = {}
    for source in dict.fromkeys(run.source for run in runs):
        others = calibration.without(_is_of(source))
        own: list[_Predicted] = [
            (run, others.predict(run).value, constant_efficiency(others.runs, run))
            for run in runs
            if run.source == source
        ]
        series[source] = _errors(source, own).median
        pairs += own
    return _errors("a series that is left out, from the others", pairs, series=series)


def summarised(predictions: Sequence[Prediction], calibration: Calibration) -> Errors:
    """How far predictions were off, of runs that were measured."""
    pairs: list[_Predicted] = []
    for each in predictions:
        others = [run for run in calibration.runs if not _is_same(run, each.run)]
        pairs.append((each.run, each.value, constant_efficiency(others, each.run)))
    return _errors("predicted", pairs)


# What comes with the package

_CALIBRATION = PUBLISHED.parent / "calibration.json"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """The published table, with what was computed from it beforehand."""

    calibration: Calibration
    multi_host: Errors
    left_out: Errors


def built_in() -> BuiltIn:
    """What plans stand on where no table is given: read, not computed, since a plan is to take a moment."""
    runs = {run.id: run for run in read_table(PUBLISHED)}
    kept = json.loads(_CALIBRATION.read_text())
    calibration = Calibration()
    for name, residual in kept["residuals"].items():
        calibration.add(runs[name], residual)
    return BuiltIn(calibration, Errors(**kept["multi_host"]), Errors(**kept["left_out"]))


def computed() -> dict[str, Any]:
    """What `calibration.json` is to hold; it is written by `python -m lockstep.plan.published`."""
    runs = read_table(PUBLISHED)
    calibration = Calibration(runs)
    return {
        "residuals": {run.id: round(residual, 6) for run, residual in calibration.residuals()},
        "multi_host": asdict(multi_host_errors(runs, calibration)),
        "left_out": asdict(left_out_errors(runs, calibration)),
    }


if __name__ == "__main__":
    _CALIBRATION.write_text(json.dumps(computed(), indent=1) + "\n")
