"""Sharded loaders, rank by rank: a loader sends nothing, so one process can be every worker in turn."""

import gc
import os
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data._utils.pin_memory import pin_memory

from lockstep import seeds
from lockstep.comm.group import Membership
from lockstep.comm.peers import Peer, Peers
from lockstep.data import ShardedLoader, shard
from lockstep.data.source import Loaded
from lockstep.errors import UsageError
from lockstep.weight import Weight, in_force
from lockstep.world import World

pytestmark = pytest.mark.filterwarnings("ignore:worker . has no sample of this batch")
SIZES = [1, 2, 3, 4, 5]
TOTAL = 23


class InTurn(World):
    """A worker of a world whose workers run one after the other, and have the same to say."""

    def gather_json(self, obj: Any) -> list[Any]:
        return [obj] * self.size


def make_world(rank: int = 0, size: int = 1, seed: int = 7) -> World:
    me = Peer.me(rank)
    peers = Peers(me, (me,), None, timedelta(seconds=1))
    world = InTurn(Membership(rank, size, rank, size, torch.device("cpu"), "gloo", peers, None, None, owns_group=False))
    world._seed = seed
    return world


class Numbers(Dataset[int]):
    def __init__(self, total: int = TOTAL) -> None:
        self.total = total
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, list):
            return torch.tensor(index)
        self.fetched.append(int(index))
        return int(index)


class NumbersInBulk(Numbers):
    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("must be fetched in bulk")

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.fetched += indices
        return list(indices)


class Count(IterableDataset[int]):
    """0, 1, 2, ...; each loader process counts its own share."""

    def __init__(self, total: int = TOTAL) -> None:
        self.total = total

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        return iter(range(process.id, self.total, process.num_workers) if process else range(self.total))


class Shuffling(Count):
    """A stream that shuffles with every generator there is, at its start and on the way."""

    def __iter__(self) -> Iterator[int]:
        items = list(super().__iter__())
        random.shuffle(items)
        numpy.random.shuffle(items)
        while items:
            yield items.pop(int(torch.randint(len(items), ())))


class ShufflingAtOnce(Count):
    """The same, but by the time that `iter` returns."""

    def __iter__(self) -> Iterator[int]:
        return iter(list(Shuffling(self.total)))


class ShufflingByProcessSeed(Count):
    def __iter__(self) -> Iterator[int]:
        items = list(super().__iter__())
        process = get_worker_info()
        random.Random(process.seed if process else 0).shuffle(items)
        return iter(items)


class Chunks(Count):
    """A stream of batches of different lengths."""

    def __iter__(self) -> Iterator[Tensor]:
        start = 0
        for length in (4, 1, 6, 2):
            yield torch.arange(start, start + length)
            start += length


