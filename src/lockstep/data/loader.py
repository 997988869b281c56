"""A DataLoader whose batches are global, seen from one worker."""

import hashlib
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, IterDataPipe

from lockstep import limits
from lockstep.data import batch as batches
from lockstep.data import tree
from lockstep.data.order import LoaderPlace, Order
from lockstep.data.source import Batches, BatchStream, Introduction, Loaded, Samples, ShardPicks, Stream, listeners
from lockstep.errors import UsageError
from lockstep.seeds import derive
from lockstep.weight import Walk, Weight
from lockstep.world import World, join

Device = torch.device | str | int | bool | None
Item = TypeVar("Item")


def shard(
    loader: DataLoader[Any],
    *,
    world: World | None = None,
    device: Device = None,
    device_mesh: dist.DeviceMesh | None = None,
) -> "ShardedLoader":
    """This worker's part of every batch of `loader`, whose `batch_size` is from now on the global batch.

    Every sample of a global batch is in exactly one worker's part: nothing is padded, repeated or left out.
    Parts differ by one sample at most. Where a batch has fewer samples than there are workers, those without one get a
    stand-in, the first sample of the batch, which weighs nothing: no model sees an empty batch. Which samples make a
    batch does not depend on the number of workers; epochs reshuffle by themselves.

    world: the workers to share with; `lockstep.join()` if not given.
    device: where batches are moved to, if not given `world.device`. To a GPU they travel beside the host, from pinned
        memory. False leaves them in host memory.
    device_mesh: the dimensions of a mesh that data is parallel over, as DataParallel is given them: workers that hold
        parts of one model get the same samples. The same as `world=world.within(mesh["dp"])`.

    Called on every worker, which exchange a few numbers here and nothing while the loader is read. Raises UsageError
    for what is not a plain DataLoader, and for samplers that cut by themselves.
    """
    _check(loader)
    if world is not None and device_mesh is not None:
        raise UsageError("shard() takes world or device_mesh, not both.")
    shared_with = world if world is not None else join()
    if device_mesh is not None:
        shared_with = shared_with.within(device_mesh)
    _require_same_data(loader.dataset, shared_with)
    return ShardedLoader(loader, shared_with, _device(device, shared_with))


