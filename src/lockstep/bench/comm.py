"""`lockstep bench comm`: naive and ring all-reduce against the backend's own, on workers of this host.

For every size, all backends and algorithms take turns in one run (see interleave.py), on ordinary float32 tensors.
Small ones are repeated within a turn, so that it is long enough to be timed. Traffic is what `comm.ring` counted in
one call before that, in which the sum is checked too.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import lockstep
from lockstep.bench import interleave, machine
from lockstep.bench.interleave import Estimate
from lockstep.bench.request import BACKENDS, ITEM_BYTES, CommRequest
from lockstep.comm import shm
from lockstep.comm.group import new_group
from lockstep.comm.ring import Traffic, naive_all_reduce, ring_all_reduce

OWN = "own"
"""The name of what the backend does by itself."""
TURN_BYTES = 4 << 20
"""Small tensors are reduced again and again until a turn has reduced this much,"""
MOST_REPEATS = 50
"""or as often as this."""
WARMUP = 2


@dataclass(frozen=True, slots=True)
class CommRow:
    """What was found for one size, backend and algorithm."""

    num_bytes: int
    """Bytes of the tensor."""
    backend: str
    algorithm: str
    """naive, ring, or own: the backend's all_reduce."""
    seconds: float
    """Median time of one all-reduce, until the last worker had the sum."""
    sent: Traffic | None
    """What a worker sent, as counted (the most, where they differ by the rest of a division); None if not known."""
    bus_bandwidth: float
    """2(N-1)/N * num_bytes / seconds, in GB/s: what each worker's link carries if as little is sent as possible."""
    ratio: Estimate
    """Its time in units of the backend's own, compared within rounds."""


@dataclass(frozen=True, slots=True)
class CommResults:
    """Everything that was measured."""

    machine: dict[str, str | int]
    """What it ran on."""
    rounds: dict[int, str]
    """By size: how many rounds count, and how busy the machine was with other things."""
    rows: tuple[CommRow, ...]

    def as_json(self) -> str:
        """The same as text, for programs."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


def run(request: CommRequest) -> CommResults:
    """Start the workers and have them measure. Called on no worker."""
    return lockstep.launch(measure, request.workers, args=(request,))[0]


def measure(request: CommRequest) -> CommResults:
    """What one worker does: every size in turn. Called on every worker."""
    world = lockstep.join(device="cpu", backend="gloo")
    assert world.group is not None
    shm.register()
    # A group for each backend: the world's own is for the barriers in between.
    names = request.backends or [name for name in BACKENDS if name != "shm" or shm.is_supported()]
    groups = {name: new_group(world.group, name, world.timeout) for name in names}
    ways = {
        (backend, name): functools.partial(algorithm, group=group)
        for backend, group in groups.items()
        for name, algorithm in ALGORITHMS.items()
    }
    rounds, rows = {}, []
    for num_bytes in request.sizes:
        sent = {way: _counted(world, reduce, num_bytes) for way, reduce in ways.items()}
        repeats = max(1, min(MOST_REPEATS, TURN_BYTES // num_bytes))
        tensor = torch.zeros(num_bytes // ITEM_BYTES)  # Stays zero, however often it is summed.
        actions = {" ".join(way): _repeated(reduce, tensor, repeats) for way, reduce in ways.items()}
        measured = interleave.measure(world, actions, rounds=request.rounds, warmup=WARMUP)
        rounds[num_bytes] = str(measured)
        for backend, name in ways:
            times, key = measured.times, f"{backend} {name}"
            seconds = interleave.spread(times[key])[1] / repeats
            ratio = interleave.compare(times, interleave.ratio, key, f"{backend} {OWN}")
            bandwidth = bus_bandwidth(world.size, num_bytes, seconds)
            rows.append(CommRow(num_bytes, backend, name, seconds, sent[backend, name], bandwidth, ratio))
    facts = {**machine.describe(world), "backend": ", ".join(groups)}
    return CommResults(facts, rounds, tuple(rows))


def bus_bandwidth(workers: int, num_bytes: int, seconds: float) -> float:
    """2(N-1)/N * M / t, in GB/s: by messages, workers cannot send less on average."""
    return 2 * (workers - 1) / workers * num_bytes / seconds / 1e9


def _own(tensor: Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, group=group)


ALGORITHMS: Mapping[str, Callable[..., Traffic | None]] = {
    "naive": naive_all_reduce,
    "ring": ring_all_reduce,
    OWN: _own,
}
"""What sums a tensor over a group in place, and returns what this worker sent, if that is known."""


def _counted(world: lockstep.World, reduce: Callable[[Tensor], Traffic | None], num_bytes: int) -> Traffic | None:
    """What a worker sends in one all-reduce: the most of all workers. Sees to it that the sum is right."""
    tensor = torch.ones(num_bytes // ITEM_BYTES)
    sent = reduce(tensor)
    assert tensor.eq(world.size).all(), f"worker {world.rank}: a wrong sum"
    return None if sent is None else max(world.gather(sent), key=lambda traffic: traffic.num_bytes)


def _repeated(reduce: Callable[[Tensor], Traffic | None], tensor: Tensor, repeats: int) -> interleave.Action:
    def act(_number: int) -> None:
        for _ in range(repeats):
            reduce(tensor)

    return act