class Wild(Sampler[list[int]]):
    """Batches of 1 to 6, lazily drawn with every generator there is, without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(TOTAL))
        random.shuffle(left)
        while left:
            count = 1 + int(numpy.random.randint(6))
            yield [left.pop(int(torch.randint(len(left), ()))) for _ in range(min(count, len(left)))]


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield random.randrange(TOTAL)


class TensorBatches(Sampler[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randperm(TOTAL).split(5))


KINDS: dict[str, Callable[[], DataLoader[Any]]] = {
    "sequential": lambda: DataLoader(Numbers(), 4),
    "drop_last": lambda: DataLoader(Numbers(), 4, drop_last=True),
    "tiny last batch": lambda: DataLoader(Numbers(), 11),
    "one by one": lambda: DataLoader(Numbers(3), 1),
    "one batch": lambda: DataLoader(Numbers(), 100),
    "in bulk": lambda: DataLoader(NumbersInBulk(), 4),
    "subset": lambda: DataLoader(Subset(Numbers(), range(3, 20)), 4),
    "shuffled": lambda: DataLoader(Numbers(), 4, shuffle=True),
    "with replacement": lambda: DataLoader(Numbers(), 4, sampler=RandomSampler(Numbers(), True, 40)),
    "own generator": lambda: DataLoader(Numbers(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: DataLoader(Numbers(), 4, sampler=WeightedRandomSampler(range(1, TOTAL + 1), 30)),
    "subset random": lambda: DataLoader(Numbers(), 4, sampler=SubsetRandomSampler(range(3, 20))),
    "list as sampler": lambda: DataLoader(Numbers(), 4, sampler=[5, 3, 3, 8, 1]),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=Wild()),
    "batches as tensors": lambda: DataLoader(Numbers(), batch_sampler=TensorBatches()),
    "stream": lambda: DataLoader(Count(), 4),
    "stream, drop_last": lambda: DataLoader(Count(), 4, drop_last=True),
    "stream, tiny last batch": lambda: DataLoader(Count(), 11),
    "shuffling stream": lambda: DataLoader(Shuffling(), 4),
    "stream shuffling at once": lambda: DataLoader(ShufflingAtOnce(), 4),
    "ready batches": lambda: DataLoader(Numbers(), None, sampler=BatchSampler(RandomSampler(Numbers()), 4, False)),
    "ready stream": lambda: DataLoader(Chunks(), None),
}
PROCESSES: dict[str, Callable[[], DataLoader[Any]]] = {
    "tiny last batch": lambda: DataLoader(Numbers(), 11, shuffle=True, num_workers=2),
    "batch sampler": lambda: DataLoader(Numbers(), batch_sampler=Wild(), num_workers=2),
    "stream": lambda: DataLoader(Count(), 4, num_workers=2),
    "stream, drop_last": lambda: DataLoader(Count(), 5, drop_last=True, num_workers=2),
    "shuffling stream": lambda: DataLoader(Shuffling(), 4, num_workers=2),
    "stream shuffling by process seed": lambda: DataLoader(ShufflingByProcessSeed(), 4, num_workers=2),
    "ready stream": lambda: DataLoader(Chunks(), None, num_workers=1),
}
ORDERED = {"sequential", "drop_last", "tiny last batch", "one by one", "one batch", "in bulk", "subset"}
ORDERED |= {"list as sampler", "stream", "stream, drop_last", "stream, tiny last batch", "ready stream"}
RANDOM = set(KINDS) - ORDERED
COMPLETE = RANDOM - {"with replacement", "weighted", "subset random"}


def kinds(table: dict[str, Any], names: set[str] | None = None) -> Any:
    chosen = {name: make for name, make in table.items() if names is None or name in names}
    return pytest.mark.parametrize("make", chosen.values(), ids=chosen)


def epoch_of(make: Callable[[], DataLoader[Any]], rank: int, size: int, epochs: int = 1) -> list[Tensor]:
    """What worker `rank` has of the last of `epochs`; its generators differ from all others'."""
    seeds.seed_everything(1000 + rank)
    loader = shard(make(), world=make_world(rank, size))
    return [own(loader) for _ in range(epochs)][-1]


def own(loader: ShardedLoader) -> list[Tensor]:
    """The batches of an epoch without stand-ins, of which there is one sample."""
    parts = []
    for part in loader:
        assert len(part) == max(1, loader.num_samples)
        parts.append(part[: loader.num_samples])
    return parts


def global_batches(make: Callable[[], DataLoader[Any]], size: int, epochs: int = 1) -> list[list[int]]:
    """The workers' parts of each step, put together in order of rank."""
    workers = [epoch_of(make, rank, size, epochs) for rank in range(size)]
    return [torch.cat(parts).tolist() for parts in zip(*workers, strict=True)]


# --- The parts are the batch ---


