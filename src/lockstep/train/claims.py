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
from lockstep.data.cut import cut
from lockstep.data.shard_source import GlobalBatch, ShardPick, ShardPicks, ShardSamples, Shelf
from lockstep.errors import UsageError
from lockstep.train.connection import Until
from lockstep.train.feed import Feed, Loading

Claim = tuple[int, int]
"""An epoch, and the number of a shard in it, over all its batches."""


@dataclass(frozen=True, slots=True)
class Remainder:
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

    def after(self, standings: Sequence["Standing"]) -> "Remainder":
        """What is left of this where the workers stand so, all that they were given being used."""
        epoch = max(standing.epoch for standing in standings)
        claimed = max(standing.claimed for standing in standings if standing.epoch == epoch)
        left = sorted(number for when, number in self.pending if when == epoch)
        pending = {claim for standing in standings for claim in standing.pending}
        pending |= {(epoch, number) for number in left[claimed:]}
        pending |= {claim for claim in self.pending if claim[0] > epoch}
        begun, begin = max(epoch, self.epoch), self.next if epoch <= self.epoch else 0
        if epoch == begun:
            begin += max(0, claimed - len(left))
        return Remainder(begun, begin, tuple(sorted(pending)))

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint has it."""
        return {"epoch": self.epoch, "next": self.next, "pending": [list(claim) for claim in self.pending]}

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "Remainder":
        """What `to_json` was made of."""
        pending = tuple((int(epoch), int(number)) for epoch, number in state["pending"])
        return cls(int(state["epoch"]), int(state["next"]), pending)


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one worker is in a feed."""

    epoch: int = -1
    """The epoch in which it claims; -1 if it has not begun."""
    claimed: int = 0
    """In that epoch, how many of the remaining shards it knows to be claimed, by itself or by others."""
    pending: tuple[Claim, ...] = ()
    """What it has claimed and not given out."""


@dataclass(slots=True)
class Counter:
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


class ClaimedPick(NamedTuple):
    """One shard to be fetched."""

    shard: int
    pick: ShardPick
    """The global batch that it is of."""


class ClaimedPicks:
    """The picks of one worker in the epoch that `order` stands at: claimed one by one, when they are asked for."""

    def __init__(self, picks: ShardPicks, order: Any, shards: int, total: int, counter: Counter, key: str) -> None:
        self._picks, self._order, self._shards, self._total = picks, order, shards, total
        self._counter, self._key = counter, key
        self.remainder = Remainder()
        self.pending: list[Claim] = []
        self._epoch, self._claimed = -1, 0

    @property
    def standing(self) -> Standing:
        """Where this worker is."""
        return Standing(self._epoch, self._claimed, tuple(self.pending))

    def give_out(self, claim: Claim) -> None:
        """The trainer has it."""
        self.pending.remove(claim)

    def __iter__(self) -> Iterator[ClaimedPick]:
        return self._walk(self._order.epoch)

    def _walk(self, epoch: int) -> Iterator[ClaimedPick]:
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
                yield ClaimedPick(shard, pick)

    def _claim(self, epoch: int) -> int | None:
        place = self._counter.take(f"{self._key}/{epoch}")
        self._epoch, self._claimed = epoch, place + 1
        return self.remainder.shard(epoch, place, self._total)


class ClaimedSamples(Dataset[GlobalBatch]):
    """Shard after shard of a map-style data set, each as a global batch of which this worker has that one."""

    def __init__(self, dataset: Any, loading: Loading, shards: int, seed: int) -> None:
        self.dataset = dataset
        self._collate = loading.collate_fn or torch_collate
        self._shards, self._seed = shards, seed

    def __getitem__(self, claimed: ClaimedPick) -> GlobalBatch:
        shelf = Shelf(self._collate, (claimed.shard, claimed.shard + 1), self._shards, self._seed)
        return ShardSamples(self.dataset, shelf)[claimed.pick]


class ClaimedFeed(Feed):
    """One data set, read for some epochs by whoever is free."""

    def __init__(
        self,
        dataset: Any,
        loading: Loading,
        *,
        shards: int,
        seed: int,
        counter: Counter,
        on_begin: Callable[["ClaimedFeed"], None],
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise UsageError(
                "Async takes map-style data sets: workers claim shards by number, and of a stream every worker would "
                "have to read what the others claimed. Give the data set __getitem__ and __len__, or use no strategy."
            )
        super().__init__(dataset, loading, run=(0, 1), shards=shards, seed=seed)
        if loading.sampler is not None and not hasattr(loading.sampler, "__len__"):
            raise UsageError("Async must know how many shards an epoch has: give the sampler a __len__.")
        self._shards, self.seed, self._on_begin = shards, seed, on_begin
        total = len(self) * shards
        self._claims = ClaimedPicks(ShardPicks(self._clock), self._clock, shards, total, counter, str(seed))
        self._loader = self._open(ClaimedSamples(dataset, loading, shards, seed), self._claims)
        self._is_resumed = False

    @property
    def standing(self) -> Standing:
        """Where this worker is."""
        return self._claims.standing

    @property
    def remainder(self) -> Remainder:
        """What was left when it was begun."""
        return self._claims.remainder

    def go_on_from(self, remainder: Remainder) -> None:
        """Claim what was left only."""
        self._claims.remainder = remainder
        self._is_resumed = True

    def walk(self, epoch: int, num_skipped: int = 0, stream: Any = None) -> Iterator[GlobalBatch]:
        """What this worker claims of one epoch, and of what is pending from earlier ones."""
        if num_skipped and not self._is_resumed:  # The run was stopped under another strategy, between two batches.
            self.go_on_from(Remainder(epoch, num_skipped * self._shards))
        self._on_begin(self)
        for each in (*self._claims.remainder.epochs_before(epoch), epoch):
            for batch in super().walk(each):
                self._claims.give_out((each, batch.number * self._shards + batch.shards[0].number))
                yield batch
