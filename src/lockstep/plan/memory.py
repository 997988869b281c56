"""What a worker's memory holds, by component, for every way to split and to checkpoint; what fits, and what it costs.

    parameters      as the model computes with them: whole; split (zero=3); or once per host (CPU workers over shm, as
                    soon as anything is split)
    gradients       what outlives the backward pass: whole buckets (zero=0, 1), or this worker's part of them
    buckets         from zero=2 on two stretches of memory that all buckets use in turn
    gathered        with zero=3 between hosts and on GPUs: two blocks, and what belongs to none
    optimizer       its state, and master weights, whole or this worker's part
    accumulated     gradients of earlier micro-batches, which stay whole until the last one's pass has sent them
    activations     the most that a forward and backward pass has at a time, what lives for a moment included
    fragmentation   what the allocator has and no tensor uses
    context         of the process: code, interpreter, CUDA

Two ways lead to activations and fragmentation. With a trace (see tracing.py) both follow from the order of requests, on
CPUs by playing glibc's heap through (see heap.py): within 10 % of what is measured, see docs/plan_memory.md. Without
one, activations follow from the architecture, and fragmentation is a share of them.
"""

import itertools
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from lockstep.plan.machine import Machine
from lockstep.plan.workload import Checkpointing, Workload
from lockstep.replica.granularity import LATE, UNCUT, fill, usual_granularity

if TYPE_CHECKING:
    from lockstep.plan.tracing import StepTrace, StorageUse

AHEAD = 2
"""Blocks that are gathered at a time, see replica/gathered_params.py."""
AMPLE = 8
"""A GPU with room for so many times the parameters keeps them gathered, see replica/placement.py."""
KEPT_BYTES, GIVEN_BACK_BYTES = 32 << 20, 1 << 20
"""From where on C's allocator maps blocks by themselves; the second where something is split over gloo."""
TAIL_CAP_BYTES = 4 << 20
"""A last bucket up to here has memory of its own through shared memory, since it carries the notes."""

NUM_PLAYS = 4
"""How often the heap is played for each of up to three workers; the mean of the worker that has it worst counts."""

