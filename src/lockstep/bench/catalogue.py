"""What `lockstep bench step` and `lockstep bench gpu` can measure, by name, and without importing torch.

A variant is a kind, with a cap of its buckets in MB and a backend if wanted: lockstep, ddp@4, zero3/gloo. Without a
backend, Lockstep takes what it would choose by itself (shm on one host), and everybody else torch's own: gloo, or nccl.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata, util

from lockstep.errors import UsageError

OURS = {
    "lockstep": "lockstep.DataParallel, which is given the optimizer",
    "untold": "the same without the optimizer, as in DDP's place",
    "zero1": "lockstep.DataParallel, optimizer state split",
    "zero2": "and gradients",
    "zero3": "and parameters",
    "zero3-reshard": "the same with reshard_after_forward=True: gathered twice, where there would be room to keep them",
    "zero3-int8": "zero=3, gradients and gathered parameters as 8-bit numbers",
    "half": "lockstep.DataParallel, gradients travel as bf16",
    "int8": "as 8-bit numbers",
    "sign": "as signs",
    "topk": "1 % of them",
    "lowrank": "as matrices of rank 2",
    "auto": 'wire="auto"',
    "auto-any": "an auto that may choose any wire",
    "trainer": "lockstep.Trainer, one shard a worker",
    "trainer-graph": "the same with cuda_graph=True: recorded as CUDA graphs, on a lone worker",
}
"""Kinds of Lockstep."""
LIMITS = {"nocomm": "the bare module, each worker for itself: the limit"}
"""Kinds that send no gradients."""
PEERS = {
    "ddp": "torch's DistributedDataParallel, gradients as views of its buckets",
    "ddp-bf16": "the same with torch's bf16 hook",
    "ddp-fp16": "with its fp16 hook",
    "ddp-powersgd": "with its PowerSGD hook of rank 2, from the third step on",
    "zero-redundancy": "the same with torch's ZeroRedundancyOptimizer",
    "fsdp2": "torch's fully_shard, one unit per block",
    "accelerate": "Hugging Face Accelerate",
    "fabric": "Lightning Fabric",
    "deepspeed0": "DeepSpeed, ZeRO stage 0",
    "deepspeed1": "stage 1",
    "deepspeed2": "stage 2",
    "deepspeed3": "stage 3",
}
"""Kinds of everybody else."""
KINDS = {**LIMITS, **OURS, **PEERS}
BUCKETED = ("lockstep", "untold", "zero1", "zero2", "zero3", "zero3-reshard", "zero3-int8", "ddp")
"""Kinds that take a cap of their buckets;"""
MOVABLE = (*BUCKETED, "zero-redundancy", "fsdp2")
"""kinds that take a backend."""
DISTRIBUTIONS = {"accelerate": "accelerate", "fabric": "lightning-fabric", "deepspeed": "deepspeed"}
"""What must be installed for a kind that begins so."""

ON_CPU = (
    "nocomm", "lockstep", "untold", "zero1", "zero2", "zero3", "lockstep/gloo", "ddp/gloo", "ddp/shm", "fsdp2",
    "zero-redundancy", "accelerate", "fabric", "deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3",
)  # fmt: skip
"""What `bench step` measures if nothing else is said;"""
ON_GPU = (
    "nocomm", "lockstep", "trainer", "trainer-graph", "zero1", "zero2", "zero3", "zero3-int8", "half", "int8", "ddp",
    "ddp-bf16", "fsdp2", "zero-redundancy", "accelerate", "fabric", "deepspeed0", "deepspeed1", "deepspeed2",
    "deepspeed3",
)  # fmt: skip
"""what `bench gpu` does."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its batch, in words and numbers."""

    about: str
    num_params: int
    """About so many."""
    batch: int
    """Samples per worker and step."""
    on_gpu: bool
    """Whether it is for `bench gpu`."""
    length: int = 0
    """Tokens of a sample, where it is a sequence."""


