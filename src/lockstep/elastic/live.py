"""What is split over the workers of one host (zero=1 to 3), where it outlives any of them.

Over shm the parameters lie in memory that all workers see. So does the optimizer's state here: each worker's tensors
are moved into its part of one stretch of memory, where its optimizer goes on updating them. What a worker dies with is
then neither lost nor copied: as long as it did not die within its update, the others read it where it is.

Who writes what: `words[rank]` and the state of `rank` are written by that worker alone.

    words[rank] = c     all that this worker writes is as it was before call c
    words[rank] = -1    it is being changed: from before its optimizer's step until the call has ended

A reader looks when the generation is over: every worker that had a part in it has ended, or has come to regroup, and
writes no more. Then the state is whole if all words say the same call. If not, a worker died in its update, or while
others were in theirs: the copies of snapshots.py serve, and steps are made again. Parameters are written in the same
update as the state, so the words hold for them too. Buffers change before that: every worker keeps a copy of its own.

Not to be had where the optimizer keeps anything but contiguous tensors and settings, or a wire remembers something.
"""

import itertools
from typing import Any, Protocol

import torch
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from lockstep.comm.group import shares_memory
from lockstep.comm.memory import allocate_common
from lockstep.elastic.snapshots import Part, Snapshot
from lockstep.keep.checks import MODEL, OPTIMIZER
from lockstep.keep.held import in_reals
from lockstep.keep.pieces import Piece
from lockstep.world import World

_WORD_BYTES = 64
"""A cache line for each, as for everything that follows."""
_CHANGING = -1


class Owner(Protocol):
    """A trainer, as far as this knows it."""

    optimizer: optim.Optimizer

    @property
    def module(self) -> nn.Module:
        """What is trained."""

    def pieces(self) -> Any:
        """What this worker has of the tensors of the run."""

    def whole_progress(self) -> Any:
        """All of a run's state besides tensors."""


class Live:
    """The state of one generation of workers, as one of them sees it."""

    def __init__(self, world: World, trainer: Owner, arena: Tensor, begin: int) -> None:
        """`begin`: where this worker's part of `arena` begins."""
        self._trainer, self._arena, self._rank = trainer, arena, world.rank
        words = arena[: world.size * _WORD_BYTES].view(torch.int64)
        self._words = words[:: _WORD_BYTES // words.itemsize]
        self._slots: dict[tuple[Tensor, str], Tensor] = {}
        """Where each tensor of this worker's optimizer lies, by parameter and key."""
        for (param, key), value in _tensors(trainer.optimizer).items():
            flat = arena[begin : begin + value.nbytes].view(value.dtype)
            slot = trainer.optimizer.state[param][key] = flat.view(value.shape).copy_(value)
            self._slots[param, key] = slot
            begin += _room(value)
        self._index: list[list[Any]] = []
        """Of all workers' state: name, shape, first element, number of elements, dtype by name, first byte."""
        # Where they lie: the module's own parameters will be others when this is read.
        self._params = {name: param.data for name, param in trainer.module.named_parameters()}
        self._buffers = {name: buffer.clone() for name, buffer in trainer.module.named_buffers()}
        self._hook: RemovableHandle | None = None

    @classmethod
    def of(cls, world: World, trainer: Owner, call: int) -> "Live | None":
        """Move the optimizer's state of all workers to where all see it, before `call`; every worker calls this."""
        if not shares_memory(world.group, world.device):
            return None
        assert world.group is not None
        held = _tensors(trainer.optimizer).values()
        is_movable = all(value.is_contiguous() and value.device.type == "cpu" for value in held)
        rooms = world.gather_json(sum(map(_room, held)) if is_movable else None)
        if None in rooms:
            return None
        begins = list(itertools.accumulate(rooms, initial=world.size * _WORD_BYTES))
        live = cls(world, trainer, allocate_common(world.group, begins[-1], torch.uint8), begins[world.rank])
        indices = world.gather_json(live._own_index())
        if None in indices:
            return None
        live._index = [entry for index in indices for entry in index]
        live.mark(call)
        live._hook = trainer.optimizer.register_step_pre_hook(lambda *_: live._set(_CHANGING))
        return live

    def mark(self, call: int) -> None:
        """The calls before `call` have taken effect on this worker."""
        optimizer = self._trainer.optimizer
        now = _tensors(optimizer)
        if _kinds(now) != _kinds(self._slots):
            self._set(_CHANGING)  # It has begun to keep something else, which is nowhere here.
            return
        for (param, key), value in now.items():
            if value is not (slot := self._slots[param, key]):  # It makes new tensors in its steps.
                optimizer.state[param][key] = slot.copy_(value)
        for name, buffer in self._trainer.module.named_buffers():
            self._buffers[name].copy_(buffer)
        self._set(call)

    @property
    def call(self) -> int:
        """Before which call the state is whole; -1 if it is not. Read when the generation is over."""
        calls = set(self._words.tolist())
        return int(calls.pop()) if len(calls) == 1 else _CHANGING

    def snapshot(self) -> Snapshot:
        """A copy of all of it, as if one worker had it."""
        pieces = [
            Piece.whole(MODEL + n, in_reals(value)) for n, value in (*self._params.items(), *self._buffers.items())
        ]
        for name, shape, begin, numel, dtype_name, first in self._index:
            dtype = getattr(torch, dtype_name)
            flat = self._arena[first : first + numel * dtype.itemsize].view(dtype)
            pieces.append(Piece(name, tuple(shape), begin, flat))
        return Snapshot(self.call, 0, 1, {0: Part.of(pieces)}, self._trainer.whole_progress())

    def close(self) -> None:
        """It is of no use any more: let go of the optimizer."""
        if self._hook is not None:
            self._hook.remove()

    def _set(self, call: int) -> None:
        self._words[self._rank] = call

    def _own_index(self) -> list[list[Any]] | None:
        """What of the state this worker is to speak for, and where it lies; None if some of it lies elsewhere."""
        index: list[list[Any]] = []
        for piece in self._trainer.pieces():
            first = piece.flat.data_ptr() - self._arena.data_ptr()
            is_here = 0 <= first < self._arena.numel() or not piece.flat.numel()
            if piece.name.startswith(OPTIMIZER) and is_here:
                dtype = str(piece.flat.dtype).removeprefix("torch.")
                index.append([piece.name, list(piece.shape), piece.begin, piece.flat.numel(), dtype, first])
            elif not piece.name.startswith(MODEL):
                return None
        return index if not self._trainer.whole_progress()["optimizer"]["scalars"] else None


def _tensors(optimizer: optim.Optimizer) -> dict[tuple[Tensor, str], Tensor]:
    """All tensors of an optimizer's state, by parameter and key."""
    return {
        (param, key): value
        for param, values in optimizer.state.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def _kinds(tensors: dict[tuple[Tensor, str], Tensor]) -> dict[tuple[Tensor, str], Any]:
    return {place: (value.shape, value.dtype) for place, value in tensors.items()}


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _WORD_BYTES) * _WORD_BYTES
