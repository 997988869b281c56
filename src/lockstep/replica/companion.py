"""What goes with a replica into its checkpoints, besides the model and its optimizer."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class Companion(Protocol):
    """Tensors that a strategy keeps next to the replica."""

    def common_tensors(self) -> dict[str, Tensor]:
        """Those that all workers have alike: written once, as `strategy/all/NAME`, for any number of workers."""

    def load_common_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `common_tensors` gave; nothing where the checkpoint has none."""

    def own_tensors(self) -> dict[str, Tensor]:
        """This worker's own, written as `strategy/RANK/NAME`."""

    def load_own_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from this worker's own; nothing where the checkpoint was written by another number of workers."""

    def release(self) -> None:
        """The world is left: let go of its groups."""
