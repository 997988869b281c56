"""What it is trained on: devices, how many, how many a host, and the links within and between hosts.

`named("64xH100/8@400Gb")` is 64 H100s, 8 a host, each host with 400 Gbit/s to the others. What is left out is usual for
the device. `from_toml` reads a machine of one's own; `measure` (its own module, since it needs torch) this one.
"""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

from lockstep.errors import UsageError

GB = 1e9
_TERA = 1e12
_MOST_WORKERS = 1 << 20


@dataclass(frozen=True, slots=True)
class Device:
    """One worker's device, by its public figures or as measured."""

    name: str
    flops: Mapping[str, float]
    """Dense peak per second in matrix products, by precision (fp32, tf32, bf16, fp16, fp8)."""
    memory_bytes: float
    memory_bytes_per_s: float
    watts: float
    """Of the device under full load."""
    source: str = ""
    kind: str = "gpu"
    """"gpu" or "cpu"."""
    products_share: float = 0.8
    """Of its peak, what large products alone reach: clocks fall where all of the device works."""

    def peak(self, precision: str) -> float:
        """The peak of the products of a workload's precision; that of the next wider one the device can do."""
        order = {
            "fp32": ("fp32",),
            "tf32": ("tf32", "fp32"),
            "bf16": ("bf16", "fp16", "fp32"),
            "fp16": ("fp16", "bf16", "fp32"),
            "amp": ("bf16", "fp16", "fp32"),
            "fp8": ("fp8", "bf16", "fp16", "fp32"),
        }[precision]
        return next(self.flops[each] for each in order if each in self.flops)

    def has_tensor_cores(self, precision: str) -> bool:
        """Whether products of this precision are several times as fast as the device's plain ones."""
        return self.peak(precision) > 3.0 * self.flops["fp32"]


@dataclass(frozen=True, slots=True)
class Link:
    """What workers talk over."""

    name: str
    bytes_per_s: float
    """One way, as the maker says. Within a host what one worker can send, between hosts what one host can send."""
    latency_s: float
    """Of one message, from one worker to the next, without its bytes."""
    achieved: float = 1.0
    """Share of `bytes_per_s` that a collective of large tensors gets; 1 where that is what was measured."""

    @property
    def usable_bytes_per_s(self) -> float:
        """What a collective gets."""
        return self.bytes_per_s * self.achieved


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured on this machine, where it was: it takes the place of what is assumed of others."""

    products_share: float = 1.0
    """Of `Device.flops`, which were measured too, what products within a model get; other work of it counted in."""
    message_s: float = 0.0
    """What one collective call takes by itself."""
    contention: float = 1.0
    """Share of its speed that computing loses while a message is on its way."""
    jitter: float = 0.0
    """Relative standard deviation of a pass's time."""


