"""Random numbers: the global generators alike on every worker, the numbers inside models and loaders each worker's own.

`join(seed=...)` seeds every worker alike, so that models built next are the same, and so is whatever the script draws
from the global generators later (`random_split`, a permutation). Where a wrapped model draws in its forward pass, and
where a sharded loader fetches samples in this process, the worker's own stream is in force (`World.own_stream`).
Without `join(seed=...)`, and on one worker, no generator is touched. Samplers and streams of samples draw from a stream
that all workers have in common.
"""

import functools
import hashlib
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from lockstep.errors import UsageError


def checked(seed: Any) -> int:
    """`seed` as a number that every generator takes; raises UsageError for anything else."""
    try:
        number = operator.index(seed)
    except TypeError:
        number = None
    if number is None or isinstance(seed, bool) or not -(2**63) <= number < 2**64:
        raise UsageError(f"seed={seed!r}: a seed is a whole number from -2**63 to 2**64 - 1, as torch takes it.")
    return number


def derive(seed: int, *path: int | str) -> int:
    """A 63-bit seed for the stream at `path`: the same for the same arguments, unrelated to all others."""
    text = ":".join(str(part) for part in (seed, *path))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_everything(seed: int) -> None:
    """Seed torch (with its devices), numpy's global generator and `random`."""
    # Not by torch.manual_seed, which notes down its caller's stack for each kind of device that is not there: 0.1 to
    # 2 ms, for every shard.
    device = _device_module()
    if device is not None and not hasattr(device, "manual_seed_all"):
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)
        if device is not None and not device._is_in_bad_fork():  # As in a loader's process, which has no use for it.
            device.manual_seed_all(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


@functools.cache
def _device_module() -> Any:
    """torch's module for what this machine computes on besides its processor, or None."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else torch.get_device_module(device)


class Generators:
    """A state of the process's global generators that is in force inside `with`.

    Inside, the global generators of torch, numpy and Python hold a state that began at `seed` and goes on where the
    last `with` left it; outside, they never notice.

    torch_only: leave numpy's and Python's alone. In and out costs 2 µs for torch's generator and 200 µs
    for the other two, which would show in steps of a millisecond.
    device: the GPU whose generator is switched too; if not given, none is. The state is in host memory, so nothing
        waits for the GPU. While a CUDA graph is captured nothing is switched, since the graph keeps the generator.
    """

    def __init__(self, seed: int, *, torch_only: bool = False, device: torch.device | None = None) -> None:
        self._libraries = [_TORCH] if torch_only else [_TORCH, _NUMPY, _PYTHON]
        self._is_on_gpu = device is not None and device.type == "cuda"
        if device is not None and device.type != "cpu":
            self._libraries.append(_of_device(device))
        self._inside = [library.seeded(seed) for library in self._libraries]
        self._outside: list[Any] | None = None

    def __enter__(self) -> None:
        if not (self._is_on_gpu and torch.cuda.is_current_stream_capturing()):
            self._outside = self._swap(self._inside)

    def __exit__(self, *_: object) -> None:
        if self._outside is not None:
            self._inside, self._outside = self._swap(self._outside), None

    @property
    def states(self) -> list[Any]:
        """Where the streams are: torch's on the host, then what else is switched. Not to be asked inside `with`."""
        return list(self._inside)

    @states.setter
    def states(self, states: Sequence[Any]) -> None:
        assert self._outside is None and len(states) == len(self._inside)
        self._inside = list(states)

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


def _of_device(device: torch.device) -> _Library:
    module = torch.get_device_module(device)
    return _Library(
        lambda: module.get_rng_state(device),
        lambda state: module.set_rng_state(state, device),
        lambda seed: torch.Generator(device).manual_seed(seed).get_state(),
    )
