"""Random numbers that all workers draw in common, while each one's own generators stand still."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import torch


class Generators:
    """A common state of the process's global generators, in force inside `with`.

    Samplers and streams draw from the global generators of torch, numpy and Python, whose states differ
    between workers. Inside `with`, these hold a state that began at `seed` and goes on where the last `with`
    left it; outside, the worker's own, which never notices. Generators of GPUs are left alone.

    torch_only: leave numpy's and Python's alone too. In and out costs 2 µs for torch's generator and 200 µs
    for the other two, which would show in steps of a millisecond.
    """

    def __init__(self, seed: int, *, torch_only: bool = False) -> None:
        self._libraries = (_TORCH,) if torch_only else (_TORCH, _NUMPY, _PYTHON)
        self._inside = [library.seeded(seed) for library in self._libraries]
        self._outside: list[Any] = []

    def __enter__(self) -> None:
        self._outside = self._swap(self._inside)

    def __exit__(self, *_: object) -> None:
        self._inside = self._swap(self._outside)

    def _swap(self, states: list[Any]) -> list[Any]:
        """Put `states` in force; returns those that were."""
        before = [library.get() for library in self._libraries]
        for library, state in zip(self._libraries, states, strict=True):
            library.set(state)
        return before


@dataclass(frozen=True, slots=True)
class _Library:
    """A library with a global generator."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    seeded: Callable[[int], Any]
    """The state that a seed stands for, found without touching the global generator."""


_TORCH = _Library(
    torch.get_rng_state, torch.set_rng_state, lambda seed: torch.Generator().manual_seed(seed).get_state()
)
# Exchanging numpy's bit generator would cost next to nothing, but forgets the second of a pair of normal
# numbers when the first has been drawn: the worker's own stream would notice.
_NUMPY = _Library(
    numpy.random.get_state,
    numpy.random.set_state,
    lambda seed: numpy.random.RandomState(seed % 2**32).get_state(),
)
_PYTHON = _Library(random.getstate, random.setstate, lambda seed: random.Random(seed).getstate())
