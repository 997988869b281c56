"""Where batches come from: the user's data set, fetched and collated part by part, or shard by shard.

A source is the data set of a torch DataLoader that does no batching of its own: one item is what this worker has of one
global batch. With loader processes it lives there, so that fetching, collating and cutting happen ahead of time.

For sharded loaders, one item is the worker's part. There is a source for each kind of loader:

    Samples      a map-style data set, batched by a batch sampler: fetches its own samples only
    Batches      a map-style data set that makes whole batches (batch_size=None): cuts them
    Stream       an iterable data set, batched by the loader: reads all, collates its own samples only
    BatchStream  an iterable data set that yields whole batches (batch_size=None): cuts them

For `Trainer`, one item is the worker's shards, each fetched and collated by itself, as if it were alone. Random numbers
that a data set or `collate_fn` draws for a shard come from generators that are a function of the seed, the epoch, the
number of the batch and the shard. So a shard is the same whichever worker loads it, in this process or in a loader
process, in a run that never stopped or in one that was resumed.

    ShardSamples   a map-style data set: fetches the samples of this worker's shards only
    ShardStream    an iterable data set: every worker reads all of it, and collates its own shards
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from lockstep.data import batch as batches
from lockstep.data.order import LoaderPlace, Order, cut
from lockstep.seeds import Generators, derive, seed_everything

Collate = Callable[[Any], Any]


def _fetch(dataset: Any, indices: Any) -> Any:
    """The samples of a map-style data set."""
    fetch_all = getattr(dataset, "__getitems__", None)
    return fetch_all(indices) if fetch_all else [dataset[index] for index in indices]


def listeners(sources: Iterable[Any]) -> list[Any]:
    """Those of `sources` that want to know the epoch."""
    return [source for source in sources if callable(getattr(source, "set_epoch", None))]


class ShardPick(NamedTuple):
    """A global batch that the workers are to fetch, each its part of it."""

    epoch: int
    number: int
    """Of the batch in its epoch."""
    indices: Any
    """Of all its samples in the data set, as something that can be cut by a slice."""


class ShardPicks:
    """A pick for every global batch of an order, from the one after `order.num_skipped` on."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def __iter__(self) -> Iterator[ShardPick]:
        epoch, first = self._order.epoch, self._order.num_skipped  # They count now, not at the first item.
        return (ShardPick(epoch, number, _sliceable(batch)) for number, batch in enumerate(self._order, first))


def _sliceable(batch: Iterable[Any]) -> Any:
    return batch if isinstance(batch, list | tuple | range | torch.Tensor | numpy.ndarray) else list(batch)


# --- Parts of a sharded loader ---


class Loaded(NamedTuple):
    """A part that is ready to be used. A named tuple, since torch looks into those for memory to pin."""

    size: int
    """How many samples the part has. With none, the batch is a stand-in: the first sample of the global batch."""
    total: int
    """How many the global batch has."""
    batch: Any


class Samples(Dataset[Loaded]):
    """Part after part of a map-style data set."""

    def __init__(self, dataset: Any, collate: Collate, place: LoaderPlace) -> None:
        self.dataset = dataset
        self._collate = collate
        self._place = place

    def __getitem__(self, pick: ShardPick) -> Loaded:
        part = self._place.part(len(pick.indices))
        return Loaded(part.size, part.total, self._collate(_fetch(self.dataset, part.or_first().of(pick.indices))))


class Batches(Dataset[Loaded]):
    """Part after part of a map-style data set whose items are global batches."""

    def __init__(self, dataset: Any, collate: Collate, place: LoaderPlace) -> None:
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

    def __init__(self, dataset: Any, collate: Collate, place: LoaderPlace, batch_size: int, drop_last: bool) -> None:
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

    def share_epoch(self) -> None:
        """Let loader processes that outlive an epoch see the next."""
        self._epoch.share_memory_()

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
            seed_everything(derive(seed, "loader", rank, epoch, number))
        return Generators(derive(seed, "stream", epoch, number))

    def _load(self, samples: list[Any]) -> Loaded:
        part = self._place.part(len(samples))
        return Loaded(part.size, part.total, self._collate(part.or_first().of(samples)))


