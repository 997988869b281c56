"""The global batches of a training run, and metrics over them.

    Position      where the run is: what has been given out
    BatchSource   one data set, read for some epochs
    evaluate      metrics over a data set, every sample counted once

A run may have several sources, one after the other: each call of `Trainer.batches` is one. A resumed run makes the same
calls; sources that had ended give nothing, and the one that was under way goes on at the next batch.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data import default_collate as torch_collate

from lockstep.data import batch as batches
from lockstep.data import loader
from lockstep.data.order import Order
from lockstep.data.source import GlobalBatch, Introduction, ShardPicks, ShardSamples, ShardStream, Shelf, listeners
from lockstep.errors import UsageError
from lockstep.events import Events
from lockstep.replica.data_parallel import DataParallel
from lockstep.seeds import derive

_NUM_STARTS = 8

MetricFn = Callable[[nn.Module, Any], Any]
"""Takes the model and a shard; returns a number or a dict of numbers, means over the shard, or that and a weight."""

MetricEntry = tuple[float, dict[str, float]]
"""Weight and metrics of one shard."""

UNNAMED = ""
"""Stands for the name of a metric that is given without one."""


@dataclass(slots=True)
class Position:
    """Where a run is: what has been given out."""

    source: int = 0
    """How many sources have ended."""
    epoch: int = 0
    """Of the source that is under way."""
    batches: int = 0
    """How many batches of that epoch have been given out."""
    stream: Any = None
    """The state of a resumable stream after the last of them."""

    def begin(self, source: int) -> None:
        """The source of this number begins."""
        self.source, self.epoch, self.batches, self.stream = source, 0, 0, None

    def copy(self) -> "Position":
        """Another that stays where this one is now."""
        return dataclasses.replace(self)

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        return {"feed": self.source, "epoch": self.epoch, "batches": self.batches, "stream": self.stream}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Position":
        """What `to_json` was made of."""
        return cls(int(state["feed"]), int(state["epoch"]), int(state["batches"]), state.get("stream"))


@dataclass(frozen=True, slots=True)
class LoaderOptions:
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


class BatchSource:
    """One data set, read for some epochs."""

    def __init__(self, dataset: Any, loading: LoaderOptions, *, run: tuple[int, int], shards: int, seed: int) -> None:
        check_data(dataset, loading)
        self._dataset, self._loading = dataset, loading
        shelf = Shelf(loading.collate_fn or torch_collate, run, shards, seed)
        self._is_stream = isinstance(dataset, IterableDataset)
        if self._is_stream:
            self._clock: Any = ShardStream(dataset, shelf, loading.batch_size, loading.drop_last, seed)
            self._loader = self._open(self._clock, None)
        else:
            sampler = loading.sampler
            if sampler is None:
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
        return loader.start(self._loader)

    def stream_state(self) -> Any:
        """Where a resumable stream is in this process; None for other data sets."""
        is_resumable = self._is_stream and self._clock.is_resumable
        return copy.deepcopy(self._dataset.state_dict()) if is_resumable else None

    def _open(self, source: Any, sampler: Iterable[Any] | None) -> DataLoader[GlobalBatch]:
        loading = self._loading
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


class Feed:
    """The batches of one source as this worker gets them, whichever shards are its own by now."""

    def __init__(self, open_source: Callable[[], BatchSource], position: Position, events: Events) -> None:
        self._open_source, self._position, self._events = open_source, position, events
        self._source: BatchSource | None = None
        self._walk: Iterator[GlobalBatch] | None = None
        self._before = position.copy()
        """Where the run was when the last batch was asked for."""
        self._starts: dict[int, Any] = {}
        """Where a resumable stream was when an epoch began, of the last epochs: it may be read from there again."""

    @property
    def before(self) -> Position:
        """Where the run was when the batch that is in use was asked for."""
        return self._before

    def reopen(self) -> None:
        """The shards of this worker are others from now on."""
        self._source = self._walk = None

    def next(self) -> GlobalBatch | None:
        """The next batch of the epoch; None at its end."""
        here = self._position
        self._before = here.copy()
        if self._walk is None:
            self._walk = self._begin(here.epoch, here.batches, here.stream)
        batch = next(self._walk, None)
        if batch is None:
            here.epoch, here.batches, here.stream = here.epoch + 1, 0, None
            self._walk = None
        else:
            here.batches, here.stream = batch.number + 1, batch.stream
        return batch

    def again(self, batch: GlobalBatch) -> GlobalBatch:
        """The same batch with the shards that are this worker's now; what follows it comes from there on."""
        was_last = batch.number == self._before.batches and batch.epoch == self._before.epoch
        self._walk = self._begin(batch.epoch, batch.number, self._before.stream if was_last else None)
        return next(self._walk)

    def _begin(self, epoch: int, number: int, stream: Any) -> Iterator[GlobalBatch]:
        if self._source is None:
            self._source = self._open_source()
        return iter(self._events.loading(self._source.walk(epoch, number, self._start(epoch, number, stream))))

    def _start(self, epoch: int, number: int, stream: Any) -> Any:
        """Where a stream is to be read from: None for as it is."""
        if number or stream is not None:
            return stream
        if epoch in self._starts:
            return self._starts[epoch]
        assert self._source is not None
        self._starts[epoch] = self._source.stream_state()
        self._starts.pop(epoch - _NUM_STARTS, None)
        return None

    def fetch(self, epoch: int, number: int, stream: Any) -> GlobalBatch:
        """A batch that was given out before, with the shards that are this worker's now."""
        if self._source is None:
            self._source = self._open_source()
        return next(iter(self._source.walk(epoch, number, self._start(epoch, number, stream))))


