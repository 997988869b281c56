"""The global batches of a training run, epoch after epoch, from wherever the run is.

A run may have several feeds, one after the other: each call of `Trainer.batches` is one. A resumed run makes the same
calls; feeds that had ended give nothing, and the one that was under way goes on at the next batch.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import default_collate as torch_collate

from lockstep.data.fork import start
from lockstep.data.order import Order
from lockstep.data.shard_source import GlobalBatch, ShardPicks, ShardSamples, ShardStream, Shelf, listeners
from lockstep.data.source import Introduction
from lockstep.errors import UsageError
from lockstep.seeds import derive


@dataclass(slots=True)
class Position:
    """Where a run is: what has been given out."""

    feed: int = 0
    """How many feeds have ended."""
    epoch: int = 0
    """Of the feed that is under way."""
    batches: int = 0
    """How many batches of that epoch have been given out."""
    stream: Any = None
    """The state of a resumable stream after the last of them."""

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        return {"feed": self.feed, "epoch": self.epoch, "batches": self.batches, "stream": self.stream}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Position":
        """What `to_json` was made of."""
        return cls(int(state["feed"]), int(state["epoch"]), int(state["batches"]), state["stream"])


@dataclass(frozen=True, slots=True)
class Loading:
    """How batches are loaded."""

    batch_size: int
    """Of the global batch."""
    shuffle: bool = True
    drop_last: bool = False
    sampler: Iterable[Any] | None = None
    collate_fn: Callable[[Any], Any] | None = None
    num_workers: int = 0
    """Loader processes of each worker."""
    prefetch_factor: int | None = None
    pin_memory: bool = False
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise UsageError(f"batch_size={self.batch_size!r}: the global batch needs at least one sample.")


class Feed:
    """One data set, read for some epochs."""

    def __init__(self, dataset: Any, loading: Loading, *, run: tuple[int, int], shards: int, seed: int) -> None:
        self._dataset, self._loading = dataset, loading
        shelf = Shelf(loading.collate_fn or torch_collate, run, shards, seed)
        self._is_stream = isinstance(dataset, IterableDataset)
        if self._is_stream:
            if loading.sampler is not None:
                raise UsageError("an iterable data set has an order of its own: leave out sampler.")
            self._clock: Any = ShardStream(dataset, shelf, loading.batch_size, loading.drop_last, seed)
            self._loader = self._open(self._clock, None)
        else:
            sampler = loading.sampler
            if sampler is None:
                _require_length(dataset)
                sampler = RandomSampler(dataset) if loading.shuffle else SequentialSampler(dataset)
            order = Order(BatchSampler(sampler, loading.batch_size, loading.drop_last), seed)
            self._clock = order
            self._loader = self._open(ShardSamples(dataset, shelf), ShardPicks(order))
        self._seed = seed

    def __len__(self) -> int:
        """How many batches an epoch has."""
        size, length = self._loading.batch_size, len(self._loading.sampler or self._dataset)  # type: ignore[arg-type]
        return length // size if self._loading.drop_last else -(-length // size)

    def walk(self, epoch: int, num_skipped: int = 0, stream: Any = None) -> Iterator[GlobalBatch]:
        """The batches of one epoch, from number `num_skipped` on."""
        self._clock.epoch, self._clock.num_skipped = epoch, num_skipped
        if self._is_stream:
            self._clock.state = stream
        for listener in listeners((self._dataset, self._loading.sampler)):
            listener.set_epoch(epoch)
        assert self._loader.generator is not None
        self._loader.generator.manual_seed(derive(self._seed, "loader", epoch))
        return start(self._loader)

    def _open(self, source: Any, sampler: Iterable[Any] | None) -> DataLoader[GlobalBatch]:
        loading = self._loading
        if self._is_stream and loading.num_workers > 1:
            raise UsageError(
                f"num_workers={loading.num_workers}: a stream is read by one loader process, which keeps its order. "
                "Use num_workers=1 (or 0), and let the data set itself read ahead with threads if that is too slow."
            )
        return DataLoader(
            source,
            batch_size=None,
            sampler=sampler,
            collate_fn=_as_it_is,
            num_workers=loading.num_workers,
            prefetch_factor=loading.prefetch_factor,
            pin_memory=loading.pin_memory,
            worker_init_fn=Introduction(loading.worker_init_fn),
            multiprocessing_context=loading.multiprocessing_context,
            generator=torch.Generator(),
        )


def _as_it_is(batch: Any) -> Any:
    return batch


def _require_length(dataset: Any) -> None:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"a data set is a torch Dataset, or anything with __len__ and __getitem__, not a {type(dataset).__name__}."
        )