class ShardedLoader:
    """The loader that `shard` returns, iterated like the DataLoader that it was made from.

    An iteration begins the next epoch, and tells samplers and data set if they have a `set_epoch`. Then, for
    each part: it waits for it, moves it, and hands it out with its weight, which wrapped models know it by.

    Attributes of the DataLoader (`dataset`, `batch_size`, `sampler`, ...) can be read here too.
    """

    def __init__(self, loader: DataLoader[Any], world: World, device: torch.device | None) -> None:
        self._loader = loader
        self._world = world
        self._device = device
        self._place = LoaderPlace(world.rank, world.size, world.agree_on_seed())
        pins = loader.pin_memory or (device is not None and device.type == "cuda")
        self._clock, self._parts = _open(loader, self._place, pins)
        self._unseeded = [sampler.generator for sampler in _samplers(loader) if _seeds_itself(sampler, loader)]
        """Of samplers: an epoch's order is to be the same on all workers, and in every run."""
        self._num_samples = 0
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

    @property
    def num_samples(self) -> int:
        """How many samples of the batch handed out last are this worker's: 0 for a stand-in, which must not count."""
        return self._num_samples

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
        for generator in self._unseeded:
            generator.manual_seed(derive(self._place.seed, "order", epoch))
        for listener in listeners([self._loader.dataset, *_samplers(self._loader)]):
            listener.set_epoch(epoch)
        self._seed_processes(epoch)
        return epoch

    def _seed_processes(self, epoch: int) -> None:
        """Give the loader processes their seeds: each worker its own, but for streams, which all read alike."""
        whose = ("stream",) if isinstance(self._clock, Stream) else ("loader", self._place.rank)
        generator = self._parts.generator
        assert generator is not None
        generator.manual_seed(derive(self._place.seed, *whose, epoch))

    def _drawn(self, epoch: int, parts: Iterator[Loaded]) -> Iterator[Loaded]:
        """`parts`; what is drawn for their samples in this process comes from the worker's own numbers."""
        own = self._world.own_stream("samples", epoch, self._num_given)
        while True:
            with own:
                part = next(parts, None)
            if part is None:
                return
            yield part

    def _walk(self, epoch: int, parts: Iterator[Loaded]) -> Iterator[Any]:
        walk = Walk(self._world.hand_outs)
        if not self._parts.num_workers:  # Loader processes have seeds of their own.
            parts = self._drawn(epoch, parts)
        try:
            for part in self._world.events.loading(parts):
                batch = self._move(part.batch)
                tensors = [leaf for leaf in tree.leaves(batch) if isinstance(leaf, torch.Tensor)]
                walk.hand_out(weight := Weight(part.size, part.total, num_parts=self._place.size), tensors)
                self._num_samples = part.size
                self._num_given += 1
                if weight.is_stand_in:
                    self._warn_in_evaluation()
                yield batch
        finally:  # Also where the loop was left early, since that closes this generator.
            walk.end()
            if self._epoch == epoch:
                self._epoch = self._next_epoch
                self._num_given = 0

    def _move(self, batch: Any) -> Any:
        if self._device is None:
            return batch
        # From pinned memory, the copy runs beside the host; a copy to the host must have ended when it is read.
        non_blocking = self._parts.pin_memory and self._device.type != "cpu"
        with self._world.events.copying():
            return batches.move(batch, self._device, non_blocking=non_blocking)

    def _warn_in_evaluation(self) -> None:
        """Models that train leave a stand-in out; who counts by himself has to know of it."""
        if not any(replica.training for replica in self._world.replicas):
            warnings.warn(
                f"worker {self._place.rank} has no sample of this batch, and got a stand-in that must not be counted. "
                "Count the first loader.num_samples of a batch, (output.argmax(1) == y)[: loader.num_samples].sum(), "
                "or average in the loop: world.mean(value, weight=loader.num_samples).",
                stacklevel=3,
            )


def start(loader: DataLoader[Item]) -> Iterator[Item]:
    """What `loader` loads; its processes start now. Where they reach a limit of the system, the error says which."""
    if not loader.num_workers:
        return iter(loader)
    who = f"a loader (num_workers={loader.num_workers})"
    limits.require_temporary_folder(who)
    with limits.explained(who):
        return _explained(iter(loader), who)


def _explained(items: Iterator[Item], who: str) -> Iterator[Item]:
    with limits.explained(who):
        yield from items


def _open(loader: DataLoader[Any], place: LoaderPlace, pins: bool) -> tuple[Order | Stream, DataLoader[Loaded]]:
    """What has to be told the epoch, and the DataLoader that loads this worker's parts."""
    dataset, collate = loader.dataset, loader.collate_fn
    if isinstance(dataset, IterableDataset):
        stream = (
            BatchStream(dataset, collate, place)
            if loader.batch_size is None
            else Stream(dataset, collate, place, loader.batch_size, loader.drop_last)
        )
        if loader.persistent_workers:
            stream.share_epoch()
        return stream, _inner(loader, stream, None, pins)
    if loader.batch_sampler is None:
        order = Order(loader.sampler, place.seed)
        return order, _inner(loader, Batches(dataset, collate, place), order, pins)
    order = Order(loader.batch_sampler, place.seed)
    return order, _inner(loader, Samples(dataset, collate, place), ShardPicks(order), pins)