class BatchStream(Stream):
    """Part after part of an iterable data set whose items are global batches."""

    def __init__(self, dataset: Any, collate: Collate, place: LoaderPlace) -> None:
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


def _take(batch: Any, place: LoaderPlace) -> Loaded:
    part = place.part(batches.length(batch))
    return Loaded(part.size, part.total, batches.take(batch, part.or_first()))


# --- Shards of a trainer's batch ---


class Shard(NamedTuple):
    """One shard, ready to be used. A named tuple, since torch looks into those for memory to pin."""

    number: int
    size: int
    """How many samples it has; may be 0, and `batch` None then."""
    batch: Any


class GlobalBatch(NamedTuple):
    """What one update is computed from, as one worker sees it."""

    epoch: int
    number: int
    """Of the batch in its epoch."""
    total: int
    """How many samples it has, over all shards."""
    shards: tuple[Shard, ...]
    """This worker's, in order."""
    spare: Any = None
    """A batch of one sample, where no shard of this worker has any: for a pass that only keeps others company."""
    stream: Any = None
    """The state of a resumable stream after this batch."""


class Shelf:
    """Makes one worker's shards from samples."""

    def __init__(self, collate: Collate, run: tuple[int, int], shards: int, seed: int) -> None:
        self._collate, self._run, self._shards, self._seed = collate, run, shards, seed

    def fill(
        self, epoch: int, number: int, samples: Sequence[Any], fetch: Callable[[Any], Any], stream: Any = None
    ) -> GlobalBatch:
        """The shards of a global batch; `fetch` makes samples of a slice of `samples`."""
        total = len(samples)
        shards = []
        for shard in range(*self._run):
            part = cut(total, self._shards, shard)
            batch = None
            if part.size:
                with self._generators(epoch, number, shard):
                    batch = self._collate(fetch(part.of(samples)))
            shards.append(Shard(shard, part.size, batch))
        spare = None
        if not any(shard.size for shard in shards):
            with self._generators(epoch, number, 0):
                spare = self._collate(fetch(samples[:1]))
        return GlobalBatch(epoch, number, total, tuple(shards), spare, stream)

    def _generators(self, epoch: int, number: int, shard: int) -> Generators:
        return Generators(derive(self._seed, "shard", epoch, number, shard))


class ShardSamples(Dataset[GlobalBatch]):
    """Global batch after global batch of a map-style data set."""

    def __init__(self, dataset: Any, shelf: Shelf) -> None:
        self.dataset = dataset
        self._shelf = shelf

    def __getitem__(self, pick: ShardPick) -> GlobalBatch:
        return self._shelf.fill(pick.epoch, pick.number, pick.indices, lambda indices: _fetch(self.dataset, indices))


class ShardStream(IterableDataset[GlobalBatch]):
    """Global batch after global batch of an iterable data set.

    A stream with `state_dict` and `load_state_dict` is resumed by them; of any other, what was used is read again.
    """

    def __init__(self, dataset: Any, shelf: Shelf, batch_size: int, drop_last: bool, seed: int) -> None:
        self.dataset = dataset
        self._shelf, self._batch_size, self._drop_last, self._seed = shelf, batch_size, drop_last, seed
        self.epoch = self.num_skipped = 0
        self.state: Any = None
        """Where to go on, if the stream can."""

    @property
    def is_resumable(self) -> bool:
        """Whether the stream can say where it is."""
        return all(callable(getattr(self.dataset, name, None)) for name in ("state_dict", "load_state_dict"))

    def __iter__(self) -> Iterator[GlobalBatch]:
        return self._walk(self.epoch, self.num_skipped)

    def _walk(self, epoch: int, num_skipped: int) -> Iterator[GlobalBatch]:
        number = 0
        if self.is_resumable and self.state is not None:
            self.dataset.load_state_dict(self.state)
            number, num_skipped = num_skipped, 0
        with Generators(derive(self._seed, "stream", epoch)):
            stream = iter(self.dataset)
        while True:
            with Generators(derive(self._seed, "stream", epoch, number)):
                samples = list(islice(stream, self._batch_size))
            if not samples or (self._drop_last and len(samples) < self._batch_size):
                return
            if number >= num_skipped:
                state = self.dataset.state_dict() if self.is_resumable else None
                yield self._shelf.fill(epoch, number, samples, lambda part: part, state)
            number += 1