WORKLOADS = {
    "gpt-10m": Workload("a GPT of 10M parameters, 4 x 128 tokens", 10_000_000, 4, False, 128),
    "gpt-40m": Workload("a GPT of 40M, 2 x 128 tokens", 39_000_000, 2, False, 128),
    "gpt-40m-small": Workload("the same, 1 x 64 tokens: little to compute, much to send", 39_000_000, 1, False, 64),
    "resnet18": Workload("a CNN like ResNet-18, 4 pictures of 32 x 32", 11_200_000, 4, False),
    "mlp": Workload("128 layers of 64 x 64, batch 32: what a parameter costs by itself", 540_000, 32, False),
    "recommender": Workload("8 tables of 50,000 x 32 and two small MLPs, batch 256", 12_900_000, 256, False),
    "gpt2-124m": Workload("GPT-2 of 124M, 4 x 1024 tokens", 124_000_000, 4, True, 1024),
    "gpt2-350m": Workload("GPT-2 of 350M, 4 x 1024 tokens", 355_000_000, 4, True, 1024),
    "tiny": Workload("a few small layers: to try the command, not to measure anything", 1_260, 4, False),
}


@dataclass(frozen=True, slots=True)
class Spelling:
    """A variant's name, taken apart."""

    kind: str
    cap_mb: float | None
    """Most MB of a bucket; None for what the kind does by itself."""
    backend: str | None
    """shm or gloo; None for what the kind does by itself."""


def workloads(*, on_gpu: bool) -> list[str]:
    """The names for one of the two commands; `tiny` is for both."""
    return [name for name, workload in WORKLOADS.items() if workload.on_gpu == on_gpu or name == "tiny"]


def spelled(name: str) -> Spelling:
    """`name` taken apart; raises UsageError if there is no such variant."""
    match = re.fullmatch(r"([a-z0-9-]+)(?:@(\d+(?:\.\d+)?))?(?:/(gloo|shm))?", name)
    kind, cap, backend = match.groups() if match else ("", None, None)
    if kind not in KINDS or (cap and kind not in BUCKETED) or (backend and kind not in MOVABLE):
        raise UsageError(
            f"there is no variant {name!r}: there are {', '.join(KINDS)}; {', '.join(BUCKETED)} take the MB of a "
            f"bucket (ddp@4), and {', '.join(MOVABLE)} a backend (ddp/gloo, ddp/shm)."
        )
    return Spelling(kind, float(cap) if cap else None, backend)


def is_ours(name: str) -> bool:
    """Whether a variant is one of Lockstep's."""
    return spelled(name).kind in OURS


def bases(names: Sequence[str]) -> list[str]:
    """What others are compared with: the limit, or else the first; and torch's DDP, on gloo rather than on shm."""
    limit = next((name for name in names if spelled(name).kind in LIMITS), names[0])
    ddp = [name for name in names if spelled(name).kind == "ddp"]
    ddp.sort(key=lambda name: spelled(name).backend == "shm")
    return list(dict.fromkeys([limit, *ddp[:1]]))


def missing(name: str) -> str | None:
    """Why a variant cannot even be tried here: what is not installed. None if nothing is missing."""
    for beginning, distribution in DISTRIBUTIONS.items():
        if spelled(name).kind.startswith(beginning) and util.find_spec(distribution.replace("-", "_")) is None:
            return f"not installed: pip install {distribution} (the versions that were tried: bench/requirements.txt)"
    return None


def versions() -> dict[str, str]:
    """The versions of the peers that are installed."""
    found = {}
    for distribution in DISTRIBUTIONS.values():
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return found


def heats(names: Sequence[str], always: Iterable[str], most: int) -> list[tuple[str, ...]]:
    """`names` in groups of at most `most` that are measured together; everyone of `always` is in each of them.

    Fewer than two more than `always` are of no use, so that a group may be larger than `most` where that is tiny.
    """
    common = list(always)
    others = [name for name in names if name not in common]
    room = max(1, most - len(common))
    parts = [others[first : first + room] for first in range(0, len(others), room)] or [[]]
    return [tuple(name for name in names if name in common or name in part) for part in parts]
