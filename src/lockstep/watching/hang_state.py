"""What a worker tells the others of itself, once a second and when it is called: where it is, and what it waits for."""

import dataclasses
import enum
import json
from dataclasses import dataclass
from typing import Any

from lockstep.watching.hang_queue import Queued


class Phase(enum.Enum):
    """Where a worker is in its step, in words that follow its name."""

    BETWEEN = "between two steps"
    """Loading, updating, evaluating, or in the script's own code."""
    FORWARD = "forward"
    """The model was called, and its backward pass has not begun."""
    ACCUMULATING = "accumulating"
    """The same under `no_sync`, where the backward pass sends nothing."""
    BACKWARD = "backward"
    """In the backward pass."""
    REDUCING = "reducing"
    """The backward pass has ended here, and what has not arrived is waited for."""
    LEFT = "left"
    """The worker is no longer watched: its training has ended."""


@dataclass(frozen=True, slots=True)
class State:
    """One worker at one moment."""

    rank: int
    beat: int
    """How often this worker has told of itself."""
    clock_s: float
    """When, on the monotonic clock of the worker's host."""
    time_s: float
    """The same in seconds since 1970."""
    answers: int
    """The last call for a report that the worker had heard."""
    step: int
    """How many synchronised backward passes have ended."""
    phase: Phase
    phase_s: float
    """Since how many seconds it has sent no bucket, and has been in this phase."""
    launched: int
    """How many buckets of this step the worker has sent."""
    num_buckets: int
    bucket: int
    """The bucket that the worker waits for, or -1."""
    waits: str
    """What the worker waits in, in words; empty if it does not wait."""
    waits_s: float
    """Since how many seconds."""
    lacking: tuple[str, ...]
    """Parameters of the next bucket whose gradients this worker has not computed yet, the first few."""
    num_lacking: int
    """How many there are."""
    at: str
    """Where its main thread is, in the script's own code."""
    calls: dict[str, int]
    """How many collectives the worker has called, by group."""
    queued: tuple[Queued, ...] = ()
    """The last of them on a GPU, once the worker has waited for a while."""

    @property
    def position(self) -> tuple[int, int]:
        """How far the worker has come: steps, then buckets sent."""
        return self.step, self.launched

    def pack(self) -> bytes:
        """The bytes that `unpack` reads."""
        fields = dataclasses.asdict(self)
        return json.dumps(fields | {"phase": self.phase.value}).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> "State":
        """The state that `packed` was made from."""
        fields: dict[str, Any] = json.loads(packed)
        queued = tuple(Queued(**call) for call in fields["queued"])
        return cls(**fields | {"phase": Phase(fields["phase"]), "lacking": tuple(fields["lacking"]), "queued": queued})
