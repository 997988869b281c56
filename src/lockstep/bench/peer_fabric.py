"""Lightning Fabric.

Set up as its documentation has it: `Fabric(strategy=...)`, `fabric.launch()`, `fabric.setup(model, optimizer)`,
`fabric.backward(loss)`; the strategy is DDP, with gradients as views of the buckets, and the optimizer fused. On GPUs
`precision="bf16-mixed"` instead of our autocast.
"""

import importlib
from typing import Any

import torch

from lockstep.bench.variant import Setting, Variant, adamw
from lockstep.bench.workloads import Batch


class Woven(Variant):
    """A step in Fabric's words."""

    def __init__(self, setting: Setting, fabric: Any) -> None:
        model, optimizer = fabric.setup(setting.module, adamw(setting.module))
        super().__init__(setting, model, optimizer)
        self._fabric = fabric

    def forward(self, batch: Batch) -> None:
        """Compute the loss, in the precision that Fabric was given."""
        self.loss = self.model(*batch)

    def backward(self) -> None:
        """Compute the gradients."""
        self._fabric.backward(self.loss)


def woven(setting: Setting) -> Variant:
    """Over the group that is there; the workers were started as torchrun would."""
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
    return Woven(setting, fabric)
