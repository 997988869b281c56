"""Which part of a global batch is this worker's: plain arithmetic, the same on every worker."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Part:
    """One worker's part of a global batch: the samples from `start` to before `stop`."""

    start: int
    stop: int
    total: int
    """How many samples the global batch has."""

    @property
    def size(self) -> int:
        """How many samples the part has; may be 0."""
        return self.stop - self.start

    def of(self, samples: Sequence[Any]) -> Any:
        """The part's samples out of the `total` in `samples`, as a slice of `samples`."""
        return samples[self.start : self.stop]


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place in the world, as plain numbers that can travel into loader processes."""

    rank: int
    size: int
    seed: int
    """The seed that all workers agreed on."""

    def part(self, total: int) -> Part:
        """This worker's part of a global batch of `total` samples."""
        return cut(total, self.size, self.rank)


def cut(total: int, size: int, rank: int) -> Part:
    """Part number `rank` of `total` samples cut into `size` runs that differ by at most one sample.

    The first `total % size` workers get the one more. Runs, and not every `size`-th sample: put one after
    another in order of rank, the parts are the global batch again.
    """
    least, more = divmod(total, size)
    start = rank * least + min(rank, more)
    return Part(start, start + least + (rank < more), total)
