"""The global batches of an epoch, and which part of each is this worker's.

Both are functions of the seed and the epoch, the same on every worker, so that workers need not talk.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.seeds import Generators, derive

_DRAW_FROM_TORCH_ONLY = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_END = object()


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

    def or_first(self) -> "Part":
        """This part; where it has no sample, the first one of the global batch, which stands in."""
        return self if self.size else Part(0, min(1, self.total), self.total)


@dataclass(frozen=True, slots=True)
class LoaderPlace:
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


class Order:
    """What a sampler yields, epoch after epoch: the same on every worker, and another in every epoch.

    The sampler draws from common generators that are a function of (seed, epoch). One that has a generator
    of its own draws from that; then it is for the user to seed it alike on all workers. Nothing is drawn
    ahead of time, so a sampler may be lazy or endless.
    """

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self.epoch = 0
        """The epoch that the next iteration will be."""
        self.num_skipped = 0
        """How many items the next iteration leaves out at its beginning."""
        self._sampler = sampler
        self._seed = seed
        self._torch_only = _draws_from_torch_only(sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._walk(self.epoch, self.num_skipped)  # No generator: the epoch counts now, not at the first item.

    def _walk(self, epoch: int, num_skipped: int) -> Iterator[Any]:
        common = Generators(derive(self._seed, "order", epoch), torch_only=self._torch_only)
        with common:
            drawn = iter(self._sampler)
        while True:
            with common:
                item = next(drawn, _END)
            if item is _END:
                return
            if num_skipped:
                num_skipped -= 1
            else:
                yield item


def _draws_from_torch_only(sampler: Iterable[Any]) -> bool:
    """Whether this is one of torch's own samplers. A subclass may do anything, hence no isinstance."""
    if type(sampler) is BatchSampler:
        return _draws_from_torch_only(sampler.sampler)
    return type(sampler) in _DRAW_FROM_TORCH_ONLY
