"""What an owner knows of the gradients that are still to come, so that none is ever staler than the bound. Pure.

The staleness of a gradient is the number of updates that its owner has applied between the reading of the parameters it
was computed from and the moment it is applied itself. With `bound` k, version V and outstanding readings in the order
in which they were made, r_0 <= r_1 <= ..., the ledger keeps

    V + j - r_j <= k    for every place j

which says that all of them can still be applied in time, one after the other, oldest first:

    reading     adds a last place j with r_j = V: allowed while at most k readings are outstanding
    applying    makes V one more, and moves those behind one place forward, for whom nothing changes; it is allowed if
                those before it can afford it. The oldest has none before it, so it can always be applied at once, with
                a staleness V - r_0 <= k.
"""


class Ledger:
    """The readings of one owner's parameters whose gradients have not been applied."""

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.version = 0
        """How many updates have been applied."""
        self._readings: dict[int, int] = {}
        """By worker the version that it read, in the order of reading."""

    def read(self, worker: int) -> None:
        """`worker` reads the parameters, for a gradient."""
        assert worker not in self._readings, f"worker {worker} reads twice"
        assert len(self._readings) <= self.bound, f"{len(self._readings)} readings are outstanding already"
        self._readings[worker] = self.version

    def may_apply(self, worker: int) -> bool:
        """Whether the gradient of `worker` can be applied now without making an older one too stale."""
        for place, (reader, version) in enumerate(self._readings.items()):
            if reader == worker:
                return True
            if self.version + 1 + place - version > self.bound:
                return False
        raise AssertionError(f"worker {worker} has read nothing")

    def apply(self, worker: int) -> int:
        """The gradient of `worker` is applied; returns its staleness."""
        assert self.may_apply(worker)
        staleness = self.version - self._readings.pop(worker)
        self.version += 1
        return staleness

    def withdraw(self, worker: int) -> None:
        """No gradient will come of what `worker` has read."""
        self._readings.pop(worker, None)
