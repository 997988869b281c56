"""Everybody else: torch's DDP and FSDP2, Accelerate, Lightning Fabric, DeepSpeed, each as its documentation has it.

All get the fused AdamW, and gradients as views of their buckets where they are DDP underneath. Those that cast by
themselves on GPUs are told bfloat16 in the place of our autocast. A library is imported when it is asked for, and not
before.
"""

import importlib
import logging
import os
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lockstep.bench import models
from lockstep.bench.variants import LEARNING_RATE, Variant, VariantSetting, adamw


def make(setting: VariantSetting) -> Variant:
    """The peer of the setting's kind. Called on every worker."""
    if setting.kind.startswith("deepspeed"):
        return _deepspeed(setting)
    makers = {"fsdp2": _fsdp2, "zero-redundancy": _zero_redundancy, "accelerate": _accelerate, "fabric": _fabric}
    return makers.get(setting.kind, _ddp)(setting)


# torch's own


def _ddp(setting: VariantSetting) -> Variant:
    """DDP, with the hook of torch's that its kind names.

    `static_graph` is left alone: by its documentation it saves time where parameters are unused, and here none is.
    """
    model = _wrapped(setting)
    if setting.kind == "ddp-bf16":
        model.register_comm_hook(setting.group, default_hooks.bf16_compress_hook)
    elif setting.kind == "ddp-fp16":
        model.register_comm_hook(setting.group, default_hooks.fp16_compress_hook)
    elif setting.kind == "ddp-powersgd":
        state = powerSGD_hook.PowerSGDState(setting.group, matrix_approximation_rank=2, start_powerSGD_iter=3)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Variant(setting, model, adamw(model))


def _zero_redundancy(setting: VariantSetting) -> Variant:
    """DDP, and an optimizer whose state is split, which packs what it broadcasts.

    `overlap_with_ddp` is not used, since it takes a functional optimizer in the place of the fused one.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer  # Compiles what only this one uses, for seconds.

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


def _wrapped(setting: VariantSetting) -> DistributedDataParallel:
    # One bucket on the CPU: over gloo torch's hook sends the second messages of several in any order, and dies of it.
    is_alone = setting.kind == "ddp-powersgd" and setting.device.type == "cpu"
    return DistributedDataParallel(
        setting.module,
        gradient_as_bucket_view=True,
        bucket_cap_mb=4096 if is_alone else setting.cap_mb,
        process_group=setting.group,
    )


def _fsdp2(setting: VariantSetting) -> Variant:
    """`fully_shard` on every block of the model, then on the model: blocks are gathered one ahead of their use."""
    if setting.group is not None:
        mesh = DeviceMesh.from_group(setting.group, setting.device.type)
    else:
        mesh = init_device_mesh(setting.device.type, (setting.world.size,))
    for unit in models.units(setting.module):
        fully_shard(unit, mesh=mesh)
    fully_shard(setting.module, mesh=mesh)
    return Variant(setting, setting.module, adamw(setting.module))


# Libraries around it


def _accelerate(setting: VariantSetting) -> Variant:
    """`Accelerator().prepare(model, optimizer)`, over the group that is there."""
    accelerate = importlib.import_module("accelerate")
    views = accelerate.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = accelerate.Accelerator(
        cpu=setting.device.type == "cpu", mixed_precision="bf16" if setting.bf16 else "no", kwargs_handlers=[views]
    )
    model, optimizer = accelerator.prepare(setting.module, adamw(setting.module))
    return Variant(setting, model, optimizer, accelerator.backward)


def _fabric(setting: VariantSetting) -> Variant:
    """`Fabric(strategy=DDP)`, over the group that is there; the workers were started as torchrun would."""
    strategies = importlib.import_module("lightning_fabric.strategies")
    environments = importlib.import_module("lightning_fabric.plugins.environments")
    strategy = strategies.DDPStrategy(
        cluster_environment=environments.TorchElasticEnvironment(), gradient_as_bucket_view=True
    )
    size = setting.world.size
    # Workers that share a GPU say to be different hosts, each with all the GPUs there are.
    devices = min(size, torch.cuda.device_count()) if setting.device.type == "cuda" else size
    fabric = importlib.import_module("lightning_fabric").Fabric(
        accelerator=setting.device.type,
        devices=devices,
        num_nodes=size // devices,
        strategy=strategy,
        precision="bf16-mixed" if setting.bf16 else "32-true",
    )
    fabric.launch()
    model, optimizer = fabric.setup(setting.module, adamw(setting.module))
    return Variant(setting, model, optimizer, fabric.backward)


def _deepspeed(setting: VariantSetting) -> Variant:
    """`deepspeed.initialize` with torch's AdamW as the client's optimizer, over a group of its own.

    On the CPU DS_ACCELERATOR=cpu, over gloo: what it builds for shared memory there is for inference, and training does
    not use it.
    """
    on_gpu = setting.device.type == "cuda"
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # It says what it does, at length.
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", dist_init_required=False, verbose=False)
    engine, *_ = deepspeed.initialize(
        model=setting.module,
        optimizer=adamw(setting.module),
        config=deepspeed_configuration(int(setting.kind[-1]), setting.batch, setting.bf16),
        dist_init_required=False,
    )
    return Variant(setting, engine, engine.optimizer, engine.backward, engine.step)


def deepspeed_configuration(stage: int, batch: int, bf16: bool) -> dict[str, Any]:
    """What DeepSpeed is told: gradients copied to one buffer as they come and reduced beside the backward pass.

    Gradients are not clipped, which it does by default and which nobody else does here; all else is its default.
    """
    zero = {"stage": stage, "contiguous_gradients": True, "overlap_comm": True} if stage else {"stage": 0}
    told: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "steps_per_print": 1 << 40,
    }
    if bf16:
        told["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return told
