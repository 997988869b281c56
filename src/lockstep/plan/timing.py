"""How long a step takes: from a workload and a machine to the inputs of the simulation, and to speeds at every size.

Computing is two sums over the layers, of one sample: products at a share of the device's peak, and everything else
as traffic of the activations through its memory. Messages are the engine's own buckets, in its order. What the few
constants are worth was found on published runs (`published`), or is measured on this machine (`measure`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lockstep.plan import simulation
from lockstep.plan.machine import Machine
from lockstep.plan.simulation import StepInputs, StepTimes
from lockstep.plan.workload import Layer, Workload
from lockstep.replica.granularity import LATE, UNCUT, Granularity, fill, usual_granularity

SIZES = tuple(2**power for power in range(15))
"""1 to 16,384 workers."""


@dataclass(frozen=True, slots=True)
class Constants:
    """What physics does not say; the same for every model and machine, but for `Machine.measured`."""

    tensor_share: float = 0.75
    """Of what large products alone reach in tensor cores, what those of a model get."""
    plain_share: float = 0.95
    """The same without tensor cores."""
    winograd: float = 1.8
    """How many times faster 3x3 convolutions of stride 1 are in fp32 than their operations say (2.25 in theory)."""
    traffic: float = 4.0
    """How many times the kept activations pass through memory in a forward and a backward pass."""
    picture_traffic: float = 12.0
    """The same of convolutions with batch norms, which read and write each tensor several times."""
    autocast_traffic: float = 2.0
    """How many times as much it is under autocast, which casts, and keeps norms and losses in fp32."""
    optimizer_traffic: float = 2.0
    """How many times an update reads and writes its gradients, states and parameters."""
    between_s: float = 0.01
    """Between two steps: the loop, metrics, what waits for the device."""
    contention: float = 0.15
    """Share of a GPU's speed that is lost while a message is on its way."""
    jitter: float = 0.015
    """From pass to pass."""
    spread: float = 0.01
    """From device to device."""
    message_s: float = 20e-6
    """One collective call."""
    launch_s: float = 10e-6
    """What a bucket costs the computing of a GPU."""
    gradient_s: float = 10e-6
    """What the engine's hook takes a CPU for one gradient, besides its copy: bench/plan.py --engine."""
    engine_s: float = 0.7e-3
    """What the engine takes a CPU for one step besides: likewise."""


@dataclass(frozen=True, slots=True)
class WireCost:
    """How a wire changes a bucket: see docs/wire.md."""

    name: str = "none"
    factor: float = 1.0
    """Bytes that travel for one of fp32's."""
    s_per_byte: float = 0.0
    """Encoding and decoding, of a byte of the bucket."""


WIRE_FACTORS = {"none": 1.0, "half": 0.5, "int8": 0.254, "sign": 0.035, "topk": 0.02, "lowrank": 0.02}
"""Of the bytes of gradients in fp32, each way: docs/wire.md; of low rank what matrices a thousand wide have."""
_WIRE_PASSES = {"none": 0.0, "half": 3.0, "int8": 8.0, "sign": 10.0, "topk": 20.0, "lowrank": 12.0}
"""How often an encoding passes over a bucket's bytes in memory."""