@kinds(KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_parts_put_together_are_the_global_batches_of_one_worker(make: Any, size: int) -> None:
    assert global_batches(make, size) == global_batches(make, 1)


@kinds(KINDS)
@pytest.mark.parametrize("size", [2, 5])
def test_parts_are_balanced(make: Any, size: int) -> None:
    for parts in zip(*(epoch_of(make, rank, size) for rank in range(size)), strict=True):
        counts = [len(part) for part in parts]
        assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


@kinds(KINDS, ORDERED)
def test_one_worker_gets_what_the_plain_loader_yields(make: Any) -> None:
    assert global_batches(make, 1) == [batch.tolist() for batch in make()]


@kinds(KINDS, COMPLETE)
@pytest.mark.parametrize("size", [1, 3])
def test_every_sample_counts_once_an_epoch(make: Any, size: int) -> None:
    samples = [sample for batch in global_batches(make, size) for sample in batch]
    assert Counter(samples) == Counter(range(TOTAL))
    assert samples != sorted(samples)


@kinds(PROCESSES)
def test_loader_processes_change_nothing(make: Any) -> None:
    alone = global_batches(make, 1)
    assert global_batches(make, 3) == alone
    samples = [sample for batch in alone for sample in batch]
    assert len(samples) == len(set(samples)) and (len(samples) >= 20 or "Chunks" in str(make().dataset))


@pytest.mark.parametrize("make", [lambda: DataLoader(Numbers(7), 3), lambda: DataLoader(Count(7), 3)])
def test_a_source_can_travel_into_spawned_processes(make: Any) -> None:
    parts = shard(make(), world=make_world(1, 2))._parts
    there = pickle.loads(ForkingPickler.dumps((parts.dataset, parts.worker_init_fn, parts.collate_fn)))
    sampler = None if isinstance(there[0], IterableDataset) else parts.sampler
    arrived = DataLoader(there[0], None, sampler=sampler, collate_fn=there[2])
    assert [(part.size, part.total, part.batch.tolist()) for part in arrived] == [(1, 3, [2]), (1, 3, [5]), (0, 1, [6])]


def test_a_worker_fetches_its_own_samples_only() -> None:
    dataset = Numbers()
    epoch = list(shard(DataLoader(dataset, 4, shuffle=True), world=make_world(1, 2)))
    assert dataset.fetched == torch.cat(epoch).tolist()
    assert len(dataset.fetched) == 11


def test_an_endless_sampler_is_read_no_further_than_asked() -> None:
    loader = shard(DataLoader(Numbers(), 4, sampler=Endless()), world=make_world(1, 2))
    assert [len(part) for part in islice(loader, 50)] == [2] * 50


def test_the_user_sees_an_error_of_the_data_set() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            raise KeyError("sample is missing")

    with pytest.raises(KeyError, match="sample is missing"):
        list(shard(DataLoader(Broken(), 4), world=make_world()))


# --- Parts without samples ---


def records(index: int) -> dict[str, Any]:
    return {"x": torch.full((2, 3), float(index)), "name": f"sample {index}", "pair": (index, 0.5)}


class Records(Numbers):
    def __getitem__(self, index: int) -> dict[str, Any]:
        return records(super().__getitem__(index))


class RecordStream(Count):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(records, super().__iter__())


@pytest.mark.parametrize("dataset", [Records(5), RecordStream(5)], ids=["map-style", "iterable"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_worker_without_samples_gets_the_first_of_the_batch(dataset: Any, num_workers: int) -> None:
    world = make_world(2, 3)
    loader = shard(DataLoader(dataset, 3, num_workers=num_workers), world=world)
    seen = []
    with pytest.warns(UserWarning, match="worker 2 has no sample of this batch") as warned:
        for batch in loader:
            weight = weight_of(world, batch["x"])
            assert weight.is_stand_in == world.hand_outs.is_standing_in
            seen.append((batch["name"], weight.value, weight.total, loader.num_samples))
    assert seen == [(["sample 2"], 1, 3, 1), (["sample 3"], 0, 2, 0)]
    assert len(warned) == 1


def test_the_first_row_stands_in_for_a_ready_batch() -> None:
    world = make_world(2, 3)
    loader = shard(DataLoader(Chunks(), None), world=world)
    with pytest.warns(UserWarning, match="stand-in"):
        assert [(part.tolist(), loader.num_samples) for part in loader] == [([3], 1), ([4], 0), ([9, 10], 2), ([11], 0)]


# --- Epochs ---


@kinds(KINDS, RANDOM)
def test_epochs_reshuffle_by_themselves_and_alike_on_all_workers(make: Any) -> None:
    epochs = [global_batches(make, 1, epochs) for epochs in (1, 2, 3)]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert global_batches(make, 3, epochs=3) == epochs[2]


@kinds(KINDS, RANDOM - {"own generator"})
def test_set_epoch_gives_the_order_of_that_epoch(make: Any) -> None:
    world = make_world(1, 2)
    first = shard(make(), world=world)
    epochs = [torch.cat(own(first)).tolist() for _ in range(3)]
    resumed = shard(make(), world=world)
    resumed.set_epoch(2)
    assert torch.cat(own(resumed)).tolist() == epochs[2]
    assert resumed.epoch == 3


@kinds(KINDS, set(KINDS) - {"own generator", "one batch"})
@pytest.mark.parametrize("given", [1, 2])
def test_resumes_at_the_next_global_batch_on_another_number_of_workers(make: Any, given: int) -> None:
    expected = global_batches(make, 1, epochs=2) + global_batches(make, 1, epochs=3)
    stopped = shard(make(), world=make_world(0, 2))
    list(stopped)
    under_way = iter(stopped)
    for _ in range(given):
        next(under_way)
    state = stopped.state_dict()
    assert state == {"epoch": 1, "batches": given}
    resumed = [shard(make(), world=make_world(rank, 3)) for rank in range(3)]
    for loader in resumed:
        loader.load_state_dict(state)
    rest = [[own(loader), own(loader)] for loader in resumed]
    got = [torch.cat(parts).tolist() for epoch in zip(*rest, strict=True) for parts in zip(*epoch, strict=True)]
    assert got == expected[given:]
    assert resumed[0].state_dict() == {"epoch": 3, "batches": 0}


def test_an_epoch_that_was_left_early_is_over() -> None:
    loader = shard(DataLoader(Numbers(), 4), world=make_world(0, 2))
    for _ in loader:
        break
    assert loader.state_dict() == {"epoch": 1, "batches": 0}


def test_the_order_is_a_function_of_the_seed() -> None:
    def order(seed: int) -> list[int]:
        return torch.cat(list(shard(DataLoader(Numbers(), 4, shuffle=True), world=make_world(seed=seed)))).tolist()

    assert order(1) == order(1) != order(2)


def test_the_epoch_is_the_one_under_way_or_the_next() -> None:
    loader = shard(DataLoader(Numbers(), 4), world=make_world())
    assert loader.epoch == 0
    for _ in loader:
        assert loader.epoch == 0
    assert loader.epoch == 1
    for _ in loader:
        break
    assert loader.epoch == 2, "an epoch that was left early is over too"
    loader.set_epoch(9)
    assert loader.epoch == 9
    for _ in loader:
        loader.set_epoch(5)
    assert loader.epoch == 5


def test_iterations_side_by_side_are_different_epochs() -> None:
    loader = shard(DataLoader(Numbers(), 4, shuffle=True), world=make_world())
    pairs = list(zip(loader, loader, strict=True))
    first, second = (torch.cat(batches).tolist() for batches in zip(*pairs, strict=True))
    assert first != second
    loader.set_epoch(0)
    assert torch.cat(list(loader)).tolist() == first
    assert torch.cat(list(loader)).tolist() == second


def test_an_iteration_that_ends_does_not_end_the_one_after_it() -> None:
    loader = shard(DataLoader(Numbers(), 4), world=make_world())
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    list(first)
    assert loader.epoch == 1
    list(second)
    assert loader.epoch == 2


def test_samplers_and_data_sets_with_an_epoch_are_told() -> None:
    class Told(SequentialSampler):
        def __init__(self, dataset: Any) -> None:
            super().__init__(dataset)
            self.told: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

    class ToldNumbers(Numbers):
        def __init__(self) -> None:
            super().__init__()
            self.told: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.told.append(epoch)

    dataset = ToldNumbers()
    sampler = Told(dataset)
    loader = shard(DataLoader(dataset, 4, sampler=sampler), world=make_world())
    list(loader)
    loader.set_epoch(4)
    list(loader)
    assert sampler.told == dataset.told == [0, 4]


# --- Random numbers ---


@kinds(KINDS)
def test_the_workers_own_generators_are_not_touched(make: Any) -> None:
    def draw() -> tuple[float, ...]:
        return torch.rand(()).item(), numpy.random.randn(), random.random()

    seeds.seed_everything(3)
    expected = [draw() for _ in range(6)]
    seeds.seed_everything(3)
    drawn = [draw()]
    loader = shard(make(), world=make_world(1, 2))
    parts = iter(loader)
    for _ in range(2):
        next(parts, None)
        drawn.append(draw())
    list(parts)
    drawn.append(draw())
    list(loader)
    drawn += [draw(), draw()]
    assert drawn == expected


@kinds(KINDS, RANDOM - {"own generator"})
def test_what_the_worker_draws_does_not_change_the_order(make: Any) -> None:
    def walk(disturb: bool) -> list[list[int]]:
        batches = []
        for part in shard(make(), world=make_world(1, 2)):
            batches.append(part.tolist())
            if disturb:
                torch.rand(3), numpy.random.rand(5), random.random()
        return batches

    assert walk(disturb=True) == walk(disturb=False)


class ProcessSeeds(Numbers):
    """What the loader processes draw, and from which seed."""

    def __getitem__(self, index: int) -> Any:
        process = get_worker_info()
        assert process is not None and process.dataset is self
        return process.seed, int(torch.randint(2**40, ())), random.random(), numpy.random.rand()


def test_loader_processes_draw_differently_on_each_worker_and_in_each_epoch_and_reproducibly() -> None:
    def drawn(rank: int, epoch: int, seed: int = 7) -> list[Any]:
        dataset = ProcessSeeds(4)
        loader = DataLoader(dataset, 2, num_workers=2, collate_fn=list)
        sharded = shard(loader, world=make_world(rank, 2, seed))
        sharded.set_epoch(epoch)
        return [sample for part in sharded for sample in part]

    runs = [drawn(0, 0), drawn(1, 0), drawn(0, 1), drawn(1, 1), drawn(0, 0, seed=8)]
    for kind in zip(*(sample for run in runs for sample in run), strict=True):
        assert len(set(kind)) == len(kind) == 10
    assert drawn(1, 1) == runs[3]


class Noise(Count):
    def __iter__(self) -> Iterator[float]:
        for _ in range(8):
            yield torch.rand(()).item() + numpy.random.rand() + random.random()


def add_noise(samples: list[float]) -> list[tuple[float, float]]:
    return [(sample, torch.rand(()).item() + numpy.random.rand() + random.random()) for sample in samples]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_draws_alike_on_all_workers_and_collating_does_not(num_workers: int) -> None:
    def parts(rank: int, size: int) -> list[Any]:
        seeds.seed_everything(rank)
        loader = DataLoader(Noise(), 4, num_workers=num_workers, collate_fn=add_noise)
        return [pair for part in shard(loader, world=make_world(rank, size)) for pair in part]

    alone, (first, second) = parts(0, 1), (parts(0, 2), parts(1, 2))
    assert [sample for sample, _ in first[:2] + second[:2] + first[2:] + second[2:]] == [sample for sample, _ in alone]
    assert not {own for _, own in first} & {own for _, own in second}


class ProcessNoise(IterableDataset[float]):
    def __iter__(self) -> Iterator[float]:
        return iter([torch.rand(()).item(), numpy.random.rand(), random.random()])


def test_the_loader_processes_of_a_stream_draw_differently() -> None:
    loader = DataLoader(ProcessNoise(), 3, num_workers=2, collate_fn=list)
    first, second = shard(loader, world=make_world())
    assert not set(first) & set(second)


# --- Loader processes ---


class Prepared(Numbers):
    prepared_by: int | None = None

    def __getitem__(self, index: int) -> Any:
        return index, self.prepared_by


def prepare(number: int) -> None:
    process = get_worker_info()
    assert process is not None and isinstance(process.dataset, Prepared)
    process.dataset.prepared_by = number


def test_worker_init_fn_finds_the_users_data_set() -> None:
    loader = DataLoader(Prepared(4), 2, num_workers=2, worker_init_fn=prepare, collate_fn=list)
    assert list(shard(loader, world=make_world(0, 1))) == [[(0, 0), (1, 0)], [(2, 1), (3, 1)]]


@pytest.mark.parametrize("dataset", [Numbers(), Shuffling()], ids=["map-style", "iterable"])
def test_persistent_processes(dataset: Any) -> None:
    def make() -> DataLoader[Any]:
        shuffle = None if isinstance(dataset, IterableDataset) else True
        return DataLoader(dataset, 4, shuffle, num_workers=2, persistent_workers=True)

    loaders = [shard(make(), world=make_world(rank, 2)) for rank in range(2)]
    epochs = []
    for _ in range(3):
        workers = [list(loader) for loader in loaders]
        epochs.append([torch.cat(parts).tolist() for parts in zip(*workers, strict=True)])
    for epoch in epochs:
        assert Counter(sample for batch in epoch for sample in batch) == Counter(range(TOTAL))
    assert epochs[0] != epochs[1] != epochs[2]
    next(iter(loaders[0]))  # Left early: the processes have begun this epoch, and are called back.
    loaders[0].set_epoch(1)
    resumed = [part.tolist() for part in loaders[0]]
    assert resumed == [batch[: len(batch) - len(batch) // 2] for batch in epochs[1]]


class ProcessIds(Numbers):
    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.parametrize("persistent", [True, False])
def test_processes_persist_if_asked(persistent: bool) -> None:
    loader = DataLoader(ProcessIds(4), 2, num_workers=1, persistent_workers=persistent)
    sharded = shard(loader, world=make_world())
    first, second = ({int(pid) for part in sharded for pid in part} for _ in range(2))
    assert len(first) == 1 and os.getpid() not in first
    assert (first == second) is persistent


def test_settings_of_the_loader_are_kept() -> None:
    loader = DataLoader(Numbers(), 4, num_workers=2, timeout=30, prefetch_factor=3, multiprocessing_context="fork")
    parts = shard(loader, world=make_world())._parts
    assert (parts.num_workers, parts.timeout, parts.prefetch_factor) == (2, 30, 3)
    assert parts.multiprocessing_context is loader.multiprocessing_context


# --- The weight of the batch ---


def weight_of(world: World, *tensors: Tensor, trains: bool = True) -> Weight:
    weight = world.hand_outs.find(tensors, trains=trains)
    assert weight is not None
    return weight


def weights(world: World, loader: ShardedLoader) -> list[tuple[Any, Any]]:
    found = (weight_of(world, part) for part in loader)
    return [(weight.value, weight.total) for weight in found]


@pytest.mark.parametrize("make", [lambda: DataLoader(Numbers(11), 4), lambda: DataLoader(Count(11), 4)])
def test_each_batch_is_known_by_its_weight(make: Any) -> None:
    world = make_world(1, 3)
    assert weights(world, shard(make(), world=world)) == [(1, 4), (1, 4), (1, 3)]
    assert world.hand_outs.find([torch.ones(1)], trains=True) is None


def test_the_weight_of_a_ready_batch_is_its_length() -> None:
    world = make_world(0, 3)
    assert weights(world, shard(DataLoader(Chunks(), None), world=world)) == [(2, 4), (1, 1), (2, 6), (1, 2)]


def test_batches_read_ahead_are_known_by_their_tensors_and_by_views_of_them() -> None:
    world = make_world(0, 2)
    parts = list(shard(DataLoader(Numbers(9), 4), world=world))
    assert [weight_of(world, part.view(-1, 1)).total for part in parts] == [4, 4, 1]


def test_a_changed_batch_is_the_one_in_use() -> None:
    world = make_world(0, 2)
    for part in shard(DataLoader(Numbers(9), 4), world=world):
        weight = weight_of(world, part.double())
        assert (weight.value, weight.doubt) == (len(part), "")


def read_ahead(loader: ShardedLoader) -> Iterator[Tensor]:
    """Batches, each when the next has been read, as copies that nobody knows."""
    parts = iter(loader)
    ahead = next(parts).clone()
    for part in parts:
        yield ahead
        ahead = part.clone()
    yield ahead


def test_a_changed_batch_that_was_read_ahead_is_known_by_its_length() -> None:
    world = make_world(0, 2)
    loader = shard(DataLoader(Numbers(9), 4), world=world)
    assert [weight_of(world, part).total for part in read_ahead(loader)] == [4, 4, 1]


def test_where_it_cannot_be_told_a_weight_has_to_be_given() -> None:
    world = make_world(0, 2)
    long, short = (iter(shard(DataLoader(Numbers(total), 4), world=world)) for total in (4, 3))
    next(long), next(short)
    weight = weight_of(world, torch.ones(2))
    assert "2 of 3 and 2 of 4 samples" in weight.doubt
    with pytest.raises(UsageError, match=r"lockstep.backward\(loss, weight"):
        in_force(None, weight)
    explicit = Weight(5)
    assert in_force(explicit, weight) is explicit
    tagged = weight_of(world, (known := next(iter(shard(DataLoader(Numbers(3), 3), world=world)))), known)
    assert (tagged.total, tagged.doubt) == (3, "")


def test_an_evaluation_inside_the_training_loop_leaves_the_batch_in_use() -> None:
    world = make_world(1, 2)
    training = shard(DataLoader(Numbers(9), 4), world=world)
    evaluation = shard(DataLoader(Numbers(5), 5), world=world)
    with pytest.warns(UserWarning, match="stand-in"):
        for part in training:
            assert weights(world, evaluation) == [(2, 5)]
            assert weight_of(world, part.clone()).value == training.num_samples
            assert world.hand_outs.is_standing_in == (training.num_samples == 0)


@pytest.mark.parametrize("leaves", ["early", "by an error", "with another"])
def test_a_loop_that_was_left_leaves_nothing(leaves: str) -> None:
    world = make_world()
    loader = shard(DataLoader(Numbers(), 4), world=world)
    if leaves == "early":
        for _ in loader:
            break
    elif leaves == "by an error":
        with pytest.raises(KeyError):
            for _ in loader:
                raise KeyError
    else:
        for _ in zip(loader, shard(DataLoader(Numbers(8), 4), world=world), strict=False):
            pass
    gc.collect()
    assert world.hand_outs.find([torch.ones(4)], trains=True) is None


# --- Evaluation ---


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_evaluation_over_any_number_of_workers_is_evaluation_on_one(size: int, batch_size: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3).double()
    dataset = torch.utils.data.TensorDataset(torch.randn(61, 4).double(), torch.randint(3, (61,)))
    x, y = dataset.tensors
    correct, counted, confusion = 0, 0, torch.zeros(3, 3, dtype=torch.int64)
    for rank in range(size):
        loader = shard(DataLoader(dataset, batch_size, shuffle=True), world=make_world(rank, size))
        for inputs, targets in loader:
            targets = targets[: loader.num_samples]
            predicted = model(inputs).argmax(1)[: loader.num_samples]
            correct += int((predicted == targets).sum())
            counted += len(targets)
            confusion.index_put_((targets, predicted), torch.tensor(1), accumulate=True)
    expected = model(x).argmax(1)
    assert (correct, counted) == (int((expected == y).sum()), 61)
    assert torch.equal(confusion, torch.bincount(y * 3 + expected, minlength=9).view(3, 3))


# --- Moving ---


class Pinnable:
    def pin_memory(self) -> str:
        return "pinned"


def test_torch_finds_the_memory_to_pin() -> None:
    assert pin_memory(Loaded(2, 5, {"x": Pinnable()})) == Loaded(2, 5, {"x": "pinned"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pinned_parts_arrive_on_the_gpu(num_workers: int) -> None:
    def make(device: Any) -> ShardedLoader:
        loader = DataLoader(Records(5), 3, pin_memory=True, num_workers=num_workers)
        return shard(loader, world=make_world(1, 2), device=device)

    for staying, moved in zip(make(None), make("cuda"), strict=True):
        assert staying["x"].is_pinned() and moved["x"].is_cuda
        assert torch.equal(staying["x"], moved["x"].cpu())


# --- The loader as an object ---


def test_batches_are_on_the_workers_device_unless_asked() -> None:
    def devices(device: Any) -> set[str]:
        world = make_world()
        world.device = torch.device("meta")
        loader = shard(DataLoader(Records(4), 2), world=world, device=device)
        return {leaf.device.type for batch in loader for leaf in (batch["x"], *batch["pair"])}

    assert devices(None) == devices(True) == devices(torch.device("meta")) == {"meta"}
    assert devices("cpu") == devices(False) == {"cpu"}


def test_the_original_shows_through() -> None:
    dataset = Numbers()
    loader = DataLoader(dataset, 4, num_workers=0, collate_fn=list, shuffle=True)
    sharded = shard(loader, world=make_world(1, 2))
    assert sharded.dataset is dataset and sharded.batch_size == 4 and sharded.collate_fn is list
    assert sharded.sampler is loader.sampler and sharded.batch_sampler is loader.batch_sampler
    assert "worker 1 of 2" in repr(sharded)
    with pytest.raises(AttributeError):
        sharded.no_such_thing


@pytest.mark.parametrize("size", [1, 3])
def test_the_length_is_the_number_of_global_batches(size: int) -> None:
    for make in (KINDS["shuffled"], KINDS["drop_last"], KINDS["tiny last batch"]):
        loader = shard(make(), world=make_world(size - 1, size))
        assert len(loader) == len(make()) == len(list(loader))
    with pytest.raises(TypeError):
        len(shard(DataLoader(Count(), 4), world=make_world()))


def test_without_a_world_the_current_one_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(1, 2)
    monkeypatch.setattr("lockstep.data.loader.join", lambda: world)
    assert [part.tolist() for part in shard(DataLoader(Numbers(4), 4))] == [[2, 3]]


# --- Refusals ---


class OwnLoop(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


class OwnDistributed(SequentialSampler):
    num_replicas = 2


class SplitByNode(Count):
    """What Hugging Face's split_dataset_by_node makes of a stream."""

    _distributed = SimpleNamespace(rank=0, world_size=2)


def distributed(num_replicas: int = 2) -> DistributedSampler[int]:
    return DistributedSampler(Numbers(), num_replicas, rank=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: [1, 2, 3], "not a list"),
        (lambda: shard(DataLoader(Numbers(), 4), world=make_world()), "sharded already"),
        (lambda: DataLoader(Numbers(), 4, sampler=distributed()), "DistributedSampler gives each worker its part"),
        (lambda: DataLoader(Numbers(), 4, sampler=distributed(1)), "DistributedSampler gives each worker its part"),
        (lambda: DataLoader(Numbers(), batch_sampler=BatchSampler(distributed(), 4, False)), "DistributedSampler"),
        (lambda: DataLoader(Numbers(), None, sampler=BatchSampler(distributed(), 4, False)), "DistributedSampler"),
        (lambda: DataLoader(Numbers(), 4, sampler=OwnDistributed(Numbers())), "OwnDistributed"),
        (lambda: DataLoader(SplitByNode(), 4), "split_dataset_by_node"),
        (lambda: OwnLoop(Numbers()), "OwnLoop has an __iter__"),
        (lambda: DataLoader(torch.utils.data.datapipes.iter.IterableWrapper([1, 2]), 2), "IterDataPipe"),
    ],
)
def test_what_cannot_be_right_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shard(make(), world=make_world())


def test_a_ready_batch_that_cannot_be_cut_is_refused() -> None:
    loader = DataLoader(torch.utils.data.StackDataset(torch.ones(2, 3), torch.ones(2, 4)), None)
    with pytest.raises(UsageError, match=r"different lengths, \[3, 4\]"):
        list(shard(loader, world=make_world()))
