"""Where a worker's shards come from: each fetched and collated by itself, as if it were alone.

Random numbers that a data set or `collate_fn` draws for a shard come from generators that are a function of the seed,
the epoch, the number of the batch and the shard. So a shard is the same whichever worker loads it, in this process or
in a loader process, in a run that never stopped or in one that was resumed.

    ShardSamples   a map-style data set: fetches the samples of this worker's shards only
    ShardStream    an iterable data set: every worker reads all of it, and collates its own shards
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset

from lockstep.data.cut import cut
from lockstep.data.generators import Generators
from lockstep.data.order import Order
from lockstep.seeds import derive

Collate = Callable[[Any], Any]


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


class ShardPick(NamedTuple):
    """What one worker fetches of one global batch."""

    epoch: int
    number: int
    indices: Any
    """Of the whole global batch, in the data set."""


class ShardPicks:
    """A pick for every global batch of an order, from the one after `order.num_skipped` on."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def __iter__(self) -> Iterator[ShardPick]:
        return self._walk(self._order.epoch, self._order.num_skipped)

    def _walk(self, epoch: int, number: int) -> Iterator[ShardPick]:
        for batch in self._order:
            can_be_cut = isinstance(batch, list | tuple | range | torch.Tensor | numpy.ndarray)
            yield ShardPick(epoch, number, batch if can_be_cut else list(batch))
            number += 1


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
        return self._shelf.fill(pick.epoch, pick.number, pick.indices, self._fetch)

    def _fetch(self, indices: Any) -> Any:
        fetch_all = getattr(self.dataset, "__getitems__", None)
        return fetch_all(indices) if fetch_all else [self.dataset[index] for index in indices]


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
        if num_skipped and self.is_resumable and self.state is not None:
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
                yield self._shelf.fill(epoch, number, samples, _as_it_is, state)
            number += 1


def _as_it_is(samples: Any) -> Any:
    return samples


def listeners(sources: Iterable[Any]) -> list[Any]:
    """Those of `sources` that want to know the epoch."""
    return [source for source in sources if callable(getattr(source, "set_epoch", None))]
