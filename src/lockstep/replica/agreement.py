"""Every worker starts from the same model: the same parameters in name, shape, dtype and order, and the same values."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm.work import waited_for
from lockstep.errors import ModelMismatch
from lockstep.world import World

MESSAGE_BYTES = 64 << 20
"""Tensors are sent together up to this size: few messages, and no second model in memory."""


@dataclass(frozen=True, slots=True)
class Described:
    """One parameter or buffer as far as workers must agree on it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name!r} {list(self.shape)} {self.dtype.removeprefix('torch.')}"


def describe(named: Iterable[tuple[str, Tensor]]) -> list[Described]:
    """What there is to agree on, in order."""
    return [Described(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in named]


def require_same(world: World, mine: Sequence[Described], kind: str) -> None:
    """Return if all workers describe the same; else every worker raises ModelMismatch naming the first difference."""
    digest = hashlib.sha256("\n".join(map(str, mine)).encode()).hexdigest()
    if len(set(world.gather(digest))) == 1:
        return
    everyone = world.gather(list(mine))
    for place, row in enumerate(zip_longest(*everyone)):
        for rank, entry in enumerate(row):
            if entry != row[0]:
                raise ModelMismatch(
                    f"the models differ: {kind} number {place} is {row[0] or 'absent'} on worker 0 but "
                    f"{entry or 'absent'} on worker {rank}. Build the same model on every worker: its shape must "
                    "not depend on the rank, on the data of one worker or on the order of a set."
                )


def broadcast(tensors: Sequence[Tensor], world: World, source: int, group: dist.ProcessGroup) -> None:
    """Give `tensors` the values they have on worker `source`, in few messages."""
    for batch in _batches(tensors):
        real = [torch.view_as_real(t) if t.is_complex() else t for t in batch]
        flat = torch.cat([t.detach().reshape(-1) for t in real])
        with waited_for():
            work = dist.broadcast(flat, group=group, group_src=source, async_op=True)
        if flat.device.type == "cpu":
            world.wait(work, "receiving the first weights and buffers" if source == 0 else "receiving weights")
        elif work is not None:
            work.wait()
        if world.rank != source:
            for tensor, piece in zip(real, flat.split([t.numel() for t in real]), strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))


def _batches(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device and dtype together, up to MESSAGE_BYTES."""
    batches: list[list[Tensor]] = []
    open_batches: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        kind = (tensor.device, tensor.dtype)
        size = tensor.numel() * tensor.element_size()
        if kind not in open_batches or sizes[kind] + size > MESSAGE_BYTES:
            open_batches[kind] = []
            batches.append(open_batches[kind])
            sizes[kind] = 0
        open_batches[kind].append(tensor)
        sizes[kind] += size
    return batches
