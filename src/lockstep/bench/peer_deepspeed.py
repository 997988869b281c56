"""DeepSpeed, ZeRO stages 0 to 3.

Set up as its documentation has it: `deepspeed.initialize` with a configuration of the stage, gradients copied to one
buffer as they come (`contiguous_gradients`) and reduced beside the backward pass (`overlap_comm`), and torch's AdamW,
fused, as the client's optimizer; then `engine.backward(loss)` and `engine.step()`. Gradients are not clipped, which it
does by default and which nobody else does here; everything else is its default. On GPUs its `torch_autocast` in
bfloat16 takes the place of ours. On the CPU DS_ACCELERATOR=cpu, over gloo: what it builds for shared memory there is
for inference, and training does not use it.
"""

import importlib
import logging
import os
from typing import Any

from lockstep.bench.variant import Setting, Variant, adamw
from lockstep.bench.workloads import Batch


class Driven(Variant):
    """A step in DeepSpeed's words."""

    def __init__(self, setting: Setting, engine: Any) -> None:
        super().__init__(setting, engine, engine.optimizer)
        self._engine = engine

    def forward(self, batch: Batch) -> None:
        """Compute the loss, in the precision that DeepSpeed was given."""
        self.loss = self._engine(*batch)

    def backward(self) -> None:
        """Compute the gradients."""
        self._engine.backward(self.loss)

    def update(self) -> None:
        """Move the weights by the gradients, and drop those."""
        self._engine.step()


def driven(setting: Setting) -> Variant:
    """Over a group of its own that DeepSpeed opens."""
    on_gpu = setting.device.type == "cuda"
    if not on_gpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # It says what it does, at length.
    deepspeed.init_distributed(dist_backend="nccl" if on_gpu else "gloo", dist_init_required=False, verbose=False)
    engine, *_ = deepspeed.initialize(
        model=setting.module,
        optimizer=adamw(setting.module),
        config=configuration(int(setting.kind[-1]), setting.batch, setting.bf16),
        dist_init_required=False,
    )
    return Driven(setting, engine)


def configuration(stage: int, batch: int, bf16: bool) -> dict[str, Any]:
    """What DeepSpeed is told."""
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
