"""A DataLoader whose batches are global, seen from one worker."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe

from lockstep.data import batch as batches
from lockstep.data.claim import Claim
from lockstep.data.cut import Place
from lockstep.data.fork import start
from lockstep.data.order import Order, Picks
from lockstep.data.source import Batches, BatchStream, Introduction, Loaded, Samples, Stream
from lockstep.errors import UsageError
from lockstep.seeds import derive
from lockstep.world import World, join

Device = torch.device | str | int | bool | None


def shard(loader: DataLoader[Any], *, world: World | None = None, device: Device = None) -> "ShardedLoader":
    """This worker's part of every batch of `loader`, whose `batch_size` is from now on the global batch.

    Every sample of a global batch is in exactly one worker's part: nothing is padded, repeated or left out.
    Parts differ by one sample at most. Where a batch has fewer samples than there are workers, some get an
    empty part, and still take part, with weight zero. Which samples make a batch does not depend on the number
    of workers; epochs reshuffle by themselves.

    world: the workers to share with; `lockstep.join()` if not given.
    device: where batches are moved to: a device, or True for the worker's own. Not given: nowhere.

    Called on every worker; sends nothing. Raises UsageError for what is not a plain DataLoader, and for
    samplers that cut by themselves.
    """
    _check(loader)
    shared_with = world if world is not None else join()
    return ShardedLoader(loader, shared_with, _device(device, shared_with))


class ShardedLoader:
    """The loader that `shard` returns, iterated like the DataLoader that it was made from.

    An iteration begins the next epoch, and tells samplers and data set if they have a `set_epoch`. Then, for
    each part: it waits for it, moves it, says in `world.weight` what it weighs, and hands it out.

    Attributes of the DataLoader (`dataset`, `batch_size`, `sampler`, ...) can be read here too.
    """

    def __init__(self, loader: DataLoader[Any], world: World, device: torch.device | None) -> None:
        self._loader = loader
        self._world = world
        self._device = device
        self._place = Place(world.rank, world.size, world.seed)
        self._clock, self._parts = _open(loader, self._place)
        self._epoch = 0
        self._next_epoch = 0
        self._num_given = 0
        """How many global batches of the epoch under way have been handed out."""
        self._num_skipped = 0
        """How many the next iteration leaves out, since they were handed out before a stop."""

    @property
    def epoch(self) -> int:
        """The epoch under way, or between two, the next. Each iteration is one, counted from 0."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch number `epoch`, in the order that this epoch has in any run.

        Only needed to resume, since epochs count themselves. Call it on every worker.
        """
        self._epoch = self._next_epoch = int(epoch)
        self._num_given = self._num_skipped = 0

    def state_dict(self) -> dict[str, int]:
        """Where the loader is: after this many global batches of this epoch, on however many workers."""
        return {"epoch": self._epoch, "batches": self._num_given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Make the next iteration begin at the global batch after those that `state` counts. On every worker."""
        self._epoch = self._next_epoch = int(state["epoch"])
        self._num_given = self._num_skipped = int(state["batches"])

    def __len__(self) -> int:
        """How many global batches an epoch has: the same on every worker."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        epoch = self._begin_epoch()
        num_skipped, self._num_skipped = self._num_skipped, 0
        self._num_given = num_skipped
        if isinstance(self._clock, Order):  # Not even loaded; of a stream, they are read and dropped.
            self._clock.num_skipped, num_skipped = num_skipped, 0
        # Loader processes start now, not at the first batch.
        return self._walk(epoch, itertools.islice(start(self._parts), num_skipped, None))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __repr__(self) -> str:
        place = f"worker {self._place.rank} of {self._place.size}"
        return f"ShardedLoader(batch_size={self._loader.batch_size}, {place}, epoch {self._epoch})"

    def _begin_epoch(self) -> int:
        epoch = self._epoch = self._next_epoch
        self._next_epoch = epoch + 1
        self._clock.epoch = epoch
        for listener in _listeners(self._loader):
            listener.set_epoch(epoch)
        self._seed_processes(epoch)
        return epoch

    def _seed_processes(self, epoch: int) -> None:
        """Give the loader processes their seeds: each worker its own, but for streams, which all read alike."""
        whose = ("stream",) if isinstance(self._clock, Stream) else ("loader", self._place.rank)
        generator = self._parts.generator
        assert generator is not None
        generator.manual_seed(derive(self._place.seed, *whose, epoch))

    def _walk(self, epoch: int, parts: Iterator[Loaded]) -> Iterator[Any]:
        claim = Claim(self._world)
        try:
            for part in self._world.events.loading(parts):
                batch = self._move(part.batch)
                claim.hold(part.size, part.total)
                self._num_given += 1
                yield batch
        finally:  # Also where the loop was left early, since that closes this generator.
            claim.release()
            if self._epoch == epoch:
                self._epoch = self._next_epoch
                self._num_given = 0

    def _move(self, batch: Any) -> Any:
        if self._device is None:
            return batch
        # From pinned memory, the copy runs beside the host; a copy to the host must have ended when it is read.
        non_blocking = self._loader.pin_memory and self._device.type != "cpu"
        with self._world.events.copying():
            return batches.move(batch, self._device, non_blocking=non_blocking)


def _open(loader: DataLoader[Any], place: Place) -> tuple[Order | Stream, DataLoader[Loaded]]:
    """What has to be told the epoch, and the DataLoader that loads this worker's parts."""
    dataset, collate = loader.dataset, loader.collate_fn
    if isinstance(dataset, IterableDataset):
        stream = _stream(loader, place)
        return stream, _inner(loader, stream, None)
    if loader.batch_sampler is None:
        order = Order(loader.sampler, place.seed)
        return order, _inner(loader, Batches(dataset, collate, place), order)
    order = Order(loader.batch_sampler, place.seed)
    return order, _inner(loader, Samples(dataset, collate), Picks(order, place))