@dataclass(frozen=True, slots=True)
class FedBatch:
    """A batch by its place, which can be fetched again."""

    feed: Feed
    epoch: int
    number: int
    stream: Any
    """Where a resumable stream was before it."""

    def fetch(self) -> GlobalBatch:
        """The batch, with the shards that are this worker's now."""
        return self.feed.fetch(self.epoch, self.number, self.stream)


def _as_it_is(batch: Any) -> Any:
    return batch


def check_data(dataset: Any, loading: LoaderOptions) -> None:
    """Raise UsageError for a data set that cannot be read, or not so; called where a user gives it."""
    if not isinstance(dataset, IterableDataset):
        if loading.sampler is None:
            _require_length(dataset)
        return
    if loading.sampler is not None:
        raise UsageError("an iterable data set has an order of its own: leave out sampler.")
    if loading.num_workers > 1:
        raise UsageError(
            f"num_workers={loading.num_workers}: a stream is read by one loader process, which keeps its order. "
            "Use num_workers=1 (or 0), and let the data set itself read ahead with threads if that is too slow."
        )


def _require_length(dataset: Any) -> None:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"a data set is a torch Dataset, or anything with __len__ and __getitem__, not a {type(dataset).__name__}."
        )
    if not len(dataset):
        raise UsageError("the data set is empty: there is no sample to make a batch of.")


def evaluate(model: DataParallel, source: BatchSource, metric_fn: MetricFn) -> float | dict[str, float]:
    """The mean of what `metric_fn` returns over all samples of `source`; called on every worker, the same on all.

    The model is in evaluation mode meanwhile. Shards go to the workers as in training; each one's numbers are kept,
    and added in the order of the shards.
    """
    was_training = model.training
    model.eval()
    mine: dict[tuple[int, int], MetricEntry] = {}
    try:
        with torch.no_grad():
            for batch in source.walk(0):
                for shard in batch.shards:
                    if shard.size:
                        mine[batch.number, shard.number] = _entry(model, metric_fn, shard.batch, shard.size)
    finally:
        model.train(was_training)
    everything: dict[tuple[int, int], MetricEntry] = {}
    for theirs in model.world.gather_json([[*place, *entry] for place, entry in mine.items()]):
        everything |= {(number, shard): (weight, named) for number, shard, weight, named in theirs}
    return _mean([everything[place] for place in sorted(everything)])


def _entry(model: DataParallel, metric_fn: MetricFn, batch: Any, size: int) -> MetricEntry:
    returned = metric_fn(model, batches.move(batch, model.world.device, non_blocking=True))
    value, weight = returned if isinstance(returned, tuple) else (returned, size)
    named = value if isinstance(value, Mapping) else {UNNAMED: value}
    return float(weight), {str(name): _number(number) for name, number in named.items()}


def _number(value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UsageError(
            f"metric_fn(model, shard) returned a tensor of shape {list(value.shape)}: return its mean over the shard."
        )
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"metric_fn(model, shard) returned a {type(value).__name__}; it must return a number, a dict of numbers, "
            "or (that, weight)."
        ) from error


def _mean(entries: list[MetricEntry]) -> float | dict[str, float]:
    total = sum(weight for weight, _ in entries)
    names = list(dict.fromkeys(name for _, metrics in entries for name in metrics))
    means = {
        name: sum(weight * metrics[name] for weight, metrics in entries if name in metrics) / (total or 1.0)
        for name in names
    }
    if not entries:
        raise UsageError("evaluate: the data set is empty.")
    return means[UNNAMED] if names == [UNNAMED] else means
