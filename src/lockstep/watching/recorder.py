"""Hears what the engine says, and cuts it into steps. All that watching does on the path of a step is here.

A step runs from the end of an optimizer's step to the end of the next one that follows a backward pass. The first one
begins with the first thing heard. Hearing an event costs an append (and on CUDA the record of a timing event); what
becomes of a step is worked out in the background, by another thread that takes it from here: `take`.

Who writes what: the training threads append to the step in hand and put closed ones into a deque; the background
thread only pops from its other end. Both are single operations of the interpreter, so nobody holds a lock.
"""

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lockstep.events import Event, Events, Kind
from lockstep.watching.contention import Contention
from lockstep.watching.stamps import Stamp, Stamps

_MOST_CLOSED = 10_000
"""So many steps wait for the background thread at most; where it is gone or starved, older ones are dropped."""


@dataclass(slots=True)
class Raw:
    """A step as it was heard."""

    step: int
    begin: Stamp
    heard: list[tuple[Event, Stamp]] = field(default_factory=list)
    noted: dict[str, float | Tensor] = field(default_factory=dict)
    """What was logged: read, on a GPU, only when its turn has come."""
    taken_ns: int = 0
    """What communication took of the backward passes."""


class Recorder:
    """The steps of this worker, as they are heard."""

    def __init__(
        self, events: Events, stamps: Stamps, at_end: Callable[[Raw], None], contention: Contention | None
    ) -> None:
        self._events, self._stamps = events, stamps
        self._contention = contention
        """What measures how the host's threads get into each other's way, where backward passes run on the host."""
        self._backward_ns = 0
        """When the backward pass began that sends."""
        self._at_end = at_end
        """Called with every step that has just ended, in the training thread."""
        self._closed: collections.deque[Raw] = collections.deque(maxlen=_MOST_CLOSED)
        self._raw: Raw | None = None
        self._has_passed = False
        """Whether a backward pass has ended in this step."""
        self._depth = 0
        """How many optimizer steps are under way: optimizers may call others."""
        self.steps = 0
        """How many steps have ended."""
        self._ends = [
            events.subscribe(self._hear),
            register_optimizer_step_pre_hook(self._before_update).remove,
            register_optimizer_step_post_hook(self._after_update).remove,
        ]

    def close(self) -> None:
        """Stop listening."""
        for end in self._ends:
            end()
        self._ends.clear()
        if self._contention is not None:
            self._contention.close()

    def take(self, *, all_of_them: bool = False) -> list[Raw]:
        """Steps that have ended since the last call. The newest is kept back, since something may be noted about it."""
        taken = []
        while len(self._closed) > (0 if all_of_them else 1):
            taken.append(self._closed.popleft())
        return taken

    def forget(self) -> None:
        """Drop what was heard of the step under way."""
        self._raw = None
        self._has_passed = False

    def note(self, values: dict[str, float | Tensor]) -> None:
        """Add to the step under way, or between two, to the one that has just ended."""
        if self._raw is not None and self._raw.heard:
            self._raw.noted.update(values)
        elif self._closed:
            self._closed[-1].noted.update(values)

    def _hear(self, event: Event) -> None:
        stamp = self._stamps.now(event)
        if self._raw is None:
            self._raw = Raw(self.steps + 1, stamp)
        self._raw.heard.append((event, stamp))
        if self._contention is not None:
            self._see_backward(event, self._contention)
        if event.kind is Kind.SYNCED or event.kind is Kind.ENDED:
            self._has_passed = True
        elif event.kind is Kind.UPDATED and self._has_passed:
            self._close_step(stamp)

    def _see_backward(self, event: Event, contention: Contention) -> None:
        if event.kind is Kind.BACKWARD:
            self._backward_ns = event.time_ns
            contention.begin()
        elif event.kind is Kind.WAITING:
            assert self._raw is not None
            lasted = max(1, event.time_ns - self._backward_ns)
            stolen = contention.end()
            # Threads get into the way of filling buckets as they do of the rest: not to be counted twice.
            self._raw.taken_ns += event.spent_ns + int(stolen * max(0.0, 1 - event.spent_ns / lasted))

    def _close_step(self, stamp: Stamp) -> None:
        raw = self._raw
        assert raw is not None
        self.steps += 1
        self._has_passed = False
        self._raw = Raw(self.steps + 1, stamp)
        self._at_end(raw)
        self._closed.append(raw)

    def _before_update(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._depth += 1
        if self._depth == 1:
            if self._raw is not None and optimizer.param_groups:
                self._raw.noted.setdefault("lr", optimizer.param_groups[0].get("lr", 0.0))
            self._events.emit(Kind.OPTIMIZER)

    def _after_update(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._depth = max(0, self._depth - 1)  # It may have begun before anybody listened.
        if self._depth == 0:
            self._events.emit(Kind.UPDATED)