CPU_CONTEXT_BYTES = 300e6
"""Of a worker with torch loaded, code that all of a host share divided among two."""
GPU_CONTEXT_BYTES = 1.0e9
"""CUDA's context and kernels, and NCCL's buffers: not measured with this version."""
CPU_FRAGMENTATION = 0.25
"""Of activations, where there is no trace: the middle of what traces of the models in bench/plan_memory.py show."""
GPU_FRAGMENTATION = 0.05
"""Of all that torch allocates there, an assumption: not measured with this version."""
GPU_ROUNDING_BYTES = 512
"""CUDA's caching allocator rounds to this."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one worker, by component."""

    parameters: float
    gradients: float
    optimizer: float
    """The optimizer's state."""
    master: float
    """Master weights."""
    buckets: float
    gathered: float
    accumulated: float
    activations: float
    batch: float
    """The inputs."""
    buffers: float
    """Of the model: statistics, masks."""
    fragmentation: float
    context: float
    capacity: float
    """What the worker has."""

    @property
    def states(self) -> float:
        """What the ZeRO paper counts: parameters, gradients, optimizer state and master weights."""
        return self.parameters + self.gradients + self.optimizer + self.master

    @property
    def total(self) -> float:
        """The peak of a step."""
        return sum(amount for _, amount in self.components())

    @property
    def training(self) -> float:
        """The peak without what any process has: what bench/memory.py measures."""
        return self.total - self.context

    @property
    def fits(self) -> bool:
        """Whether the worker has as much."""
        return self.total <= self.capacity

    def components(self) -> list[tuple[str, float]]:
        """Name and bytes of each, in order."""
        return [(each.name, getattr(self, each.name)) for each in fields(self) if each.name != "capacity"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to train it, and what that takes."""

    zero: int
    checkpointing: Checkpointing
    micro_batch: int
    memory: Memory
    cost: float
    """How much longer a step takes, roughly, as a share: what is computed again, gathered, or done in small pieces."""


def estimate(workload: Workload, machine: Machine, *, backend: str | None = None) -> Memory:
    """What one worker needs for `workload`; from its trace, if it has one and recomputes nothing beyond that.

    backend: "shm" or "gloo", to have it otherwise than it would be on the CPUs of `machine`.
    """
    is_cpu, workers = machine.device.kind == "cpu", machine.workers
    is_shared = is_cpu and workers > 1 and (backend == "shm" if backend else machine.hosts == 1)
    zero = workload.zero if workers > 1 else 0
    parts = workers if zero else 1
    count = workload.num_params
    parameters = float(count * workload.param_bytes)
    sizes = [numel * workload.grad_bytes for numel, _ in workload.tensors_backward()]
    gathered = 0.0
    if zero == 3 and not is_shared:
        keeps_all = not is_cpu and machine.device.memory_bytes > AMPLE * parameters
        gathered = parameters if keeps_all else _gathered(workload)
    if (is_shared and zero) or zero == 3:
        parameters /= workers
    gradients = float(count * workload.grad_bytes) / (parts if zero >= 2 else 1)
    memory = Memory(
        parameters,
        gradients,
        count * workload.optimizer_bytes / parts,
        float(count * workload.master_bytes) / parts,
        _turns(sizes, machine, zero, is_shared=is_shared) if zero >= 2 else 0.0,
        gathered,
        float(count * workload.grad_bytes) if workload.accumulation > 1 else 0.0,
        activations(workload),
        workload.input_bytes * workload.micro_batch,
        float(workload.buffer_bytes),
        0.0,
        CPU_CONTEXT_BYTES if is_cpu else GPU_CONTEXT_BYTES,
        machine.device.memory_bytes,
    )
    if workload.trace is not None and workload.checkpointing == "none":
        trace = workload.trace[0].at(workload.micro_batch, workload.trace[1])
        memory = replace(memory, **_traced(trace, memory, machine, zero, parts, is_shared=is_shared))
    elif is_cpu:
        memory = replace(memory, fragmentation=CPU_FRAGMENTATION * memory.activations)
    else:
        memory = replace(memory, fragmentation=GPU_FRAGMENTATION * memory.training)
    return memory


def activations(workload: Workload) -> float:
    """The peak of a forward and backward pass over a micro-batch, by the architecture."""
    layers, kept = workload.layers, workload.checkpointing
    if kept == "full" and workload.num_blocks():
        blocks: dict[int, float] = {}
        for layer in layers:
            if layer.block >= 0:
                blocks[layer.block] = blocks.get(layer.block, 0.0) + layer.activation_bytes
        boundaries = sum(layer.boundary_bytes for layer in layers)
        outside = sum(layer.activation_bytes for layer in layers if layer.block < 0)
        one = boundaries + max(outside + workload.transient_bytes, max(blocks.values()))
    else:
        one = sum(layer.activation_bytes for layer in layers) + workload.transient_bytes
        if kept == "selective":
            one -= sum(layer.attention_bytes for layer in layers)
    return one * workload.micro_batch


def largest_micro_batch(workload: Workload, machine: Machine) -> int:
    """The most samples of a forward pass that fit, up to the worker's part of the batch; 0 if not even one does."""
    most = max(1, math.ceil(workload.batch / machine.workers))
    if not _at(workload, machine, 1).fits:
        return 0
    fits, too_many = 1, most + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if _at(workload, machine, middle).fits:
            fits = middle
        else:
            too_many = middle
    return fits


def choices(workload: Workload, machine: Machine) -> list[Choice]:
    """All ways to train the same batch, the cheapest first; of each stage and checkpointing the largest micro-batch
    that fits, or 1 where none does."""
    found = []
    stages = range(4) if machine.workers > 1 else range(1)
    kept: Sequence[Checkpointing] = ("none", "selective", "full") if workload.num_blocks() else ("none",)
    for zero, checkpointing in itertools.product(stages, kept):
        way = replace(workload, zero=zero, checkpointing=checkpointing)
        micro = max(1, largest_micro_batch(way, machine))
        found.append(Choice(zero, checkpointing, micro, _at(way, machine, micro), _cost(way, machine, micro)))
    return sorted(found, key=lambda choice: (not choice.memory.fits, choice.cost))


def _at(workload: Workload, machine: Machine, micro_batch: int) -> Memory:
    return estimate(workload.trained_by(machine.workers, micro_batch), machine)


def _cost(workload: Workload, machine: Machine, micro_batch: int) -> float:
    """A ranking, not a measurement: what is computed again counts as it is, what travels twice for a little."""
    again = {"none": 0.0, "selective": 0.03, "full": 1 / 3}[workload.checkpointing]
    gathers = 0.06 if workload.zero == 3 and not (machine.device.kind == "cpu" and machine.hosts == 1) else 0.0
    whole = max(1, math.ceil(workload.batch / machine.workers))
    return again + gathers + 0.005 * workload.zero + 0.01 * math.log2(whole / micro_batch)


def _gathered(workload: Workload) -> float:
    """The largest blocks of those that are held at a time, and what is in no block."""
    blocks: dict[int, int] = {}
    for layer in workload.layers:
        blocks[layer.block] = blocks.get(layer.block, 0) + layer.num_params * workload.param_bytes
    outside = blocks.pop(-1, 0)
    return float(outside + sum(sorted(blocks.values())[-AHEAD:]))


def _turns(sizes: Sequence[int], machine: Machine, zero: int, *, is_shared: bool) -> float:
    """The stretches of memory that buckets of gradients of these sizes use in turn."""
    buckets = [sum(bucket) for bucket in _buckets(sizes, machine, zero, is_shared=is_shared)]
    own = buckets.pop() if is_shared and buckets and buckets[-1] <= TAIL_CAP_BYTES else 0
    return float(max(buckets[::2], default=0) + max(buckets[1::2], default=0) + own)


def _buckets(sizes: Sequence[int], machine: Machine, zero: int, *, is_shared: bool) -> list[Sequence[int]]:
    """Gradients of these sizes, in the order in which they come, by the bucket that they are in."""
    if is_shared:  # As where the workers keep all cores of a host busy.
        grain = UNCUT if zero < 2 else LATE
    else:
        grain = usual_granularity(is_on_one_host=machine.hosts == 1, is_on_gpu=machine.device.kind != "cpu", zero=zero)
    return [sizes[begin:end] for begin, end in itertools.pairwise([0, *fill(sizes, grain)])]


# With a trace


def _traced(
    trace: "StepTrace", memory: Memory, machine: Machine, zero: int, parts: int, *, is_shared: bool
) -> dict[str, float]:
    """What a trace says better than arithmetic."""
    known: dict[str, float] = {
        "activations": float(trace.activation_peak),
        "optimizer": trace.state_bytes / parts,
        "batch": float(trace.batch_bytes),
        "buffers": float(trace.buffer_bytes),
    }
    memory = replace(memory, **known)
    if machine.device.kind == "cpu":
        ranks = sorted({0, parts // 2, parts - 1})  # Whoever needs most: parts are equal in bytes, not in pieces.
        played = max(
            statistics.fmean(
                _play(trace, memory, machine, zero, (rank, parts), seed, is_shared=is_shared)
                for seed in range(NUM_PLAYS)
            )
            for rank in ranks
        )
        return {**known, "fragmentation": max(0.0, played - memory.training)}
    rounding = sum(-use.num_bytes % GPU_ROUNDING_BYTES for use in trace.uses if use.is_saved)
    return {**known, "fragmentation": GPU_FRAGMENTATION * memory.training + rounding}


def _play(
    trace: "StepTrace",
    memory: Memory,
    machine: Machine,
    zero: int,
    part: tuple[int, int],
    seed: int,
    *,
    is_shared: bool,
) -> float:
    """The peak from the second step on, by the heap of the CPU worker that owns this part of so many."""
    from lockstep.plan.heap import Heap, replay

    heap = Heap(KEPT_BYTES)
    params = [heap.take(param.num_bytes) for param in trace.params]
    for num_bytes in (memory.buffers, memory.batch):
        if num_bytes:
            heap.take(int(num_bytes))
    sizes = [param.num_bytes for param in reversed(trace.params) if param.is_trained]
    buckets = _buckets(sizes, machine, zero, is_shared=is_shared)
    beside = memory.buckets + memory.gathered + memory.accumulated
    """What lies in shared memory, or is mapped by itself."""
    if zero:
        for own in [sum(bucket) // part[1] for bucket in buckets] if zero >= 2 else ():
            heap.take(own)
        for block in params:
            heap.give(block)
            heap.give_rests(block.rests)
        heap.trim()
        beside += memory.parameters
        if not is_shared:
            heap.mmap_bytes = GIVEN_BACK_BYTES
    if zero < 2:
        beside += memory.gradients
    if memory.master:
        heap.take(int(memory.master))
    owned = list(_owned(trace, buckets, part))
    drawn = random.Random(seed)
    replay(heap, trace.uses, drawn, is_first=True)
    replay(heap, owned, drawn, is_first=True)
    later = [use for use in owned if use.died is not None]
    peaks = [replay(heap, uses, drawn) for uses in (trace.uses, later, trace.uses)]
    return max(peaks) + beside


def _owned(trace: "StepTrace", buckets: Sequence[Sequence[int]], part: tuple[int, int]) -> Iterator["StorageUse"]:
    """The update of one worker: of each tensor of a parameter's size what it owns of that."""
    rank, parts = part
    if parts == 1:
        yield from trace.update
        return
    shares: dict[int, list[float]] = {}
    for bucket in buckets:
        span = sum(bucket) / parts
        begin = 0.0
        for size in bucket:
            owned = min(begin + size, (rank + 1) * span) - max(begin, rank * span)
            shares.setdefault(size, []).insert(0, max(0.0, owned) / size)
            begin += size
    kinds: dict[tuple[int, bool], list[StorageUse]] = {}
    for use in trace.update:
        kinds.setdefault((use.num_bytes, use.died is None), []).append(use)
    kept = []
    for (num_bytes, _), uses in kinds.items():
        of_params = shares.get(num_bytes, [1.0])
        for number, use in enumerate(uses):
            owned_bytes = round(num_bytes * of_params[number * len(of_params) // len(uses)])
            if owned_bytes:
                kept.append(replace(use, num_bytes=owned_bytes))
    yield from sorted(kept, key=lambda use: use.born)
