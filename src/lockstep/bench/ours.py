"""Lockstep, and the limit: what the others are compared with."""

from torch import nn

import lockstep
from lockstep import wire
from lockstep.bench.variant import Setting, Variant, adamw

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


def replicated(setting: Setting) -> Variant:
    """lockstep.DataParallel with nothing but the defaults, and a wire if the kind is one."""
    model: nn.Module = lockstep.DataParallel(
        setting.module,
        bucket_cap_mb=setting.cap_mb,
        process_group=setting.group,
        wire=WIRES.get(setting.kind),
    )
    return Variant(setting, model, adamw(model))


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
