"""Where this worker's parts come from: the user's data set, fetched and collated part by part.

A source is the data set of a torch DataLoader that does no batching of its own: one item is one part. With
loader processes it lives there, so that fetching, collating and cutting happen ahead of time. There is one for
each kind of loader:

    Samples      a map-style data set, batched by a batch sampler: fetches its own samples only
    Batches      a map-style data set that makes whole batches (batch_size=None): cuts them
    Stream       an iterable data set, batched by the loader: reads all, collates its own samples only
    BatchStream  an iterable data set that yields whole batches (batch_size=None): cuts them
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lockstep import seeds
from lockstep.data import batch as batches
from lockstep.data.cut import Place
from lockstep.data.generators import Generators
from lockstep.data.order import Pick

Collate = Callable[[Any], Any]


class Loaded(NamedTuple):
    """A part that is ready to be used. A named tuple, since torch looks into those for memory to pin."""

    size: int
    """How many samples the part has."""
    total: int
    """How many the global batch has."""
    batch: Any


class Samples(Dataset[Loaded]):
    """Part after part of a map-style data set."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset = dataset
        self._collate = collate

    def __getitem__(self, pick: Pick) -> Loaded:
        size = len(pick.indices)
        samples = self._fetch(pick.indices if size else pick.spare)
        return Loaded(size, pick.total, _collate(self._collate, samples, size))

    def _fetch(self, indices: Any) -> Any:
        fetch_all = getattr(self.dataset, "__getitems__", None)
        return fetch_all(indices) if fetch_all else [self.dataset[index] for index in indices]


class Batches(Dataset[Loaded]):
    """Part after part of a map-style data set whose items are global batches."""

    def __init__(self, dataset: Any, collate: Collate, place: Place) -> None:
        self.dataset = dataset
        self._collate = collate
        self._place = place

    def __getitem__(self, index: Any) -> Loaded:
        return _take(self._collate(self.dataset[index]), self._place)


class Stream(IterableDataset[Loaded]):
    """Part after part of an iterable data set.

    Every worker reads the whole stream, under generators common to all workers: a stream that shuffles or
    augments with the global generators, or with `get_worker_info().seed`, is the same everywhere. What
    happens on one worker only, `collate_fn`, draws from that worker's own.
    """

    def __init__(self, dataset: Any, collate: Collate, place: Place, batch_size: int, drop_last: bool) -> None:
        self.dataset = dataset
        self._collate = collate
        self._place = place
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._epoch = torch.zeros((), dtype=torch.int64)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will be."""
        return int(self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch.fill_(epoch)

    def share_epoch(self) -> "Stream":
        """Let loader processes that outlive an epoch see the next."""
        self._epoch.share_memory_()
        return self

    def __iter__(self) -> Iterator[Loaded]:
        return self._walk(self.epoch)

    def _walk(self, epoch: int) -> Iterator[Loaded]:
        common = self._start(epoch)
        with common:
            stream = iter(self.dataset)
        while True:
            with common:
                samples = list(islice(stream, self._batch_size))
            if not samples or (self._drop_last and len(samples) < self._batch_size):
                return
            yield self._load(samples)

    def _start(self, epoch: int) -> Generators:
        """The common generators to read under. A loader process also gets a seed of this worker's own."""
        process = get_worker_info()
        number = 0 if process is None else process.id
        seed, rank = self._place.seed, self._place.rank
        if process is not None:
            seeds.seed_everything(seeds.derive(seed, "loader", rank, epoch, number))
        return Generators(seeds.derive(seed, "stream", epoch, number))

    def _load(self, samples: list[Any]) -> Loaded:
        part = self._place.part(len(samples))
        mine = part.of(samples) if part.size else samples[:1]
        return Loaded(part.size, part.total, _collate(self._collate, mine, part.size))


class BatchStream(Stream):
    """Part after part of an iterable data set whose items are global batches."""

    def __init__(self, dataset: Any, collate: Collate, place: Place) -> None:
        super().__init__(dataset, collate, place, batch_size=1, drop_last=False)

    def _load(self, samples: list[Any]) -> Loaded:
        return _take(self._collate(samples[0]), self._place)


class Introduction:
    """Makes a loader process know the user's data set, and not our source, before `worker_init_fn` runs."""

    def __init__(self, worker_init_fn: Callable[[int], None] | None) -> None:
        self._worker_init_fn = worker_init_fn

    def __call__(self, number: int) -> None:
        """Called by torch in loader process `number` before anything is fetched."""
        process = get_worker_info()
        assert process is not None
        source: Any = process.dataset
        object.__setattr__(process, "dataset", source.dataset)  # It is frozen: nobody else has cause to.
        if self._worker_init_fn is not None:
            self._worker_init_fn(number)


def _collate(collate: Collate, samples: Any, size: int) -> Any:
    """`samples` as a batch; an empty one where `size` says that they are only there to shape it."""
    if size or not len(samples):
        return collate(samples)
    return batches.empty(collate(samples), collate([*samples, *samples]))


def _take(batch: Any, place: Place) -> Loaded:
    part = place.part(batches.length(batch))
    return Loaded(part.size, part.total, batches.take(batch, part))
