"""Where the time of a run went, in a few numbers and in a line."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lockstep.watching.record import SHARES


@dataclass(frozen=True, slots=True)
class Summary:
    """A run so far: the mean over workers and steps, the first three left out, in milliseconds a step."""

    steps: int = 0
    """How many steps have been seen so far."""
    wall_ms: float = 0.0
    """A step. The shares below, except `hidden_ms`, add up to it."""
    data_ms: float = 0.0
    """Waiting for the next batch to be loaded."""
    copy_ms: float = 0.0
    """Moving batches to the device."""
    forward_ms: float = 0.0
    """In the model and the loss."""
    backward_ms: float = 0.0
    """In the backward pass, with what of the communication is hidden under it."""
    exposed_ms: float = 0.0
    """Communication that nothing hid."""
    waiting_ms: float = 0.0
    """Waiting for other workers' gradients."""
    optimizer_ms: float = 0.0
    """In the optimizer's step."""
    other_ms: float = 0.0
    """Everything else in the loop."""
    hidden_ms: float = 0.0
    """Communication under the backward pass; not part of the sum."""
    samples_per_s: float | None = None
    """Of all workers together."""
    efficiency: float | None = None
    """T_1 / T_N, from 0 to 1: see watching/scaling.py."""
    noise_scale: float | None = None
    """In samples: see watching/noise.py."""
    verdict: str = ""
    """Who holds everyone up; empty if nobody does."""

    def to_json(self) -> dict[str, Any]:
        """As it travels."""
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Summary":
        """What `to_json` was made of."""
        return cls(**{each.name: found[each.name] for each in fields(cls) if each.name in found})

    def __str__(self) -> str:
        """One line, and a second one if somebody is slow."""
        parts = [(name, getattr(self, f"{name}_ms")) for name in SHARES]
        shown = [f"{name} {100 * ms / self.wall_ms:.0f} %" for name, ms in parts if ms >= 0.005 * self.wall_ms > 0]
        line = f"{self.steps} steps, {self.wall_ms:.1f} ms each: {', '.join(shown)}"
        if self.hidden_ms >= 0.005 * self.wall_ms > 0:
            line += f"; {self.hidden_ms:.1f} ms of communication hidden"
        if self.efficiency is not None:
            line += f"; efficiency {100 * self.efficiency:.0f} %"
        return "\n".join(filter(None, (line, self.verdict)))
