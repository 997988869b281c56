"""torch's DistributedDataParallel, by itself, with its hooks, and with ZeroRedundancyOptimizer.

Set up as torch's documentation advises: gradients are views of the buckets (`gradient_as_bucket_view=True`, which
saves a copy), buckets of its default size, a fused optimizer. `static_graph` is left alone: by its documentation it
saves time where parameters are unused, and here none is. The hooks are torch's own. ZeroRedundancyOptimizer packs what
it broadcasts (`parameters_as_bucket_view=True`); `overlap_with_ddp` is not used, since it takes a functional optimizer
in the place of the fused one.
"""

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from lockstep.bench.variant import LEARNING_RATE, Setting, Variant, adamw


def replicated(setting: Setting) -> Variant:
    """DDP, with the hook that its kind names."""
    model = _wrapped(setting)
    if setting.kind == "ddp-bf16":
        model.register_comm_hook(setting.group, default_hooks.bf16_compress_hook)
    elif setting.kind == "ddp-fp16":
        model.register_comm_hook(setting.group, default_hooks.fp16_compress_hook)
    elif setting.kind == "ddp-powersgd":
        state = powerSGD_hook.PowerSGDState(setting.group, matrix_approximation_rank=2, start_powerSGD_iter=3)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Variant(setting, model, adamw(model))


def zero_redundancy(setting: Setting) -> Variant:
    """DDP, and an optimizer whose state is split."""
    model = _wrapped(setting)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(),
        optimizer_class=torch.optim.AdamW,
        process_group=setting.group,
        parameters_as_bucket_view=True,
        lr=LEARNING_RATE,
        fused=True,
    )
    return Variant(setting, model, optimizer)


def _wrapped(setting: Setting) -> DistributedDataParallel:
    return DistributedDataParallel(
        setting.module, gradient_as_bucket_view=True, bucket_cap_mb=_cap_mb(setting), process_group=setting.group
    )


def _cap_mb(setting: Setting) -> float | None:
    # One bucket on the CPU: over gloo torch's hook sends the second messages of several in any order, and dies of it.
    is_alone = setting.kind == "ddp-powersgd" and setting.device.type == "cpu"
    return 4096 if is_alone else setting.cap_mb
