"""Which wire pays on this machine: what `wire="auto"` measures, how it predicts a pass, and what it chooses.

Everything here is computed from numbers, the same on every worker; `replica/choosing.py` measures them and tries what
is proposed here. A pass is predicted as a line of buckets: each is ready at its moment of the backward pass, is encoded
and sent when those before it are through, and the pass ends with the last of them, or with the backward pass itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.wire.full import Full
from lockstep.wire.half import Half
from lockstep.wire.int8 import Int8
from lockstep.wire.low_rank import LowRank
from lockstep.wire.protocol import BucketShape, Wire, require
from lockstep.wire.sign import Sign
from lockstep.wire.sums import SumWire
from lockstep.wire.top_k import TopK

LOSSES: tuple[tuple[float, Wire], ...] = (
    (0.0, Full()),
    (0.01, Half("bf16")),
    (0.01, Int8()),
    (0.1, Sign()),
    (0.25, LowRank(4)),
    (1.0, TopK(0.01)),
)
"""What each wire may cost: by how much the final loss was higher at most, as a share, in docs/benchmarks.md."""
WORTH = 0.03
"""A wire that loses more must be faster by this share than one that loses less."""


@dataclass(frozen=True, slots=True)
class Auto:
    """Measures, in the first steps, what encoding and sending cost here, and picks what makes the pass fastest.

    budget: by how much the final loss may be higher, as a share: 0.01 allows Half and Int8, 0.1 Sign as well, 0.25
        LowRank(4), 1 TopK(0.01), 0 nothing but Full. What wires cost was measured on a small language model in a short
        training from nothing (docs/benchmarks.md), which is hard on them; on another one it may be more or less.
    candidates: wires to choose from, from the least lossy on, instead of those that the budget allows.
    trial_steps: how many steps each of the most promising is tried for, after one to get warm.

    Volume and memory: those of what it picks, bucket by bucket. Exactness: that of the most lossy wire picked; `Full`
    where nothing helps. What a wire that was tried has not sent yet is sent by the one that follows it. The choice
    depends on the machine, and so do the bits.
    """

    budget: float = 0.01
    candidates: tuple[Wire, ...] | None = None
    trial_steps: int = 3

    bucket_mb = 100

    def __post_init__(self) -> None:
        fits = isinstance(self.budget, int | float) and self.budget >= 0
        require(fits, "Auto", f"budget={self.budget!r}", "It is a share of the loss, such as 0.01.")
        require(self.trial_steps >= 1, "Auto", f"trial_steps={self.trial_steps!r}", "It takes at least one.")
        require(self.candidates != (), "Auto", "no candidates", "Give at least one wire, or leave them out.")

    def wires(self) -> tuple[Wire, ...]:
        """What may be chosen, from the least lossy on."""
        if self.candidates is not None:
            return self.candidates
        return tuple(wire for loss, wire in LOSSES if loss <= self.budget)


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs."""

    latency_s: float
    """Of one without content."""
    bytes_per_s: float
    """Sent by each worker."""

    def seconds(self, wire: Wire, bucket: BucketShape, size: int) -> float:
        """What the messages of one bucket take."""
        num_messages = 1 if isinstance(wire, SumWire) else 2
        return num_messages * self.latency_s + wire.bytes_promised(bucket, size) / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Costs:
    """What a pass is made of; the mean over the workers, so that all predict alike."""

    ready_s: tuple[float, ...]
    """When each bucket was full, from the beginning of the backward pass on."""
    backward_s: float
    """How long that pass takes without any sending."""
    encode_s: tuple[tuple[float, ...], ...]
    """For each wire and bucket: encoding, combining and decoding."""
    link_s: tuple[tuple[float, ...], ...]
    """For each wire and bucket: its messages."""
    steals: bool
    """Whether encoding takes the time of those who compute, as on a CPU."""

    def predict(self, chosen: Sequence[int]) -> float:
        """How long the pass takes if bucket b travels by wire `chosen[b]`."""
        stolen = through = 0.0
        for bucket, wire in enumerate(chosen):
            begin = max(self.ready_s[bucket] + stolen, through)
            encoding = self.encode_s[wire][bucket]
            through = begin + encoding + self.link_s[wire][bucket]
            stolen += encoding if self.steals else 0.0
        return max(through, self.backward_s + stolen)

    def exposed(self, chosen: Sequence[int]) -> float:
        """How much of that comes after the backward pass."""
        return max(0.0, self.predict(chosen) - self.backward_s)


def proposals(costs: Costs, most: int = 3) -> list[tuple[int, ...]]:
    """What is worth trying, as a wire for each bucket: all by the first wire, then the most promising, at most so many.

    Promising is each wire for all buckets, and a mixture that no change of a single bucket makes better.
    """
    num_buckets, num_wires = len(costs.ready_s), len(costs.encode_s)
    uniform = [(wire,) * num_buckets for wire in range(num_wires)]
    best = min(uniform, key=costs.predict)
    mixed = _improve(costs, best, num_wires)
    found = sorted([*uniform[1:], mixed], key=costs.predict)
    worthy = [each for each in found if costs.predict(each) < costs.predict(uniform[0])]
    return list(dict.fromkeys([uniform[0], *worthy]))[:most]


def _improve(costs: Costs, start: tuple[int, ...], num_wires: int) -> tuple[int, ...]:
    chosen = list(start)
    while True:
        before = costs.predict(chosen)
        for bucket in range(len(chosen)):
            options = [[*chosen[:bucket], wire, *chosen[bucket + 1 :]] for wire in range(num_wires)]
            chosen = min(options, key=costs.predict)
        if costs.predict(chosen) > (1 - WORTH) * before:
            return tuple(chosen)


def best_of(tried: Sequence[tuple[tuple[int, ...], float]]) -> tuple[int, ...]:
    """Of what was tried for so many seconds a pass: the fastest, but a less lossy one if that is nearly as fast."""
    fastest = min(seconds for _, seconds in tried)
    near = [(max(chosen), seconds, chosen) for chosen, seconds in tried if seconds <= fastest * (1 + WORTH)]
    return min(near)[2]