def _inner(loader: DataLoader[Any], source: Any, sampler: Iterable[Any] | None, pins: bool) -> DataLoader[Loaded]:
    """A DataLoader with the processes of `loader`, to which an item of `source` is one part.

    `in_order=False` is not carried over: it permits batches to change places, not demands it, and the parts
    of one step must be parts of one batch.
    """
    return DataLoader(
        source,
        batch_size=None,
        sampler=sampler,
        collate_fn=_as_it_is,
        num_workers=loader.num_workers,
        pin_memory=pins,
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


def _samplers(loader: DataLoader[Any]) -> list[Any]:
    """The samplers of `loader` and those inside them, each once."""
    found: list[Any] = []
    for outermost in (loader.batch_sampler, loader.sampler):
        sampler: Any = outermost
        while sampler is not None and not any(sampler is known for known in found):
            found.append(sampler)
            sampler = getattr(sampler, "sampler", None)
    return found


def _seeds_itself(sampler: Any, loader: DataLoader[Any]) -> bool:
    """Whether a sampler has seeded a generator by chance, once, as those of torchdata's StatefulDataLoader do."""
    generator = getattr(sampler, "generator", None)
    return type(sampler).__module__.startswith("torchdata.") and generator not in (None, loader.generator)


def _device(device: Device, world: World) -> torch.device | None:
    if device is False:
        return None
    return world.device if device is None or device is True else torch.device(device)


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
    if getattr(loader, "next_iter_state", None) is not None:
        raise UsageError(
            f"this {type(loader).__name__} was given a state before it was sharded, which would be forgotten. The "
            "loader that shard() returns has a state of its own: save its state_dict(), and give it that again."
        )
    # torchdata's iterates as torch's does, and has a state besides, as what is returned here has.
    walks_alone = type(loader).__iter__ is not DataLoader.__iter__
    if walks_alone and not type(loader).__iter__.__module__.startswith("torchdata.stateful_dataloader."):
        raise UsageError(
            f"{type(loader).__name__} has an __iter__ of its own, which shard() would not call: it fetches "
            "with the loader's data set, sampler and collate_fn. Use torch's DataLoader."
        )
    if isinstance(loader.dataset, IterDataPipe):
        raise UsageError(
            "the data set is an IterDataPipe, which torch's DataLoader cuts between workers and processes by "
            "itself: samples would be lost or repeated. Use an IterableDataset."
        )
    if is_split_by_node(loader.dataset):
        raise UsageError(
            "the data set was split by split_dataset_by_node, which gives each worker its part, and shard() would cut "
            "that again: samples would be lost. Give shard() a loader of the whole data set."
        )
    for sampler in _samplers(loader):
        if isinstance(sampler, DistributedSampler) or getattr(sampler, "num_replicas", 1) != 1:
            raise UsageError(
                f"the loader's {type(sampler).__name__} gives each worker its part of the data set, and "
                "shard() would cut that again: samples would be lost. Remove it, and let batch_size be the "
                "global batch: DataLoader(dataset, batch_size=..., shuffle=True)."
            )


def is_split_by_node(dataset: Any) -> bool:
    """Whether Hugging Face's `split_dataset_by_node` has left each worker its part of a stream."""
    return bool(getattr(getattr(dataset, "_distributed", None), "world_size", 1) > 1)


def _require_same_data(dataset: Any, world: World) -> None:
    """Raise UsageError where workers have different data sets, as far as that shows: by length, or a first row.

    A part of the data set that is as long as the others' cannot be told from the whole, unless it is a table.
    """
    seen = world.gather_json([_length(dataset), _first_row(dataset)])
    if any(each != seen[0] for each in seen):
        lengths = [length for length, _ in seen]
        raise UsageError(
            "the data set is not the same on all workers: "
            + (f"they have {lengths} samples. " if len(set(lengths)) > 1 else "its first row differs. ")
            + "shard() cuts every batch between the workers, so samples would be lost. Give every worker the whole "
            "data set: without split_dataset_by_node or .shard(), and with random_split after join(seed=...)."
        )


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _first_row(dataset: Any) -> str | None:
    """A digest of the first row of a Hugging Face data set, whose parts bear no other mark; None of any other."""
    if not (hasattr(dataset, "_fingerprint") and hasattr(dataset, "with_format") and _length(dataset)):
        return None
    row = dataset.with_format("arrow")[:1].to_pydict()
    return hashlib.blake2b(repr(row).encode(), digest_size=8).hexdigest()
