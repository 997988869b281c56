"""Pieces of tensors: what a worker owns and writes; and copies of them, so that training can go on meanwhile."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
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


class HostMemory:
    """Memory for the copies of one save at a time; give the same one to every save and only the first allocates.

    Its phases: `claim` (waits for the save that holds it), `copy`, `wait_copied`, `release`. It costs host memory of
    the size of the pieces, pinned for those that come from a GPU.
    """

    def __init__(self) -> None:
        self._taken = threading.Lock()
        self._buffers: dict[tuple[str, int], Tensor] = {}
        self._copied: list[torch.cuda.Event] = []

    def claim(self) -> None:
        """Wait until no save uses this memory, and take it."""
        self._taken.acquire()

    def copy(self, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces as they are now. Called by the training thread; those of a GPU may still be on their way."""
        self._buffers = {(piece.name, piece.begin): self._buffer(piece) for piece in pieces}
        copies = []
        for piece in pieces:
            buffer = self._buffers[piece.name, piece.begin]
            buffer.copy_(piece.flat.detach(), non_blocking=piece.flat.is_cuda)
            copies.append(Piece(piece.name, piece.shape, piece.begin, buffer))
        # Copies run in the order of the current stream, before whatever training does there next.
        self._copied = []
        for device in {piece.flat.device for piece in pieces if piece.flat.is_cuda}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._copied.append(event)
        return copies

    def wait_copied(self) -> None:
        """Return when the copies can be read. Called by the thread that writes them."""
        for event in self._copied:
            event.synchronize()

    def release(self) -> None:
        """Let the next save have this memory."""
        self._taken.release()

    def _buffer(self, piece: Piece) -> Tensor:
        flat = piece.flat
        known = self._buffers.get((piece.name, piece.begin))
        fits = known is not None and (known.shape, known.dtype) == (flat.shape, flat.dtype)
        if known is not None and fits and (not flat.is_cuda or known.is_pinned()):
            return known
        return torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
