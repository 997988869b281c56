"""When workers that train by themselves exchange, and over which wire."""

from dataclasses import dataclass
from typing import Any

from lockstep.errors import UsageError
from lockstep.wire import Wire


@dataclass(frozen=True, slots=True)
class Rhythm:
    """When workers exchange, and how."""

    every: int
    """Steps of a round."""
    delay: int
    """Steps between sending and receiving; 0: nothing is computed meanwhile."""
    wire: Wire | None
    averages_state: bool = False
    """Whether the optimizers' state is exchanged as well."""


def rhythm(
    name: str, every: object, wire: Any, overlap: object, delay: object, average_state: object = False
) -> Rhythm:
    """What the strategy `name` was given; raises UsageError if that cannot be right."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise UsageError(f"{name}(every={every!r}): the workers exchange every so many steps, 1 or more.")
    if not isinstance(delay, int) or isinstance(delay, bool) or not 1 <= delay <= every:
        raise UsageError(
            f"{name}(every={every}, delay={delay!r}): an exchange must have ended when the next one begins, so delay "
            f"is 1 to {every} steps."
        )
    if wire is not None and not all(callable(getattr(wire, method, None)) for method in ("open", "bytes_promised")):
        raise UsageError(f"{name}(wire={wire!r}): use one of lockstep.wire, as lockstep.wire.Int8(), or None.")
    if average_state and overlap:
        raise UsageError(
            f"{name}(overlap=True, average_state=True): state cannot be averaged some steps late. Use one."
        )
    return Rhythm(every, delay if overlap else 0, wire, bool(average_state))
