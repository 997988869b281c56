"""Shards that are claimed instead of assigned: a worker that is free takes the next one that nobody has.

A counter in the world's store, one for each epoch, says how many have been claimed. So however fast the workers are,
every shard of an epoch is used once, and nobody waits for anybody at the end of an epoch. Loader processes claim ahead;
what was claimed and not given out yet is pending, and kept with a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset
from torch.utils.data import default_collate as torch_collate

from lockstep.comm.peers import Peers
from lockstep.data.order import cut
from lockstep.data.source import GlobalBatch, ShardPick, ShardPicks, ShardSamples, Shelf
from lockstep.errors import UsageError
from lockstep.train.asynchronous.connection import Until
from lockstep.train.batches import BatchSource, LoaderOptions, check_data

Claim = tuple[int, int]
"""An epoch, and the number of a shard in it, over all its batches."""


@dataclass(frozen=True, slots=True)
class QueueRemainder:
    """What a run that was stopped had left of a feed; everything, if not given otherwise."""

    epoch: int = 0
    """The last one that had been begun."""
    next: int = 0
    """In that epoch, the first shard that nobody had claimed."""
    pending: tuple[Claim, ...] = ()
    """Claimed, and not given out."""

    def shard(self, epoch: int, place: int, total: int) -> int | None:
        """The number of the shard at `place` among the remaining ones of `epoch`; None behind the last."""
        left = sorted(number for when, number in self.pending if when == epoch)
        begin = self.next if epoch == self.epoch else 0 if epoch > self.epoch else total
        number = left[place] if place < len(left) else begin + place - len(left)
        return number if number < total else None

    def epochs_before(self, epoch: int) -> list[int]:
        """Earlier epochs of which something is pending."""
        return sorted({when for when, _ in self.pending if when < epoch})

    def after(self, positions: Sequence["QueuePosition"]) -> "QueueRemainder":
        """What is left of this where the workers stand so, all that they were given being used."""
        epoch = max(position.epoch for position in positions)
        claimed = max(position.claimed for position in positions if position.epoch == epoch)
        left = sorted(number for when, number in self.pending if when == epoch)
        pending = {claim for position in positions for claim in position.pending}
        pending |= {(epoch, number) for number in left[claimed:]}
        pending |= {claim for claim in self.pending if claim[0] > epoch}
        begun, begin = max(epoch, self.epoch), self.next if epoch <= self.epoch else 0
        if epoch == begun:
            begin += max(0, claimed - len(left))
        return QueueRemainder(begun, begin, tuple(sorted(pending)))

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        return {"epoch": self.epoch, "next": self.next, "pending": [list(claim) for claim in self.pending]}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "QueueRemainder":
        """What `to_json` was made of."""
        pending = tuple((int(epoch), int(number)) for epoch, number in state["pending"])
        return cls(int(state["epoch"]), int(state["next"]), pending)


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """Where one worker is in a feed."""

    epoch: int = -1
    """The epoch in which it claims; -1 if it has not begun."""
    claimed: int = 0
    """In that epoch, how many of the remaining shards it knows to be claimed, by itself or by others."""
    pending: tuple[Claim, ...] = ()
    """What it has claimed and not given out."""


@dataclass(slots=True)
class SharedCounter:
    """Counts, over all workers: from 0, every number goes to one of them."""

    peers: Peers
    name: str
    check: Callable[[], None] = lambda: None
    """Raises if a worker is known to be lost."""
    _alone: dict[str, int] = field(default_factory=dict)

    def take(self, key: str) -> int:
        """The next number of `key`."""
        store = self.peers.store
        if store is None:
            self._alone[key] = self._alone.get(key, 0) + 1
            return self._alone[key] - 1
        taken: list[int] = []

        def attempt(_: float) -> bool:
            taken.append(store.add(f"{self.name}/{key}", 1))
            return True

        self.peers.wait(Until(attempt, self.check), "claiming a shard")
        return taken[0] - 1


class QueuedPick(NamedTuple):
    """One shard to be fetched."""

    shard: int
    pick: ShardPick
    """The global batch that it is of."""


class QueuedPicks:
    """The picks of one worker in the epoch that `order` stands at: claimed one by one, when they are asked for."""

    def __init__(
        self, picks: ShardPicks, order: Any, shards: int, total: int, counter: SharedCounter, key: str
    ) -> None:
        self._picks, self._order, self._shards, self._total = picks, order, shards, total
        self._counter, self._key = counter, key
        self.remainder = QueueRemainder()
        """What was left when the queue was begun."""
        self.pending: list[Claim] = []
        self._epoch, self._claimed = -1, 0

    @property
    def position(self) -> QueuePosition:
        """Where this worker is."""
        return QueuePosition(self._epoch, self._claimed, tuple(self.pending))

    def give_out(self, claim: Claim) -> None:
        """The trainer has it."""
        self.pending.remove(claim)

    def __iter__(self) -> Iterator[QueuedPick]:
        return self._walk(self._order.epoch)

    def _walk(self, epoch: int) -> Iterator[QueuedPick]:
        picks = iter(self._picks)
        pick: ShardPick | None = None
        while (number := self._claim(epoch)) is not None:
            batch, shard = divmod(number, self._shards)
            while pick is None or pick.number < batch:
                pick = next(picks, None)
                if pick is None:
                    return
            if cut(len(pick.indices), self._shards, shard).size:
                self.pending.append((epoch, number))
                yield QueuedPick(shard, pick)

    def _claim(self, epoch: int) -> int | None:
        place = self._counter.take(f"{self._key}/{epoch}")
        self._epoch, self._claimed = epoch, place + 1
        return self.remainder.shard(epoch, place, self._total)


class QueuedSamples(Dataset[GlobalBatch]):
    """Shard after shard of a map-style data set, each as a global batch of which this worker has that one."""

    def __init__(self, dataset: Any, loading: LoaderOptions, shards: int, seed: int) -> None:
        self.dataset = dataset
        self._collate = loading.collate_fn or torch_collate
        self._shards, self._seed = shards, seed

    def __getitem__(self, claimed: QueuedPick) -> GlobalBatch:
        shelf = Shelf(self._collate, (claimed.shard, claimed.shard + 1), self._shards, self._seed)
        return ShardSamples(self.dataset, shelf)[claimed.pick]


class ShardQueue(BatchSource):
    """One data set, read for some epochs by whichever worker is free."""

    def __init__(
        self,
        dataset: Any,
        loading: LoaderOptions,
        *,
        shards: int,
        seed: int,
        counter: SharedCounter,
        on_begin: Callable[["ShardQueue"], None],
    ) -> None:
        check_queue_data(dataset, loading)
        super().__init__(dataset, loading, run=(0, 1), shards=shards, seed=seed)
        self._shards, self.seed, self._on_begin = shards, seed, on_begin
        total = len(self) * shards
        self.claims = QueuedPicks(ShardPicks(self._clock), self._clock, shards, total, counter, str(seed))
        self._loader = self._open(QueuedSamples(dataset, loading, shards, seed), self.claims)
        self._is_resumed = False

    def go_on_from(self, remainder: QueueRemainder) -> None:
        """Claim what was left only."""
        self.claims.remainder = remainder
        self._is_resumed = True

    def walk(self, epoch: int, num_skipped: int = 0, stream: Any = None) -> Iterator[GlobalBatch]:
        """What this worker claims of one epoch, and of what is pending from earlier ones."""
        if num_skipped and not self._is_resumed:  # The run was stopped under another strategy, between two batches.
            self.go_on_from(QueueRemainder(epoch, num_skipped * self._shards))
        self._on_begin(self)
        for each in (*self.claims.remainder.epochs_before(epoch), epoch):
            for batch in super().walk(each):
                self.claims.give_out((each, batch.number * self._shards + batch.shards[0].number))
                yield batch


def check_queue_data(dataset: Any, loading: LoaderOptions) -> None:
    """Raise UsageError for what cannot be given out shard by shard."""
    if isinstance(dataset, IterableDataset):
        raise UsageError(
            "Async takes map-style data sets: workers claim shards by number, and of a stream every worker would "
            "have to read what the others claimed. Give the data set __getitem__ and __len__, or use no strategy."
        )
    check_data(dataset, loading)
    if loading.sampler is not None and not hasattr(loading.sampler, "__len__"):
        raise UsageError("Async must know how many shards an epoch has: give the sampler a __len__.")