def _stream(loader: DataLoader[Any], place: Place) -> Stream:
    if loader.batch_size is None:
        stream: Stream = BatchStream(loader.dataset, loader.collate_fn, place)
    else:
        stream = Stream(loader.dataset, loader.collate_fn, place, loader.batch_size, loader.drop_last)
    return stream.share_epoch() if loader.persistent_workers else stream


def _inner(loader: DataLoader[Any], source: Any, sampler: Iterable[Any] | None) -> DataLoader[Loaded]:
    """A DataLoader with the processes and the pinning of `loader`, to which an item of `source` is one part.

    `in_order=False` is not carried over: it permits batches to change places, not demands it, and the parts
    of one step must be parts of one batch.
    """
    return DataLoader(
        source,
        batch_size=None,
        sampler=sampler,
        collate_fn=_as_it_is,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        timeout=loader.timeout,
        worker_init_fn=Introduction(loader.worker_init_fn),
        multiprocessing_context=loader.multiprocessing_context,
        generator=torch.Generator(),
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )


def _as_it_is(part: Any) -> Any:
    return part


def _listeners(loader: DataLoader[Any]) -> list[Any]:
    """Data set and samplers that want to know the epoch."""
    candidates = [loader.dataset, *_samplers(loader)]
    return [candidate for candidate in candidates if callable(getattr(candidate, "set_epoch", None))]


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """The samplers of `loader` and those inside them, each once."""
    found: list[Any] = []
    for outermost in (loader.batch_sampler, loader.sampler):
        sampler: Any = outermost
        while sampler is not None and not any(sampler is known for known in found):
            found.append(sampler)
            sampler = getattr(sampler, "sampler", None)
    return found


def _device(device: Device, world: World) -> torch.device | None:
    if device is None or device is False:
        return None
    return world.device if device is True else torch.device(device)


def _check(loader: Any) -> None:
    if isinstance(loader, ShardedLoader):
        raise UsageError(
            "shard() was given a loader that is sharded already: each worker would get a part of its part, "
            "and samples would be lost. Call shard() once per DataLoader."
        )
    if not isinstance(loader, DataLoader):
        raise UsageError(
            f"shard() takes a torch.utils.data.DataLoader, not a {type(loader).__name__}: it fetches with the "
            "loader's data set, sampler and collate_fn. Make a DataLoader whose batch_size is the global batch."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise UsageError(
            f"{type(loader).__name__} has an __iter__ of its own, which shard() would not call: it fetches "
            "with the loader's data set, sampler and collate_fn. Use torch's DataLoader."
        )
    if isinstance(loader.dataset, IterDataPipe):
        raise UsageError(
            "the data set is an IterDataPipe, which torch's DataLoader cuts between workers and processes by "
            "itself: samples would be lost or repeated. Use an IterableDataset."
        )
    for sampler in _samplers(loader):
        if isinstance(sampler, DistributedSampler) or getattr(sampler, "num_replicas", 1) != 1:
            raise UsageError(
                f"the loader's {type(sampler).__name__} gives each worker its part of the data set, and "
                "shard() would cut that again: samples would be lost. Remove it, and let batch_size be the "
                "global batch: DataLoader(dataset, batch_size=..., shuffle=True)."
            )
