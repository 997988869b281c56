"""Which batch is the current one, where loops over sharded loaders are nested or run side by side."""

from dataclasses import dataclass, field

from lockstep.weight import Weight
from lockstep.world import World


@dataclass(frozen=True, slots=True)
class BatchWeight(Weight):
    """The weight of a batch that a sharded loader handed out."""

    claim: "Claim | None" = field(default=None, repr=False, compare=False)
    """The iteration whose batch it is."""


class Claim:
    """One iteration's say over `world.weight`: `hold` for each batch, `release` at the end.

    A released claim gives back what was there before it. Where loops run side by side, as in
    `zip(labelled, unlabelled)`, that may be a loop that has gone on since, or that is over too and passed over.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._held: BatchWeight | None = None
        self._before: Weight | None = None
        self._released = False

    def hold(self, size: int, total: int) -> None:
        """Say that this worker now works on `size` of the `total` samples of a global batch."""
        if self._held is None:
            self._before = self._world.weight
        self._held = BatchWeight(size, total, claim=self)
        self._world.weight = self._held

    def release(self) -> None:
        """Put back the weight from before, unless another's has taken the place of this claim's."""
        self._released = True
        if self._held is not None and self._world.weight is self._held:
            self._world.weight = self._below()

    def _below(self) -> Weight | None:
        before = self._before
        if not isinstance(before, BatchWeight) or before.claim is None:
            return before
        return before.claim._below() if before.claim._released else before.claim._held
