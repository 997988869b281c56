"""Where the flat buffers of a group lie: in memory that its backend can reduce as it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.flat_group import FlatGroup
from lockstep.comm.shm import allocate_common as allocate_common

LINE_BYTES = 64
KEPT_BYTES = 1 << 20
"""A stretch of shared memory up to here is kept, however little of it is needed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One flat buffer."""

    numel: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        """What it takes, padded so that the next one is aligned."""
        return -(-self.numel * self.dtype.itemsize // LINE_BYTES) * LINE_BYTES


class Memory:
    """Gives a group its flat buffers: here any memory, for backends that take any."""

    num_turns = 0
    """After how many buffers the same memory comes again, the last buffer aside; 0 if each has its own."""

    def lay_out(self, requests: Sequence[Request]) -> list[Tensor]:
        """Zeroed flat tensors, aligned to 64 bytes; those given before must not be used any more.

        Every worker of the group calls this with the same requests.
        """
        return [torch.zeros(each.numel, dtype=each.dtype, device=each.device) for each in requests]

    def holds(self, tensor: Tensor) -> bool:
        """Whether the next `lay_out` may overwrite `tensor`."""
        return False


class SharedMemory(Memory):
    """One stretch of shared memory, laid out anew each time, so that a new layout costs no new memory.

    One that has become twice as large as is needed is given back for a smaller one.
    """

    def __init__(self, group: FlatGroup) -> None:
        self._group = group
        self._arena: Tensor | None = None

    def __del__(self) -> None:
        if self._arena is not None:  # The group may be used by others after this.
            self._group.release(self._arena)

    def lay_out(self, requests: Sequence[Request]) -> list[Tensor]:
        """See Memory."""
        arena = self._of_about(sum(each.num_bytes for each in requests))
        arena.zero_()
        flats, begin = [], 0
        for each in requests:
            flats.append(arena[begin : begin + each.numel * each.dtype.itemsize].view(each.dtype))
            begin += each.num_bytes
        return flats

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in the stretch that is laid out."""
        if self._arena is None or tensor.layout is not torch.strided:
            return False
        return 0 <= tensor.data_ptr() - self._arena.data_ptr() < self._arena.numel()

    def _of_about(self, num_bytes: int) -> Tensor:
        if self._arena is None or not num_bytes <= self._arena.numel() <= max(2 * num_bytes, KEPT_BYTES):
            if self._arena is not None:
                self._group.release(self._arena)
                self._arena = None
            self._arena = self._group.allocate(num_bytes, torch.uint8)
        return self._arena


class TurnsMemory(Memory):
    """A few stretches of memory that many buffers use in turn; the last buffer has its own."""

    num_turns = 2
    """One buffer is filled while the one before it travels."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def lay_out(self, requests: Sequence[Request]) -> list[Tensor]:
        """See Memory; all buffers must be on one device."""
        *turns, last = requests
        num_bytes = [max((r.num_bytes for r in turns[turn :: self.num_turns]), default=0) for turn in range(2)]
        stretches = [Request(length, torch.uint8, last.device) for length in num_bytes]
        *laid_out, own = self._memory.lay_out([*stretches, last])
        flats = []
        for number, each in enumerate(turns):
            flats.append(laid_out[number % self.num_turns][: each.numel * each.dtype.itemsize].view(each.dtype))
        return [*flats, own]

    def holds(self, tensor: Tensor) -> bool:
        """See Memory."""
        return self._memory.holds(tensor)


def memory_of(group: dist.ProcessGroup, device: torch.device) -> Memory:
    """What gives `group` its flat buffers on `device`."""
    if isinstance(group, FlatGroup) and device.type == "cpu":
        return SharedMemory(group)
    return Memory()
