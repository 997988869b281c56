"""What `lockstep bench step` and `lockstep bench gpu` are to measure, checked before any worker starts.

A contest is one workload, a number of workers, and the variants that take turns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.bench import catalogue
from lockstep.bench.catalogue import WORKLOADS
from lockstep.errors import UsageError
from lockstep.start import host

MOST_PER_CORE = 4
"""More workers than this on a core measure the scheduler."""
MOST_PER_GPU = 8
"""Each takes a context and buffers of NCCL's."""
BYTES_PER_PARAM = 20
"""Of a variant that splits nothing, in float32: parameter, gradient, two of Adam's, and a bucket."""
PROCESS_BYTES = 200 << 20
"""Of a worker before it has made anything."""
_GPU_FILES = ("nvidiactl", "dxg", "nvhost-ctrl", "kfd")
"""In /dev, one of these is there if a driver is that torch may use as CUDA."""


@dataclass(frozen=True, slots=True)
class Contest:
    """What is to be measured in one run; made by `checked`."""

    workload: str
    variants: tuple[str, ...]
    workers: int
    device: str
    """cpu or cuda."""
    batch: int
    """Samples per worker and step."""
    steps: int
    """Timed steps of each variant."""
    warmup: int
    """Steps before those."""
    crews: int = 1
    """How often all workers are started anew, for as many steps each time."""

    @property
    def has_own_workers(self) -> bool:
        """Whether every variant has workers of its own: on CPUs."""
        return self.device == "cpu"

    @property
    def steps_before(self) -> bool:
        """Whether a variant takes a step that is not timed before each that is, so that its caches are its own."""
        return self.has_own_workers

    @property
    def is_bf16(self) -> bool:
        """Whether the forward pass runs under bfloat16 autocast: on GPUs."""
        return self.device == "cuda"


def checked(
    device: str,
    workers: int | None,
    workloads: Sequence[str],
    variants: Sequence[str] | None,
    steps: int,
    warmup: int,
    batch: int | None,
    crews: int = 1,
) -> list[Contest]:
    """A contest for each workload; raises UsageError if one cannot be held.

    workers: None for 2 on the CPU, and on GPUs for one per GPU.
    variants: None for all that there are for the device.
    batch: samples per worker and step, None for each workload's own.
    """
    size = _checked_size(device, workers)
    if steps < 1:
        raise UsageError(f"{steps} steps measure nothing: give --steps 1 or more.")
    if warmup < 0 or (batch is not None and batch < 1):
        raise UsageError(f"--warmup {warmup} and --batch {batch} must be 0, and 1, or more.")
    if crews < 1:
        raise UsageError(f"--crews {crews} must be 1 or more: how often the workers are started.")
    names = tuple(dict.fromkeys(variants or (catalogue.ON_GPU if device == "cuda" else catalogue.ON_CPU)))
    for name in names:
        if catalogue.spelled(name).backend and device == "cuda":
            raise UsageError(
                f"variant {name!r}: on GPUs there is one backend, nccl. Leave out what is behind the slash."
            )
    return [
        Contest(name, names, size, device, batch or WORKLOADS[name].batch, steps, warmup, crews)
        for name in _checked_workloads(device, workloads)
    ]


def room(contest: Contest, num_bytes: int) -> int:
    """How many variants of a contest fit into that many bytes of memory, all workers together."""
    process = PROCESS_BYTES if contest.has_own_workers else 0
    each = contest.workers * (process + BYTES_PER_PARAM * WORKLOADS[contest.workload].num_params)
    return int(0.8 * num_bytes / each)


def free_bytes() -> int:
    """The memory of this machine that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    kilobytes = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return kilobytes << 10


def _checked_size(device: str, workers: int | None) -> int:
    if device == "cuda":
        units, most, what = _num_gpus(), MOST_PER_GPU, "GPU(s)"
        size = units if workers is None else workers
    else:
        units, most, what = host.num_cores(), MOST_PER_CORE, "core(s)"
        size = 2 if workers is None else workers
    if size < 1:
        raise UsageError(f"{size} worker(s) cannot be started: give -n 1 or more.")
    if size > most * units:
        raise UsageError(
            f"{size} workers on {units} {what} would mostly wait for their turn, which says nothing about any variant: "
            f"give -n {most * units} or fewer."
        )
    return size


def _num_gpus() -> int:
    """How many GPUs there are; raises UsageError if torch can use none."""
    if not any(Path("/dev", name).exists() for name in _GPU_FILES):
        raise UsageError("there is no CUDA device here: measure on the CPU, with lockstep bench step.")
    import torch  # Takes seconds: only where there seems to be a GPU.

    if not torch.cuda.is_available():
        raise UsageError(
            f"torch {torch.__version__} finds no CUDA device here: install a torch that is built for CUDA, or measure "
            "on the CPU, with lockstep bench step."
        )
    return torch.cuda.device_count()


def _checked_workloads(device: str, names: Sequence[str]) -> list[str]:
    known = catalogue.workloads(on_gpu=device == "cuda")
    for name in names:
        if name not in known:
            raise UsageError(f"there is no workload {name!r} here: give --workload one or more of {', '.join(known)}.")
    return list(dict.fromkeys(names))
