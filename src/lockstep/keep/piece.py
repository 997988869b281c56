"""A run of elements of one tensor: the unit in which tensors are owned, written and read."""

from dataclasses import dataclass
from math import prod

from torch import Tensor

from lockstep.errors import UsageError


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Elements `begin` to `begin + flat.numel()` of the flattened tensor `name`. A whole tensor begins at 0.

    The pieces of all workers together hold every element exactly once. Empty pieces are welcome: they say that a
    tensor without elements exists, or that this worker has nothing of it.
    """

    name: str
    """The tensor's name, the same on every worker that holds a piece of it."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    begin: int
    """Number of the first element held, in the order of `tensor.flatten()`."""
    flat: Tensor
    """The elements, one-dimensional, on any device."""

    @staticmethod
    def whole(name: str, tensor: Tensor) -> "Piece":
        """All of `tensor` as one piece; a view of it where its memory is in order."""
        return Piece(name, tuple(tensor.shape), 0, tensor.detach().reshape(-1))

    @property
    def end(self) -> int:
        """One past the number of the last element held."""
        return self.begin + self.flat.numel()

    def check(self) -> None:
        """Raise UsageError if this is no part of such a tensor."""
        if not self.name or self.name == "__metadata__":
            raise UsageError(f"a tensor cannot be named {self.name!r} in a checkpoint: choose another name.")
        if self.flat.ndim != 1:
            raise UsageError(f"the piece of {self.name!r} has shape {tuple(self.flat.shape)}: give it flattened.")
        if self.begin < 0 or self.end > prod(self.shape):
            raise UsageError(
                f"the piece of {self.name!r} holds elements {self.begin} to {self.end}, and a tensor of shape "
                f"{self.shape} has {prod(self.shape)}."
            )
