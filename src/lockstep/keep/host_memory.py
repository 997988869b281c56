"""Copies of pieces in host memory, so that training can change the originals while the copies are written."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.keep.piece import Piece


class HostMemory:
    """Memory for one save at a time; give the same one to every save and only the first of them allocates.

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
