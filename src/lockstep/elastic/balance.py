"""Shards move away from slow workers: who has how many, by how long each takes for one.

Every worker tells in the report of a step how long the forward pass of a shard took it, so all see the same numbers
and come to the same plan. A plan is changed at a boundary as members are, at the price of a regrouping, so it is
damped: the times are smoothed, a new plan has to promise GAIN less time for a step, and REST steps lie between two
changes. No bit of the result depends on it. Pure.
"""

from collections.abc import Sequence

GAIN = 0.15
REST = 50
_SMOOTHING = 0.2
"""The weight of the newest time."""


def plan(times: Sequence[float], shards: int) -> list[int]:
    """How many shards each worker gets, at least one, so that the slowest is done as early as can be."""
    counts = [1] * len(times)
    for _ in range(shards - len(times)):
        rank = min(range(len(times)), key=lambda each: ((counts[each] + 1) * times[each], counts[each], each))
        counts[rank] += 1
    return counts


def even(workers: int, shards: int) -> list[int]:
    """As many for each; those that come first get the rest."""
    return [shards // workers + (rank < shards % workers) for rank in range(workers)]


def takes(counts: Sequence[int], times: Sequence[float]) -> float:
    """When the last worker is done."""
    return max(count * time for count, time in zip(counts, times, strict=True))


class Balance:
    """What is known of the speeds of the members of a run, on one worker."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._times: dict[int, float] = {}
        """Smoothed, by member number."""
        self._steps = 0
        """Since the plan was last changed."""

    def see(self, members: Sequence[int], times: Sequence[float]) -> None:
        """How long a shard took each of `members`, in one step; 0 where that was not measured."""
        self._steps += 1
        for member, time in zip(members, times, strict=True):
            if time > 0:
                self._times[member] = time + (1 - _SMOOTHING) * (self._times.get(member, time) - time)

    def counts(self, members: Sequence[int]) -> list[int]:
        """How many shards each of `members` is to have; a newcomer counts as fast as the others are on average."""
        self._steps = 0
        known = [self._times[member] for member in members if member in self._times]
        if not known:
            return even(len(members), self._shards)
        mean = sum(known) / len(known)
        return self._better(even(len(members), self._shards), [self._times.get(member, mean) for member in members])

    def is_due(self, members: Sequence[int], counts: Sequence[int]) -> bool:
        """Whether another plan than `counts` is worth a change now."""
        if self._steps < REST or any(member not in self._times for member in members):
            return False
        times = [self._times[member] for member in members]
        return takes(plan(times, self._shards), times) < (1 - GAIN) * takes(counts, times)

    def _better(self, counts: list[int], times: Sequence[float]) -> list[int]:
        planned = plan(times, self._shards)
        return planned if takes(planned, times) < (1 - GAIN) * takes(counts, times) else counts
