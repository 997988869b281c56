"""Buffers (running statistics and the like) kept equal on all workers, as torch DDP does: worker 0's count.

DDP sends all of them before every forward pass. Here they go after the backward pass, so that replicas are equal
between steps too, and only those that some worker changed: a causal mask costs nothing.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.replica.agreement import broadcast
from lockstep.world import World


class Buffers:
    """The buffers of one replica, and which of them changed since they were last equal."""

    def __init__(self, world: World, owners: Sequence[tuple[nn.Module, str]]) -> None:
        self._world = world
        self._owners = owners
        self._seen = [self._fingerprint(number) for number in range(len(owners))]

    def __len__(self) -> int:
        return len(self._owners)

    def changed(self) -> list[int]:
        """Numbers of the buffers that were written to or replaced on this worker."""
        return [number for number, seen in enumerate(self._seen) if self._fingerprint(number) != seen]

    def sync(self, numbers: Sequence[int], source: int, group: dist.ProcessGroup) -> None:
        """Give the buffers `numbers` the values they have on worker `source`."""
        with torch.no_grad():
            broadcast([self._buffer(number) for number in numbers], self._world, source, group)
        for number in numbers:
            self._seen[number] = self._fingerprint(number)

    def _buffer(self, number: int) -> Tensor:
        owner, name = self._owners[number]
        buffer = owner._buffers[name]
        assert buffer is not None
        return buffer

    def _fingerprint(self, number: int) -> tuple[int, int]:
        buffer = self._buffer(number)
        return id(buffer), buffer._version
