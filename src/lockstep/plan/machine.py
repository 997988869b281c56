"""What it is trained on: devices, how many, how many a host, and the links within and between hosts."""

from collections.abc import Mapping
from dataclasses import dataclass


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


@dataclass(frozen=True, slots=True)
class Link:
    """What workers talk over."""

    name: str
    bytes_per_s: float
    """One way. Within a host what one worker can send, between hosts what one host can send."""
    latency_s: float
    """Of one message, from one worker to the next, without its bytes."""


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

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return -(-self.workers // self.per_host)
