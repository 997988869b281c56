"""Hugging Face Accelerate.

Set up as its documentation has it: `Accelerator().prepare(model, optimizer)`, `accelerator.backward(loss)`; what it
makes of the model is torch's DDP, for which it is given gradients as views of the buckets
(`DistributedDataParallelKwargs`), and a fused optimizer. On GPUs `mixed_precision="bf16"` instead of our autocast.
"""

import importlib
from typing import Any

from lockstep.bench.variant import Setting, Variant, adamw
from lockstep.bench.workloads import Batch


class Accelerated(Variant):
    """A step in Accelerate's words."""

    def __init__(self, setting: Setting, accelerator: Any) -> None:
        model, optimizer = accelerator.prepare(setting.module, adamw(setting.module))
        super().__init__(setting, model, optimizer)
        self._accelerator = accelerator

    def forward(self, batch: Batch) -> None:
        """Compute the loss, in the precision that Accelerate was given."""
        self.loss = self.model(*batch)

    def backward(self) -> None:
        """Compute the gradients."""
        self._accelerator.backward(self.loss)


def accelerated(setting: Setting) -> Variant:
    """Over the group that is there."""
    accelerate = importlib.import_module("accelerate")
    views = accelerate.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = accelerate.Accelerator(
        cpu=setting.device.type == "cpu", mixed_precision="bf16" if setting.bf16 else "no", kwargs_handlers=[views]
    )
    return Accelerated(setting, accelerator)