def wire_cost(name: str, machine: Machine) -> WireCost:
    """What a wire costs on such a device."""
    return WireCost(name, WIRE_FACTORS[name], _WIRE_PASSES[name] / machine.device.memory_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Choices:
    """What can be chosen besides what the workload says."""

    algorithm: str = ""
    """Of simulation's; "" for what the engine would do."""
    wire: str = "none"
    bucket_mb: float | None = None
    reduces_each: bool = False
    """Gradients are sent after every micro-batch: FSDP's way; Lockstep sends once a step."""
    loader_s: float = 0.0
    """Per sample, on one worker."""
    straggler: float = 1.0
    fills_cores: bool = False
    """CPU workers of one thread each take all cores of their host, so that nothing runs beside their computing."""
    slowdown: float = 1.0
    """Of the computing, against what the constants say: from measured runs of the like."""


@dataclass(frozen=True, slots=True)
class Speed:
    """What is predicted of one number of workers."""

    workers: int
    micro_batch: int
    accumulation: int
    batch: int
    """Samples in the step."""
    times: StepTimes
    units_per_s: float
    """Of all workers together."""
    units_per_s_per_worker: float
    efficiency: float
    """Against one worker with the same work: T_1 / T_N."""
    mfu: float
    """Share of the devices' peak that the model's own operations take."""


def step_inputs(
    workload: Workload, machine: Machine, choices: Choices | None = None, constants: Constants | None = None
) -> StepInputs:
    """What the simulation needs to know."""
    choices, constants = choices or Choices(), constants or Constants()
    measured, device = machine.measured, machine.device
    forward, backward = sample_seconds(workload, machine, constants)
    grain = granularity(machine, workload, choices)
    num_bytes, ready, numels = buckets(workload, grain)
    on_gpu = device.kind == "gpu"
    launch = constants.launch_s
    if not on_gpu:
        tensors = sum(len(layer.tensors) for layer in workload.layers)
        launch = engine_seconds(tensors, sum(num_bytes), device.memory_bytes_per_s, constants) / max(1, len(num_bytes))
    wire = wire_cost(choices.wire, machine)
    params = workload.num_params
    in_update = (
        2 * workload.param_bytes + workload.grad_bytes + 2 * workload.optimizer_bytes + 2 * workload.master_bytes
    )
    return StepInputs(
        workers=machine.workers,
        per_host=machine.per_host,
        forward_s=forward * workload.micro_batch * choices.slowdown,
        backward_s=backward * workload.micro_batch * choices.slowdown,
        optimizer_s=constants.optimizer_traffic * params * in_update / device.memory_bytes_per_s,
        bucket_bytes=num_bytes,
        bucket_ready=ready,
        gather_bytes=[float(numel * workload.param_bytes) for numel in numels],
        accumulation=workload.accumulation,
        reduces_each=choices.reduces_each,
        zero=workload.zero,
        algorithm=choices.algorithm or _algorithm(machine),
        intra_latency_s=machine.intra.latency_s,
        intra_bytes_per_s=machine.intra.usable_bytes_per_s,
        inter_latency_s=machine.inter.latency_s,
        inter_bytes_per_s=machine.inter.usable_bytes_per_s,
        message_s=measured.message_s if measured else constants.message_s,
        launch_s=launch,
        wire_factor=wire.factor * 4 / workload.grad_bytes if choices.wire != "none" else 1.0,
        wire_s_per_byte=wire.s_per_byte,
        contention=measured.contention if measured else _contention(machine, constants),
        jitter=measured.jitter if measured else constants.jitter,
        spread=0.0 if measured else constants.spread,
        straggler=choices.straggler,
        loader_s=choices.loader_s * workload.micro_batch,
        between_s=constants.between_s if on_gpu else constants.engine_s,
    )


def sample_seconds(workload: Workload, machine: Machine, constants: Constants) -> tuple[float, float]:
    """What one sample takes one device, forward and backward."""
    device, precision = machine.device, workload.precision
    share = constants.tensor_share if device.has_tensor_cores(precision) else constants.plain_share
    share = share * device.products_share if machine.measured is None else machine.measured.products_share
    rate = device.peak(precision) * share
    products = sum(_counted_flops(layer, workload, constants) for layer in workload.layers) / rate
    traffic = constants.traffic * (constants.autocast_traffic if precision == "amp" else 1.0)
    if workload.buffer_bytes and any(layer.winograd_flops for layer in workload.layers):
        traffic = constants.picture_traffic
    pass_traffic = traffic / 3 / device.memory_bytes_per_s
    forward = products + workload.activation_bytes * pass_traffic
    again = 0.0
    if workload.checkpointing == "full":
        again = sum(
            _counted_flops(layer, workload, constants) / rate + layer.activation_bytes * pass_traffic
            for layer in workload.layers
            if layer.block >= 0
        )
    elif workload.checkpointing == "selective":
        again = sum(layer.attention_bytes for layer in workload.layers) * pass_traffic
    return forward, 2 * forward + again


def _counted_flops(layer: Layer, workload: Workload, constants: Constants) -> float:
    """The operations that a layer really takes."""
    if workload.precision != "fp32":
        return layer.forward_flops
    return layer.forward_flops - layer.winograd_flops * (1.0 - 1.0 / constants.winograd)


def engine_seconds(tensors: int, num_bytes: float, bytes_per_s: float, constants: Constants | None = None) -> float:
    """What hooks and copies of gradients into their buckets take a CPU worker in a pass; a copy reads and writes."""
    return tensors * (constants or Constants()).gradient_s + 2 * num_bytes / bytes_per_s


def _contention(machine: Machine, constants: Constants) -> float:
    # What computes on a CPU is what sends.
    return constants.contention if machine.device.kind == "gpu" else 0.5


def _algorithm(machine: Machine) -> str:
    if machine.device.kind == "cpu" and machine.hosts == 1:
        return simulation.SHARED_MEMORY
    return simulation.FASTEST if machine.device.kind == "gpu" else simulation.RING


def granularity(machine: Machine, workload: Workload, choices: Choices) -> Granularity:
    """How finely the engine would cut gradients into buckets."""
    on_one_host = machine.hosts == 1
    if choices.fills_cores and on_one_host and choices.bucket_mb is None and choices.wire == "none":
        return UNCUT if workload.zero < 2 else LATE
    on_gpu = machine.device.kind == "gpu"
    return usual_granularity(
        is_on_one_host=on_one_host,
        is_on_gpu=on_gpu,
        cap_mb=choices.bucket_mb,
        is_coded=on_gpu and choices.wire != "none",
        zero=workload.zero,
    )


def buckets(workload: Workload, grain: Granularity) -> tuple[list[float], list[float], list[int]]:
    """Bytes of each bucket, the share of the backward pass that is over when it is full, and its elements.

    In the order in which they leave. With zero=3 each block has one of its own.
    """
    arrivals = workload.tensors_backward()
    owners = [layer for layer in reversed(workload.layers) for _ in layer.tensors]
    groups: list[list[tuple[int, float]]] = []
    free = [place for place, layer in enumerate(owners) if not _is_gathered(layer, workload)]
    begin = 0
    for end in fill([arrivals[place][0] * workload.grad_bytes for place in free], grain):
        groups.append([arrivals[place] for place in free[begin:end]])
        begin = end
    blocks: dict[int, list[tuple[int, float]]] = {}
    for place, layer in enumerate(owners):
        if _is_gathered(layer, workload):
            blocks.setdefault(layer.block, []).append(arrivals[place])
    groups = sorted([*groups, *blocks.values()], key=lambda group: group[-1][1])
    numels = [sum(numel for numel, _ in group) for group in groups]
    ready = [group[-1][1] if grain.leaves_early else 1.0 for group in groups]
    return [float(numel * workload.grad_bytes) for numel in numels], ready, numels


def _is_gathered(layer: Layer, workload: Workload) -> bool:
    return workload.zero == 3 and layer.block >= 0


def speed(
    workload: Workload,
    machine: Machine,
    choices: Choices | None = None,
    constants: Constants | None = None,
    batch: int | None = None,
) -> Speed:
    """What is predicted of this workload on this machine.

    batch: samples that count, where the last micro-batches of some workers are not full.
    """
    given = step_inputs(workload, machine, choices, constants)
    times = simulation.simulate(given)
    alone = simulation.simulate(replace(given, workers=1)).step_s
    batch = batch or machine.workers * workload.micro_batch * workload.accumulation
    samples_per_s = batch / times.step_s
    peak = machine.device.peak(workload.precision) * machine.workers
    return Speed(
        machine.workers,
        workload.micro_batch,
        workload.accumulation,
        batch,
        times,
        samples_per_s * workload.units_per_sample,
        samples_per_s * workload.units_per_sample / machine.workers,
        alone / times.step_s,
        samples_per_s * workload.step_flops / peak,
    )


def strong_scaling(
    workload: Workload,
    machine: Machine,
    choices: Choices | None = None,
    constants: Constants | None = None,
    sizes: Sequence[int] = SIZES,
) -> list[Speed]:
    """The same global batch on more and more workers, as far as there is a sample for each.

    Where the batch does not divide, a step takes as long as the largest part of it.
    """
    return [
        speed(workload.trained_by(size), machine.of(size), choices, constants, workload.batch)
        for size in sizes
        if size <= workload.batch
    ]


def weak_scaling(
    workload: Workload,
    machine: Machine,
    choices: Choices | None = None,
    constants: Constants | None = None,
    sizes: Sequence[int] = SIZES,
) -> list[Speed]:
    """The same work for each of more and more workers."""
    return [speed(workload, machine.of(size), choices, constants) for size in sizes]


@dataclass(frozen=True, slots=True)
class Effort:
    """What it takes to train on so many units."""

    hours: float
    kwh: float
    """At the devices' full power and their hosts' besides."""
    price: float | None
    """None where the machine has no price."""
    goodput: float
    """Share of the time that ends up as training; 1 without faults."""
    checkpoint_every_s: float | None
    """The interval that loses the least; None where nothing is written, or nothing ever fails."""


def effort(
    found: Speed,
    machine: Machine,
    units: float,
    *,
    mtbf_hours: float | None = None,
    elastic: bool = False,
    state_bytes: float = 0.0,
    write_bytes_per_s: float = 2e9,
    restart_s: float = 300.0,
) -> Effort:
    """Time, energy and price of a training on so many units.

    mtbf_hours: of one worker; the machine's is that divided by their number. state_bytes: of a checkpoint, which all
    hosts write together at `write_bytes_per_s` each.
    """
    goodput, every = 1.0, None
    if mtbf_hours:
        mtbf_s = mtbf_hours * 3600 / machine.workers
        write_s = state_bytes / (write_bytes_per_s * machine.hosts)
        if elastic:
            goodput = simulation.elastic_goodput(machine.workers, found.times.step_s, 10.0, restart_s, mtbf_s)
        else:
            every = simulation.best_interval(max(write_s, 1.0), mtbf_s)
            goodput = simulation.checkpointed_goodput(every, max(write_s, 1.0), restart_s, mtbf_s)
    hours = units / found.units_per_s / 3600 / goodput if goodput > 0 else math.inf
    watts = machine.workers * (machine.device.watts + machine.host_watts)
    price = None if machine.price_per_hour is None else machine.price_per_hour * hours * machine.workers
    return Effort(hours, hours * watts / 1000, price, goodput, every)