@dataclass(frozen=True, slots=True)
class Machine:
    """All that a run has."""

    name: str
    device: Device
    workers: int
    per_host: int
    """Workers of one host."""
    intra: Link
    """Within a host."""
    inter: Link
    """Between hosts."""
    price_per_hour: float | None = None
    """Of one device."""
    host_watts: float = 0.0
    """Of a host besides its devices, per device."""
    measured: Measured | None = None
    remarks: tuple[str, ...] = field(default=())
    """What was not said and is assumed, a sentence each."""

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return -(-self.workers // self.per_host)

    def of(self, workers: int) -> "Machine":
        """The same hosts, more or fewer of them."""
        return replace(self, workers=workers)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A device and what hosts of it usually have."""

    device: Device
    per_host: int
    intra: Link
    inter_gbit: float


NVLINK_ACHIEVED = 0.8
"""Of NVLink's rate: NCCL's tests show bus bandwidths of 230 to 240 of 300 GB/s on A100s and 360 of 450 on H100s."""
PCIE_ACHIEVED = 0.7
NETWORK_ACHIEVED = 0.7
"""Of a network's rate, for large tensors beside computing; NCCL's own tests, with nothing beside, show up to 0.9."""
NETWORK_LATENCY_S = 12e-6
"""Of a hop over InfiniBand or RoCE, of NCCL's Simple protocol; what NCCL's own model has is 14 µs."""
ETHERNET_LATENCY_S = 30e-6
"""Of a hop over TCP, assumed below 100 Gbit/s a host."""
RDMA_FROM_GBIT = 100.0
NVLINK_LATENCY_S = 3e-6
PCIE_LATENCY_S = 8e-6
SHARED_MEMORY_LATENCY_S = 10e-6

_NVIDIA = "NVIDIA's data sheet; dense, without sparsity"
_AMD = "AMD's data sheet; dense, without sparsity"


def _gpu(
    name: str,
    fp32: float,
    memory_gb: float,
    memory_tb_per_s: float,
    watts: float,
    products_share: float = 0.8,
    source: str = _NVIDIA,
    **tera: float,
) -> Device:
    """A device by its figures; what it does in bf16 it does in fp16."""
    rates = {"fp32": fp32, **tera}
    if "bf16" in rates:
        rates["fp16"] = rates["bf16"]
    flops = {precision: value * _TERA for precision, value in rates.items()}
    return Device(name, flops, memory_gb * GB, memory_tb_per_s * 1e12, watts, source, products_share=products_share)


def _fabric(gb_per_s: float) -> Link:
    return Link("Infinity Fabric", gb_per_s * GB, NVLINK_LATENCY_S, PCIE_ACHIEVED)


def _nvlink(gb_per_s: float) -> Link:
    return Link("NVLink", gb_per_s * GB, NVLINK_LATENCY_S, NVLINK_ACHIEVED)


def _pcie(generation: int) -> Link:
    return Link(f"PCIe {generation}.0", 16e9 * 2 ** (generation - 3), PCIE_LATENCY_S, PCIE_ACHIEVED)


_KINDS = {
    "b200": _Kind(_gpu("b200", 75, 180, 7.7, 1000, 0.7, tf32=1125, bf16=2250, fp8=4500), 8, _nvlink(900), 3200),
    "h200": _Kind(_gpu("h200", 67, 141, 4.8, 700, 0.7, tf32=494.7, bf16=989.4, fp8=1979), 8, _nvlink(450), 3200),
    "gh200": _Kind(_gpu("gh200", 67, 96, 4.0, 700, 0.7, tf32=494.7, bf16=989.4, fp8=1979), 4, _nvlink(450), 800),
    "h100": _Kind(_gpu("h100", 67, 80, 3.35, 700, 0.7, tf32=494.7, bf16=989.4, fp8=1979), 8, _nvlink(450), 3200),
    "h800": _Kind(_gpu("h800", 67, 80, 3.35, 700, 0.7, tf32=494.7, bf16=989.4, fp8=1979), 8, _nvlink(200), 3200),
    "h100-pcie": _Kind(_gpu("h100-pcie", 51, 80, 2.0, 350, 0.7, tf32=378, bf16=756, fp8=1513), 8, _pcie(5), 400),
    "a100-80": _Kind(_gpu("a100-80", 19.5, 80, 2.039, 400, 0.86, tf32=156, bf16=312), 8, _nvlink(300), 1600),
    "a100-40": _Kind(_gpu("a100-40", 19.5, 40, 1.555, 400, 0.86, tf32=156, bf16=312), 8, _nvlink(300), 1600),
    "a800": _Kind(_gpu("a800", 19.5, 80, 2.039, 400, 0.86, tf32=156, bf16=312), 8, _nvlink(200), 800),
    "v100-16": _Kind(_gpu("v100-16", 15.7, 16, 0.9, 300, 0.7, fp16=125), 8, _nvlink(150), 100),
    "v100-32": _Kind(_gpu("v100-32", 15.7, 32, 0.9, 300, 0.7, fp16=125), 8, _nvlink(150), 100),
    "p100": _Kind(_gpu("p100", 10.6, 16, 0.732, 300, fp16=21.2), 8, _nvlink(80), 50),
    "p100-pcie": _Kind(_gpu("p100-pcie", 9.3, 16, 0.732, 250, fp16=18.7), 4, _pcie(3), 25),
    "k80": _Kind(_gpu("k80", 4.1, 12, 0.24, 150), 8, _pcie(3), 20),
    "t4": _Kind(_gpu("t4", 8.1, 16, 0.32, 70, 0.6, fp16=65), 4, _pcie(3), 50),
    "l4": _Kind(_gpu("l4", 30.3, 24, 0.3, 72, 0.6, tf32=60, bf16=121, fp8=242), 8, _pcie(4), 100),
    "a10g": _Kind(_gpu("a10g", 31.2, 24, 0.6, 300, tf32=35, bf16=70), 8, _pcie(4), 100),
    "a6000": _Kind(_gpu("a6000", 38.7, 48, 0.768, 300, tf32=77.4, bf16=154.8), 8, _pcie(4), 100),
    "l40s": _Kind(_gpu("l40s", 91.6, 48, 0.864, 350, 0.7, tf32=183, bf16=362, fp8=733), 8, _pcie(4), 400),
    "rtx3090": _Kind(_gpu("rtx3090", 35.6, 24, 0.936, 350, tf32=35.6, bf16=71), 4, _pcie(4), 10),
    "rtx4090": _Kind(_gpu("rtx4090", 82.6, 24, 1.008, 450, tf32=82.6, bf16=165.2, fp8=330), 4, _pcie(4), 10),
    "mi250x": _Kind(_gpu("mi250x", 95.7, 128, 3.277, 560, 0.5, _AMD, bf16=383), 4, _fabric(150), 800),
    "mi300x": _Kind(_gpu("mi300x", 163.4, 192, 5.3, 750, 0.58, _AMD, bf16=1307.4, fp8=2614.9), 8, _fabric(448), 3200),
    "cpu": _Kind(
        Device(
            "cpu",
            {"fp32": 1.2e12, "bf16": 1.2e12, "fp16": 1.2e12},
            64 * GB,
            80e9,
            150.0,
            "16 cores of 2.4 GHz with two 512-bit multiply-adds each; say what yours are, as TOML, or measure",
            "cpu",
        ),
        1,
        Link("shared memory", 8e9, SHARED_MEMORY_LATENCY_S),
        10,
    ),
}
DEVICES: Mapping[str, Device] = {name: kind.device for name, kind in _KINDS.items()}
"""Public figures, by the names that `named` takes."""

_ALIASES = {"a100": "a100-80", "v100": "v100-16", "h100-sxm": "h100", "p100-sxm2": "p100", "mi300": "mi300x"}

_NAME = re.compile(
    r"(?:(?P<workers>\d+)\s*x\s*)?(?P<device>[a-z][\w-]*)(?:\s*/\s*(?P<per_host>\d+))?"
    r"(?:\s*@\s*(?P<rate>[\d.]+)\s*(?P<unit>[gmt])b(?:it)?(?:/s|ps)?)?",
    re.IGNORECASE,
)


def device_key(text: str) -> str | None:
    """The name in the table of what somebody calls a device, as "NVIDIA A100-SXM4-40GB" or "h100_80gb"; or None."""
    plain = re.sub(r"[\s_]+", "-", text.strip().lower())
    if plain in _KINDS:
        return plain
    if plain in _ALIASES:
        return _ALIASES[plain]
    squeezed = re.sub(r"[^a-z0-9]", "", plain)
    memory = re.search(r"(\d+)gb?(?![a-z])", plain)
    for name in sorted(_KINDS, key=len, reverse=True):
        stem, _, size = name.partition("-")
        if stem != "cpu" and stem in squeezed:
            if size == "pcie":
                if "pcie" in squeezed:
                    return name
            elif size and memory and memory.group(1) in ("16", "32", "40", "80"):
                if memory.group(1) == size:
                    return name
            elif not size or _ALIASES.get(stem) == name:
                return name
    return "cpu" if "cpu" in squeezed or "xeon" in squeezed or "epyc" in squeezed else None


def named(text: str) -> Machine:
    """The machine that `--on` names: WORKERSxDEVICE/PER_HOST@RATE, of which all but the device may be left out."""
    found = _NAME.fullmatch(text.strip())
    key = device_key(found["device"]) if found else None
    if found is None or key is None:
        word = found["device"].lower() if found else text
        near = get_close_matches(word, [*_KINDS, *_ALIASES], n=3, cutoff=0.5)
        raise UsageError(
            f"--on {text!r} names no machine that is known{': near are ' + ', '.join(near) if near else ''}. Give "
            "WORKERSxDEVICE/PER_HOST@RATE, as 64xH100/8@400Gb, with one of "
            f"{', '.join(_KINDS)}; or a TOML file (docs/plan.md)."
        )
    kind = _KINDS[key]
    workers = int(found["workers"] or kind.per_host)
    per_host = int(found["per_host"] or min(kind.per_host, workers))
    gbit = float(found["rate"]) * {"g": 1.0, "m": 1e-3, "t": 1e3}[found["unit"].lower()] if found["rate"] else None
    return assembled(key, workers, per_host, gbit, name=text.strip())


def assembled(key: str, workers: int, per_host: int, gbit: float | None = None, *, name: str = "") -> Machine:
    """So many devices of the table; `gbit` is a host's rate to the others."""
    kind = _KINDS[key]
    if not (1 <= workers <= _MOST_WORKERS and per_host >= 1) or (gbit is not None and gbit <= 0):
        raise UsageError(
            f"a machine of {workers} workers, {per_host} a host, at {gbit} Gbit/s cannot be: all of them must be "
            f"above 0, and workers at most {_MOST_WORKERS}."
        )
    remarks = []
    if gbit is None:
        gbit = kind.inter_gbit
        if workers > per_host:
            remarks.append(f"the network is not said: {gbit:g} Gbit/s a host is assumed, usual for {key}.")
    return Machine(
        name or f"{workers}x{key}/{per_host}@{gbit:g}Gb",
        kind.device,
        workers,
        min(per_host, workers),
        kind.intra,
        network(gbit),
        host_watts=0.35 * kind.device.watts,
        remarks=tuple(remarks),
    )


def network(gbit: float, name: str = "") -> Link:
    """A network of so many Gbit/s a host."""
    latency = NETWORK_LATENCY_S if gbit >= RDMA_FROM_GBIT else ETHERNET_LATENCY_S
    return Link(name or f"{gbit:g} Gbit/s", gbit * GB / 8, latency, NETWORK_ACHIEVED)


def from_toml(path: Path) -> Machine:
    """A machine of one's own.

    workers = 64
    per_host = 8
    price_per_hour = 2.5           # of one device; may be left out, as all that follows
    [device]
    like = "h100"                  # what is not said is as of this one
    memory_gb = 80
    memory_gb_per_s = 3350
    watts = 700
    flops = { bf16 = 989e12, fp32 = 67e12 }
    [intra]
    gb_per_s = 450
    latency_us = 3
    achieved = 0.8
    [inter]
    gbit_per_s = 400               # of one host
    latency_us = 12
    """
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
        return _from_table(given, path.stem)
    except OSError as error:
        raise UsageError(f"'{path}' cannot be read ({error.strerror}): give a TOML file of a machine.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"'{path}' does not describe a machine ({type(error).__name__}: {error}). docs/plan.md has an example."
        ) from error


def _from_table(given: dict[str, object], name: str) -> Machine:
    device, intra, inter = (_table(given, each) for each in ("device", "intra", "inter"))
    like = str(device.get("like", "cpu"))
    key = device_key(like)
    if key is None:
        raise ValueError(f"there is no device {like!r} to be like")
    per_host = int(_number(given, "per_host", _KINDS[key].per_host))
    base = assembled(key, int(_number(given, "workers", per_host)), per_host, name=name)
    flops = {str(each): float(value) for each, value in _table(device, "flops").items()}  # type: ignore[arg-type]
    unknown = set(flops) - {"fp32", "tf32", "bf16", "fp16", "fp8"}
    if unknown:
        raise ValueError(f"flops of {', '.join(sorted(unknown))}; known are fp32, tf32, bf16, fp16, fp8")
    own = replace(
        base.device,
        name=str(device.get("name", base.device.name)),
        flops={**base.device.flops, **flops},
        memory_bytes=_number(device, "memory_gb", base.device.memory_bytes / GB) * GB,
        memory_bytes_per_s=_number(device, "memory_gb_per_s", base.device.memory_bytes_per_s / GB) * GB,
        watts=_number(device, "watts", base.device.watts),
        source=f"{name}.toml",
    )
    return replace(
        base,
        device=own,
        intra=replace(
            base.intra,
            bytes_per_s=_number(intra, "gb_per_s", base.intra.bytes_per_s / GB) * GB,
            latency_s=_number(intra, "latency_us", base.intra.latency_s * 1e6) / 1e6,
            achieved=_number(intra, "achieved", base.intra.achieved),
        ),
        inter=replace(
            base.inter,
            bytes_per_s=_number(inter, "gbit_per_s", base.inter.bytes_per_s * 8 / GB) * GB / 8,
            latency_s=_number(inter, "latency_us", base.inter.latency_s * 1e6) / 1e6,
            achieved=_number(inter, "achieved", base.inter.achieved),
        ),
        price_per_hour=_number(given, "price_per_hour", 0.0) or None,
        remarks=() if inter else base.remarks,
    )


def _table(given: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = given.get(name, {})
    if not isinstance(value, dict):
        raise TypeError(f"{name} is {value!r}, and is to be a table")
    return value


def _number(given: Mapping[str, object], name: str, default: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{name} is {value!r}, and is to be a number of 0 or more")
    return float(value)
