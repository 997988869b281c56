"""The global batches of an epoch: the user's samplers, walked alike by all workers, who need not talk."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lockstep.data.cut import Place
from lockstep.data.generators import Generators
from lockstep.seeds import derive

_DRAW_FROM_TORCH_ONLY = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_END = object()


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


@dataclass(frozen=True, slots=True)
class Pick:
    """What one worker fetches of one global batch."""

    indices: Any
    """Where this worker's samples are in the data set: a slice of what the batch sampler yielded."""
    spare: Any
    """The first sample of the global batch, as a slice too: an empty part is shaped after it."""
    total: int
    """How many samples the global batch has."""


class Picks:
    """This worker's pick of every global batch of an order."""

    def __init__(self, order: Order, place: Place) -> None:
        self._order = order
        self._place = place

    def __iter__(self) -> Iterator[Pick]:
        return map(self._pick, self._order)

    def _pick(self, batch: Iterable[Any]) -> Pick:
        can_be_cut = isinstance(batch, list | tuple | range | torch.Tensor | numpy.ndarray)
        indices: Any = batch if can_be_cut else list(batch)
        part = self._place.part(len(indices))
        return Pick(part.of(indices), indices[:1], part.total)


def _draws_from_torch_only(sampler: Iterable[Any]) -> bool:
    """Whether this is one of torch's own samplers. A subclass may do anything, hence no isinstance."""
    if type(sampler) is BatchSampler:
        return _draws_from_torch_only(sampler.sampler)
    return type(sampler) in _DRAW_FROM_TORCH_ONLY
