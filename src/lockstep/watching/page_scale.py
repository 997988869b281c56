"""Scales of charts: round ticks, and values thinned to what a chart can show. Pure functions."""

import math
from dataclasses import dataclass

import numpy as np

from lockstep.watching.report import Numbers

_LEAST, _MOST = 1e-290, 1e290
"""Values beyond are taken for zero and for infinite, or their scale could not be computed."""
_LOG_FROM = 100.0
"""Values that span more than this factor are shown on a logarithmic scale."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """Values per column of a chart; a column without any is left out."""

    x: Numbers
    low: Numbers
    mean: Numbers
    high: Numbers

    @property
    def is_thinned(self) -> bool:
        """Whether a column stands for several values."""
        return bool(np.any(self.low != self.high))


@dataclass(frozen=True, slots=True)
class Scale:
    """A range of values, linear or logarithmic, and its ticks."""

    low: float
    high: float
    is_log: bool
    ticks: tuple[float, ...]

    def place(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high end."""
        if self.is_log:
            low, high, value = math.log(self.low), math.log(self.high), math.log(max(value, self.low))
        else:
            low, high = self.low, self.high
        return min(1.0, max(0.0, (value - low) / (high - low)))


def thinned(x: Numbers, y: Numbers, columns: int) -> Envelope:
    """Lowest, mean and highest value per column; values that are not finite, or nearly so, are left out."""
    there = np.abs(y) < _MOST
    x, y = x[there], y[there]
    if x.size <= columns:
        return Envelope(x, y, y, y)
    place = np.minimum((x - x[0]) / (x[-1] - x[0] or 1.0) * columns, columns - 1).astype(np.int64)
    begins = np.flatnonzero(np.diff(place, prepend=-1))
    counts = np.diff(begins, append=x.size)
    return Envelope(
        x=np.add.reduceat(x, begins) / counts,
        low=np.minimum.reduceat(y, begins),
        mean=np.add.reduceat(y, begins) / counts,
        high=np.maximum.reduceat(y, begins),
    )


def scale(low: float, high: float, *, from_zero: bool = False, log_allowed: bool = True) -> Scale:
    """A scale that holds the range, from zero if asked for or if the range reaches down near it."""
    if log_allowed and low > 0 and high / low >= _LOG_FROM:
        return _log_scale(low, high)
    if low >= 0 and (from_zero or low < 0.25 * high):
        low = 0.0
    if high - low <= max(1e-9 * max(abs(low), abs(high)), _LEAST):
        middle, around = (low + high) / 2, max(abs(high) / 2, _LEAST)
        low, high = (middle - around, middle + around) if abs(middle) > _LEAST else (0.0, 1.0)
    step = _round_step(high - low)
    begin, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(step * place for place in range(begin, end + 1))
    return Scale(ticks[0], ticks[-1], False, ticks)


def ticks_within(low: float, high: float, most: int = 5) -> list[float]:
    """Round values within the range, at most about `most`."""
    if high <= low:
        return [low]
    step = _round_step(high - low, most)
    return [step * place for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _log_scale(low: float, high: float) -> Scale:
    begin, end = math.floor(math.log10(max(low, _LEAST))), math.ceil(math.log10(high))
    every = max(1, -(-(end - begin) // 4))
    ticks = tuple(10.0**power for power in range(begin, end + 1, every))
    return Scale(10.0**begin, 10.0**end, True, ticks)


def _round_step(span: float, most: int = 4) -> float:
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
