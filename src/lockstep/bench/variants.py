"""The ways to train that are compared, made by their names in the catalogue: the limit, Lockstep, and its peers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import lockstep
from lockstep import wire
from lockstep.bench import catalogue
from lockstep.bench.catalogue import LIMITS, OURS
from lockstep.bench.models import Batch
from lockstep.comm import shm
from lockstep.comm.group import new_group
from lockstep.data.source import GlobalBatch, Shard

LEARNING_RATE = 3e-4
WIRES: dict[str, wire.Wire | wire.Auto] = {
    "half": wire.Half("bf16"),
    "int8": wire.Int8(),
    "zero3-int8": wire.Int8(),
    "sign": wire.Sign(),
    "topk": wire.TopK(0.01),
    "lowrank": wire.LowRank(2),
    "auto": wire.Auto(),
    "auto-any": wire.Auto(budget=float("inf")),
}


@dataclass(frozen=True, slots=True)
class VariantSetting:
    """What a variant is made of; made by `setting`."""

    module: nn.Module
    """Its own model, on its device."""
    kind: str
    """As in the catalogue."""
    world: lockstep.World
    group: dist.ProcessGroup | None
    """What it is to communicate over; None for torch's default group."""
    cap_mb: float | None
    """Most MB of a bucket; None for what the kind does by itself."""
    bf16: bool
    """Whether the forward pass runs under bfloat16 autocast."""
    batch: int
    """Samples per worker and step."""

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self.world.device


def setting(
    name: str,
    module: nn.Module,
    world: lockstep.World,
    *,
    bf16: bool = False,
    batch: int = 1,
    own_backend: str | None = None,
) -> VariantSetting:
    """What the variant called `name` is to be made of. Called on every worker.

    module: a model of its own, which goes to the world's device.
    own_backend: what Lockstep's kinds communicate over where their name says nothing; None for the world's group.
    """
    spelled = catalogue.spelled(name)
    backend = spelled.backend or (own_backend if spelled.kind in OURS else None)
    group = None
    if backend is not None and world.group is not None and world.size > 1:
        shm.register()
        group = new_group(world.group, backend, world.timeout)
    return VariantSetting(module.to(world.device), spelled.kind, world, group, spelled.cap_mb, bf16, batch)


class Variant:
    """A model, wrapped in one of the ways, and its optimizer; peers have calls of their own for some phases."""

    def __init__(
        self,
        setting: VariantSetting,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        backward: Callable[[Tensor], Any] = Tensor.backward,
        update: Callable[[], Any] | None = None,
    ) -> None:
        """backward, update: what computes gradients, and what moves the weights by them and drops them; else torch."""
        self.model = model
        self.optimizer = optimizer
        self.loss = torch.zeros(())
        # Who has a backward pass of its own has also been told of the precision.
        is_cast = setting.bf16 and backward is Tensor.backward
        self._autocast = torch.autocast(setting.device.type, torch.bfloat16, enabled=is_cast)
        self._backward, self._update = backward, update

    def step(self, batch: Batch) -> None:
        """One full step: forward, backward, update."""
        self.forward(batch)
        self._backward(self.loss)
        self.update()

    def forward(self, batch: Batch) -> None:
        """Compute the loss."""
        with self._autocast:
            self.loss = self.model(*batch)

    def update(self) -> None:
        """Move the weights by the gradients, and drop those."""
        if self._update is not None:
            self._update()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def weights(self) -> Tensor:
        """All weights in one tensor on the host, to compare variants by."""
        params = nn.utils.parameters_to_vector(self.model.parameters())
        return params.detach().cpu()


def make(setting: VariantSetting) -> Variant:
    """The variant. Called on every worker."""
    kind = setting.kind
    if kind in LIMITS:
        return Variant(setting, setting.module, adamw(setting.module))
    if kind.startswith("trainer"):
        return TrainerVariant(setting)
    if kind in OURS:
        return _data_parallel(setting)
    from lockstep.bench import frameworks  # Takes a second, in workers of all variants.

    return frameworks.make(setting)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of every variant: AdamW as one fused call."""
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)


def _data_parallel(setting: VariantSetting) -> Variant:
    """lockstep.DataParallel with zero, or a wire, if the kind is one; and the optimizer, unless it is not told."""
    optimizer = adamw(setting.module)
    model = lockstep.DataParallel(
        setting.module,
        bucket_cap_mb=setting.cap_mb,
        process_group=setting.group,
        wire=WIRES.get(setting.kind),
        gather_wire=wire.Int8() if setting.kind == "zero3-int8" else None,
        optimizer=None if setting.kind == "untold" else optimizer,
        zero=int(setting.kind[4]) if setting.kind.startswith("zero") else 0,
        reshard_after_forward=True if setting.kind.endswith("-reshard") else None,
    )
    return Variant(setting, model, optimizer)


class TrainerVariant(Variant):
    """A step of `lockstep.Trainer`: one shard on every worker."""

    def __init__(self, setting: VariantSetting) -> None:
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
