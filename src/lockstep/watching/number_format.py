"""Numbers as people read them, with units: on the page of a run, in its trace and in the terminal."""

import math
from collections.abc import Sequence

NONE = "–"  # noqa: RUF001
"""Stands for a number that is not known."""


def number(value: float | None) -> str:
    """About three digits: 1,800, 64.2, 0.0031, 2.1e-07."""
    if value is None or not math.isfinite(value):
        return NONE
    size = abs(float(f"{value:.3g}"))
    if size >= 1e7 or 0 < size < 1e-4:
        return f"{value:.1e}"
    if size >= 100 or value == 0:
        return f"{value:,.0f}"
    digits = max(0, 2 - math.floor(math.log10(size)))
    return f"{value:.{digits}f}"


def milliseconds(value: float | None) -> str:
    """A duration in the unit in which it is easiest to read."""
    if value is None or not math.isfinite(value):
        return NONE
    if value >= 10_000:
        return duration(value / 1e3)
    return f"{number(value)} ms" if value >= 0.1 or value == 0 else f"{number(value * 1e3)} µs"


def duration(seconds: float) -> str:
    """A long time: 41 s, 3 min 5 s, 2 h 40 min, 3 d 4 h."""
    if seconds < 60:
        return f"{number(seconds)} s"
    whole = round(seconds)
    for size, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // part} {part_name}"
    return f"{whole} s"


def percent(part: float | None) -> str:
    """A part of one: 84 %, 3.1 %."""
    if part is None or not math.isfinite(part):
        return NONE
    return f"{100 * part:.1f} %" if 0 < abs(part) < 0.0995 else f"{100 * part:.0f} %"


def size(num_bytes: float | None) -> str:
    """Bytes in the unit in which they have one to three digits: 42.8 MB."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return NONE
    for unit, letters in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit:
            return f"{number(num_bytes / unit)} {letters}"
    return f"{num_bytes:.0f} B"


def count(value: float) -> str:
    """A large count: 10.7 M, 7.0 B, 950."""
    for unit, letter in ((1e9, "B"), (1e6, "M")):
        if value >= unit:
            return f"{number(value / unit)} {letter}"
    return f"{value:,.0f}"


def counted(amount: int, noun: str) -> str:
    """One step, 300 steps."""
    return f"1 {noun}" if amount == 1 else f"{amount:,} {noun}s"


def some(names: Sequence[str], total: int = 0) -> str:
    """The first three of `names`, and how many more there are: of `total`, where these are not all."""
    more = max(total, len(names)) - min(3, len(names))
    return ", ".join(map(repr, names[:3])) + (f" and {more} more" if more > 0 else "")
