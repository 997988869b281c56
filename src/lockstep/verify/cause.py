"""A likely cause of a difference, in words for people. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """A likely cause."""

    name: str
    found: str
    """What was seen that points to it."""
    mend: str
    """What to do."""


def rates_text(rates: Sequence[float]) -> str:
    """Learning rates of an optimizer's groups, each once."""
    return " and ".join(dict.fromkeys(f"{rate:g}" for rate in rates)) or "unknown"


def listed(numbers: Sequence[int]) -> str:
    """As `0, 1 and 3`."""
    *others, last = [str(number) for number in numbers]
    return f"{', '.join(others)} and {last}" if others else last


def first_of(names: Sequence[str]) -> str:
    """The first name, and how many more there are."""
    return f"'{names[0]}'" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
