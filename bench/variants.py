"""The ways to train that are compared: each has its own weights and optimizer state, and takes the same batches.

limit, plain   the bare module, each worker for itself: no communication at all
ddp            torch's DistributedDataParallel, with its gradients as views of its buckets
lockstep       lockstep.DataParallel
zero1..zero3   the same with `zero=1` to 3
half, int8, sign, topk, lowrank
               lockstep.DataParallel with that wire: bf16, blocks of 256, 1 %, rank 2
auto, auto-any the same with wire="auto", and with an auto that may choose any wire
ddp-bf16, ddp-fp16, ddp-powersgd
               torch's DDP with its own hook: bf16, fp16, or PowerSGD of rank 2 from the third step on
fsdp2          torch's fully_shard, one unit per block

ddp, lockstep and zero take a cap of their buckets in MB, as ddp@4, and a backend, as ddp/gloo: else the world's own.
"""

import argparse
import re
from dataclasses import dataclass

import models
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep import wire

Batch = tuple[Tensor, Tensor]

WIRES = {
    "half": wire.Half("bf16"),
    "int8": wire.Int8(),
    "sign": wire.Sign(),
    "topk": wire.TopK(0.01),
    "lowrank": wire.LowRank(2),
    "auto": wire.Auto(),
    "auto-any": wire.Auto(budget=float("inf")),
}
HOOKED = ("ddp-bf16", "ddp-fp16", "ddp-powersgd")
KINDS = ("limit", "plain", "ddp", "lockstep", "zero1", "zero2", "zero3", "fsdp2", *WIRES, *HOOKED)
BUCKETED = ("ddp", "lockstep", "zero1", "zero2", "zero3")


@dataclass(frozen=True, slots=True)
class Setup:
    """What all variants of one run have in common."""

    model: str
    batch: int
    """Sequences per worker and step."""
    context: int
    """Tokens per sequence."""
    bf16: bool
    """Whether the forward pass runs under bfloat16 autocast."""


class Variant:
    """A model, wrapped in one of the ways, and its optimizer."""

    def __init__(self, name: str, setup: Setup, world: lockstep.World) -> None:
        torch.manual_seed(0)  # The same first weights for every variant.
        module = models.build(setup.model).to(world.device)
        if name.startswith("zero"):
            self.optimizer = _adamw(module)
            self.model = _wrap(name, module, world, self.optimizer)
        else:
            self.model = _wrap(name, module, world)
            self.optimizer = _adamw(self.model)
        self.loss = torch.zeros(())
        self._autocast = torch.autocast(world.device.type, torch.bfloat16, enabled=setup.bf16)

    def step(self, batch: Batch) -> None:
        """One full step: forward, backward, update."""
        self.forward(batch)
        self.loss.backward()
        self.update()

    def forward(self, batch: Batch) -> None:
        """Compute the loss."""
        with self._autocast:
            self.loss = self.model(*batch)

    def update(self) -> None:
        """Move the weights by the gradients, and drop those."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> Tensor:
        """All weights in one tensor on the host, to compare variants by."""
        params = nn.utils.parameters_to_vector(self.model.parameters())
        return params.detach().cpu()


def batches(setup: Setup, world: lockstep.World, count: int = 4) -> list[Batch]:
    """This worker's batches of random tokens, different on every worker."""
    generator = torch.Generator().manual_seed(1 + world.rank)
    shape = (count, setup.batch, setup.context + 1)
    drawn = torch.randint(models.SIZES[setup.model].vocab, shape, generator=generator).to(world.device)
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for tokens in drawn]


def checked(name: str) -> str:
    """`name`, if there is such a variant; a type for argparse."""
    if re.fullmatch(rf"({'|'.join(KINDS)})|({'|'.join(BUCKETED)})(@\d+(\.\d+)?)?(/(gloo|shm))?", name) is None:
        known = ", ".join([*KINDS, *(f"{kind}@MB/BACKEND" for kind in BUCKETED)])
        raise argparse.ArgumentTypeError(f"there is no variant {name!r}; there are {known}.")
    return name


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)


def _wrap(
    name: str, module: models.GPT, world: lockstep.World, optimizer: torch.optim.Optimizer | None = None
) -> nn.Module:
    kind, _, backend = name.partition("/")
    kind, _, size = kind.partition("@")
    cap_mb = float(size) if size else None
    group = dist.new_group(backend=backend) if backend else None
    if kind == "ddp":
        return DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb, process_group=group)
    if kind in HOOKED:
        return _hooked(kind, module)
    if kind in WIRES:
        return lockstep.DataParallel(module, wire=WIRES[kind])
    if kind == "lockstep":
        return lockstep.DataParallel(module, bucket_cap_mb=cap_mb, process_group=group)
    if kind.startswith("zero"):
        return lockstep.DataParallel(
            module, bucket_cap_mb=cap_mb, process_group=group, optimizer=optimizer, zero=int(kind[-1])
        )
    if kind == "fsdp2":
        return _fsdp2(module, world)
    return module


def _hooked(kind: str, module: models.GPT) -> nn.Module:
    # One bucket on the CPU: over gloo torch's hook sends the second messages of several in any order, and dies of it.
    is_alone = kind == "ddp-powersgd" and next(module.parameters()).device.type == "cpu"
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=4096 if is_alone else None)
    if kind == "ddp-bf16":
        model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif kind == "ddp-fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return model


def _fsdp2(module: models.GPT, world: lockstep.World) -> nn.Module:
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)
