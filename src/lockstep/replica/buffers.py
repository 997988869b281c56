"""Buffers (running statistics and the like) kept equal on all workers, as torch DDP does: worker 0's count.

DDP sends all of them before every forward pass. Here they go after the backward pass, so that replicas are equal
between steps too, and only those that some worker changed: a causal mask costs nothing.

torch's version counters cannot tell what changed: batch norm updates its statistics, and users their `.data`,
without counting. So in host memory each buffer is compared with a copy of what it last was, which costs their size
once more. On a GPU reading a comparison would make the host wait: there floating-point buffers are always sent.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.replica.agreement import broadcast
from lockstep.replica.local_params import local_part
from lockstep.world import World


class Buffers:
    """The buffers of one replica, and which of them changed since they were last equal."""

    def __init__(self, world: World, owners: Sequence[tuple[nn.Module, str]]) -> None:
        self._world = world
        self.owners = owners
        """Where each buffer lives: its module, and its name there."""
        self._seen: list[_Seen] = []
        self._is_left_alone = False
        self.see()

    def see(self) -> None:
        """Take the buffers as they are now for equal on all workers."""
        self._seen = [_Seen(self._buffer(number)) for number in range(len(self.owners))]

    def __len__(self) -> int:
        return len(self.owners)

    def leave_alone(self) -> None:
        """Something else keeps them equal from now on."""
        self._is_left_alone = True

    def changed(self) -> list[int]:
        """Numbers of the buffers that may differ from what they were when last equal."""
        if self._is_left_alone:
            return []
        return [number for number, seen in enumerate(self._seen) if seen.differs_from(self._buffer(number))]

    def sync(self, numbers: Sequence[int], source: int, group: dist.ProcessGroup) -> None:
        """Give the buffers `numbers`, which some worker changed, the values they have on worker `source`."""
        with torch.no_grad():
            broadcast([self._buffer(number) for number in numbers], self._world, source, group)
        for number in numbers:
            self._seen[number] = _Seen(self._buffer(number))

    def _buffer(self, number: int) -> Tensor:
        owner, name = self.owners[number]
        buffer = owner._buffers[name]
        assert buffer is not None
        return local_part(buffer)


class _Seen:
    """What a buffer was."""

    def __init__(self, buffer: Tensor) -> None:
        self._identity = (id(buffer), buffer._version)
        self._copy = buffer.detach().clone() if buffer.device.type == "cpu" else None

    def differs_from(self, buffer: Tensor) -> bool:
        if self._copy is None:
            return buffer.is_floating_point() or self._identity != (id(buffer), buffer._version)
        return not torch.equal(self._copy, buffer)
