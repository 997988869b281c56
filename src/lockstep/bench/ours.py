"""Lockstep, and the limit: what the others are compared with."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep import wire
from lockstep.bench.variant import Setting, Variant, adamw
from lockstep.bench.workloads import Batch
from lockstep.data.shard_source import GlobalBatch, Shard
from lockstep.replica import allocator

WIRES: dict[str, wire.Wire | wire.Auto] = {
    "half": wire.Half("bf16"),
    "int8": wire.Int8(),
    "sign": wire.Sign(),
    "topk": wire.TopK(0.01),
    "lowrank": wire.LowRank(2),
    "auto": wire.Auto(),
    "auto-any": wire.Auto(budget=float("inf")),
}


def nocomm(setting: Setting) -> Variant:
    """The bare module: no communication at all."""
    return Variant(setting, setting.module, adamw(setting.module))


def kept(setting: Setting) -> Variant:
    """The bare module, where C's allocator keeps what a step frees."""
    allocator.keep_freed_memory()
    return nocomm(setting)


class Met(Variant):
    """The bare module, and a barrier after its backward pass."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting, setting.module, adamw(setting.module))
        self._group = setting.group
        self._meets = setting.world.size > 1

    def backward(self) -> None:
        """Compute the gradients, and wait for the others to have theirs."""
        super().backward()
        if self._meets:
            dist.barrier(self._group)


def replicated(setting: Setting) -> Variant:
    """lockstep.DataParallel with nothing but the optimizer, unless it is not told; and a wire if the kind is one."""
    optimizer = adamw(setting.module)
    model: nn.Module = lockstep.DataParallel(
        setting.module,
        bucket_cap_mb=setting.cap_mb,
        process_group=setting.group,
        wire=WIRES.get(setting.kind),
        optimizer=None if setting.kind == "untold" else optimizer,
    )
    return Variant(setting, model, optimizer)


def split(setting: Setting) -> Variant:
    """lockstep.DataParallel with zero=1, 2 or 3."""
    optimizer = adamw(setting.module)
    model = lockstep.DataParallel(
        setting.module,
        bucket_cap_mb=setting.cap_mb,
        process_group=setting.group,
        optimizer=optimizer,
        zero=int(setting.kind[-1]),
    )
    return Variant(setting, model, optimizer)


class Trained(Variant):
    """A step of `lockstep.Trainer`: one shard on every worker."""

    def __init__(self, setting: Setting) -> None:
        optimizer = adamw(setting.module)
        self._world = setting.world
        self._trainer = lockstep.Trainer(
            setting.module,
            optimizer,
            self._loss_of,
            shards=setting.world.size,
            deterministic=False,  # As everybody else here.
            cuda_graph=setting.kind == "trainer-graph",
            world=setting.world,
        )
        super().__init__(setting, self._trainer.model, optimizer)

    def _loss_of(self, model: nn.Module, shard: Any) -> Tensor:
        with self._autocast:
            loss: Tensor = model(*shard)
        return loss

    def step(self, batch: Batch) -> None:
        """One full step."""
        size = len(batch[0])
        shard = Shard(self._world.rank, size, batch)
        self.loss = self._trainer.step(GlobalBatch(0, 0, size * self._world.size, (shard,)))._loss


def trained(setting: Setting) -> Variant:
    """lockstep.Trainer."""
    return Trained(setting)
