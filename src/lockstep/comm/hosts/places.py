"""Which workers of a group are on which host, and so who talks to whom between hosts. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Places:
    """The ranks of a group by host, as the worker `rank` sees them."""

    ranks: tuple[tuple[int, ...], ...]
    """By host, in order of rank; hosts in the order of their first ranks."""
    mine: int
    """The number of this worker's host."""
    local: int
    """This worker's number on its host."""

    @classmethod
    def of(cls, names: Sequence[str], rank: int) -> "Places":
        """`names`: by rank, what is equal for workers of one host."""
        hosts = tuple(tuple(rank for rank, each in enumerate(names) if each == name) for name in dict.fromkeys(names))
        mine = next(number for number, ranks in enumerate(hosts) if rank in ranks)
        return cls(hosts, mine, hosts[mine].index(rank))

    @property
    def rank(self) -> int:
        """This worker's rank in the group."""
        return self.ranks[self.mine][self.local]

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.ranks)

    @property
    def num_local(self) -> int:
        """How many workers this host has."""
        return len(self.ranks[self.mine])

    @cached_property
    def num_columns(self) -> int:
        """How many workers every host has at least: so many of each share what travels between hosts."""
        return min(map(len, self.ranks))

    @cached_property
    def column(self) -> dict[int, int]:
        """By other host, the rank of the worker with this one's number; empty where not every host has one."""
        if self.local >= self.num_columns:
            return {}
        return {number: ranks[self.local] for number, ranks in enumerate(self.ranks) if number != self.mine}

    @cached_property
    def away(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each other host, those first that come behind this host: so that not all turn to one at once."""
        order = [(self.mine + step) % self.num_hosts for step in range(1, self.num_hosts)]
        return {number: self.ranks[number] for number in order}

    def partner(self, host: int) -> int:
        """The worker of another host that is told for all of its host what this worker has."""
        return self.ranks[host][self.local % len(self.ranks[host])]

    @cached_property
    def partners(self) -> tuple[int, ...]:
        """The workers of other hosts that tell this one, for all of this host, what they have."""
        return tuple(rank for ranks in self.away.values() for number, rank in enumerate(ranks) if self._is_mine(number))

    def _is_mine(self, number: int) -> bool:
        return number % self.num_local == self.local

    @property
    def is_in_order(self) -> bool:
        """Whether ranks go by host: then the workers of a host own consecutive shards."""
        return [rank for ranks in self.ranks for rank in ranks] == list(range(sum(map(len, self.ranks))))
