"""Makes a variant by its name; a peer is imported when it is asked for, and not before."""

import importlib
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

import lockstep
from lockstep.bench import catalogue
from lockstep.bench.catalogue import LIMITS, OURS
from lockstep.bench.variant import Setting, Variant
from lockstep.comm import shm
from lockstep.comm.backend import new_group


def setting(
    name: str,
    module: nn.Module,
    world: lockstep.World,
    *,
    bf16: bool = False,
    batch: int = 1,
    own_backend: str | None = None,
) -> Setting:
    """What the variant called `name` is to be made of. Called on every worker.

    module: a model of its own, which goes to the world's device.
    own_backend: what Lockstep's kinds, and the meeting, communicate over where their name says nothing; None for the
        world's group.
    """
    spelled = catalogue.spelled(name)
    backend = spelled.backend or (own_backend if spelled.kind in (*OURS, "meeting") else None)
    return Setting(module.to(world.device), spelled.kind, world, _group(world, backend), spelled.cap_mb, bf16, batch)


def make(setting: Setting) -> Variant:
    """The variant. Called on every worker."""
    return _maker(setting.kind)(setting)


def _group(world: lockstep.World, backend: str | None) -> dist.ProcessGroup | None:
    """A group of its own for a variant that is to use another backend than the world."""
    if backend is None or world.group is None or world.size == 1:
        return None
    shm.register()
    return new_group(world.group, backend)


def _maker(kind: str) -> Callable[[Setting], Variant]:
    if kind == "meeting":
        place = ("ours", "Met")
    elif kind == "kept":
        place = ("ours", "kept")
    elif kind in LIMITS:
        place = ("ours", "nocomm")
    elif kind.startswith("trainer"):
        place = ("ours", "trained")
    elif kind in OURS:
        place = ("ours", "split" if kind.startswith("zero") else "replicated")
    elif kind.startswith("deepspeed"):
        place = ("peer_deepspeed", "driven")
    else:
        place = {
            "fsdp2": ("peer_fsdp2", "sharded"),
            "zero-redundancy": ("peer_ddp", "zero_redundancy"),
            "accelerate": ("peer_accelerate", "accelerated"),
            "fabric": ("peer_fabric", "woven"),
        }.get(kind, ("peer_ddp", "replicated"))
    module, function = place
    maker: Callable[[Setting], Variant] = getattr(importlib.import_module(f"lockstep.bench.{module}"), function)
    return maker
