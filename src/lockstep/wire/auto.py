"""`wire="auto"`: which wire pays on this machine, found out by trying each for a few passes and timing them.

All workers decide from the same numbers, since they exchange what they have measured. Where buckets are laid out anew
(after the first step, when parameters are unfrozen) it all begins again.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import UsageError
from lockstep.wire.blockwise import Int8, Sign
from lockstep.wire.low_rank import LowRank
from lockstep.wire.plain import Full, Half
from lockstep.wire.protocol import BucketShape, Wire, require
from lockstep.wire.reduction import WireReduction
from lockstep.wire.top_k import TopK
from lockstep.world import World

AUTO = "auto"
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
    """Tries, in the first steps, which wires make the pass faster here, and keeps the fastest.

    budget: by how much the final loss may be higher, as a share: 0.01 allows Half and Int8, 0.1 Sign as well, 0.25
        LowRank(4), 1 TopK(0.01), 0 nothing but Full. What wires cost was measured on a small language model in a short
        training from nothing (docs/benchmarks.md), which is hard on them; on another one it may be more or less.
    candidates: wires to choose from, from the least lossy on, instead of those that the budget allows.
    trial_steps: how many steps each of them is tried for, after one to get warm.

    Volume and memory: those of what it picks. Exactness: that of what it picks; `Full` where nothing helps. What a wire
    that was tried has not sent yet is sent by the one that follows it. The choice depends on the machine, and so do
    the bits.
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
class Choice:
    """What was chosen, and why; the same on every worker."""

    wire: Wire
    tried: tuple[tuple[Wire, float], ...]
    """Each wire, and seconds from the beginning of the backward pass until all gradients are in place: the median pass,
    on the slowest worker."""

    def __str__(self) -> str:
        tried = "; ".join(f"{wire} {1e3 * seconds:.1f} ms" for wire, seconds in self.tried)
        return f'wire="auto" chose {self.wire}. Tried, from the beginning of a backward pass to its gradients: {tried}.'


def best_of(tried: Sequence[tuple[Wire, float]]) -> Wire:
    """The fastest of what was tried, from the least lossy on; a less lossy one if that is nearly as fast."""
    fastest = min(seconds for _, seconds in tried)
    return next(wire for wire, seconds in tried if seconds <= fastest * (1 + WORTH))


class ChoosingReduction(WireReduction):
    """Sums of all workers, by the wire that is found to be the fastest."""

    def __init__(self, auto: Auto, world: World, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(auto.wires()[0], world, group, device)
        self._auto, self._world, self._device = auto, world, device
        self._shapes: Mapping[int, BucketShape] = {}
        self._course: Iterator[None] | None = None
        self._began_s = self._pass_s = 0.0
        self.choice: Choice | None = None
        """What was chosen, once it has been."""

    def adopt(self, shapes: Mapping[int, BucketShape]) -> None:
        """Begin anew with these buckets."""
        self._shapes, self.choice = shapes, None
        self._course = self._choose()
        next(self._course, None)

    def _wires(self) -> Sequence[Wire]:
        return self._auto.wires()

    def report(self) -> str:
        """What was chosen, and why."""
        return str(self.choice) if self.choice is not None else 'wire="auto" has not chosen yet: it is measuring.'

    def begin_pass(self) -> None:
        """A pass begins."""
        if self._course is not None:
            self._began_s = self._now_s()

    def end_pass(self) -> None:
        """A pass has ended: go on in the course of choosing."""
        if self._course is not None:
            self._pass_s = self._now_s() - self._began_s
            next(self._course, None)

    def _choose(self) -> Iterator[None]:
        """The course of choosing, one pass after the other."""
        tried = []
        for wire in self._auto.wires():
            self._use(wire)
            yield  # To get warm.
            seconds = []
            for _ in range(self._auto.trial_steps):
                yield
                seconds.append(self._pass_s)
            tried.append((wire, max(self._world.gather_json(median(seconds)))))
        self.choice = Choice(best_of(tried), tuple(tried))
        self._use(self.choice.wire)
        self._course = None

    def _use(self, wire: Wire) -> None:
        self._wire = wire
        super().adopt(self._shapes)

    def _now_s(self) -> float:
        """On a GPU when all that has been queued is done, which only the first steps of a run can bear."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def require_wire(wire: object) -> None:
    """Raise UsageError unless `wire` can carry gradients."""
    if wire is None or wire == AUTO or isinstance(wire, Auto):
        return
    if isinstance(wire, type):
        raise UsageError(f"wire={wire.__name__} is the class: give one of it, as wire=lockstep.wire.{wire.__name__}().")
    if not all(callable(getattr(wire, name, None)) for name in ("open", "bytes_promised")):
        raise UsageError(
            f"wire={wire!r}: use one of lockstep.wire, as lockstep.wire.Half('bf16'), \"auto\", or an object of that "
            "protocol (see lockstep.wire.protocol)."
        )


def reduction_by(wire: Any, world: World, group: dist.ProcessGroup, device: torch.device) -> WireReduction:
    """The reduction for what a user gave as `wire`."""
    if wire == AUTO or isinstance(wire, Auto):
        return ChoosingReduction(Auto() if wire == AUTO else wire, world, group, device)
    return WireReduction(wire, world, group, device)
