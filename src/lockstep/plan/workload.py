"""What is to be trained, in numbers: the seam between those who describe a model and those who compute with it.

Described by `models` (a catalogue, and architectures given by a few numbers) and `script` (a user's own program);
read by `memory` (what fits), by `timing` (how fast) and by `advice`. Pure values; needs no torch.

All figures of a `Layer` are per sample: a picture, or a sequence of `units_per_sample` tokens. Bytes of activations are
for the precision that the workload says, so who changes the precision describes the model anew.
"""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lockstep.plan.tracing import StepTrace

Checkpointing = Literal["none", "selective", "full"]
"""Which activations are computed again in the backward pass: none, those inside attention, those of every block."""

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "amp", "fp8")
"""fp32, tf32: everything in 4 bytes, products in that arithmetic. amp: parameters and gradients in 4 bytes, products
in fp16 or bf16 (autocast). bf16, fp16: parameters and gradients in 2 bytes, master weights apart. fp8: products in
fp8, the rest as bf16."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One module with parameters of its own and what follows it, in the order of the forward pass."""

    name: str
    tensors: tuple[int, ...]
    """Numbers of elements of its trained parameters, in the order of registration."""
    forward_flops: float
    """Floating-point operations of its matrix products and convolutions for one sample; 2 for a multiply and add."""
    activation_bytes: float
    """What autograd keeps of it for one sample until the backward pass, without checkpointing."""
    attention_bytes: float = 0.0
    """Of those, what "selective" checkpointing does not keep."""
    boundary_bytes: float = 0.0
    """Its input for one sample, which is all that "full" checkpointing keeps of a block: 0 but for a block's first."""
    block: int = -1
    """The repeated block it belongs to, which is checkpointed and gathered (zero=3) as one; -1 for none."""
    winograd_flops: float = 0.0
    """Of `forward_flops`, those of 3x3 convolutions of stride 1, which fp32 libraries do in 2.25 times fewer."""
    tied: int = 0
    """Elements that it shares with an earlier layer: no parameters of its own, and their gradient comes late."""

    @property
    def num_params(self) -> int:
        """Elements of its parameters."""
        return sum(self.tensors)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model, how it is trained, and on what batch."""

    name: str
    layers: tuple[Layer, ...]
    unit: str = "samples"
    """What throughput counts: tokens, images or samples."""
    units_per_sample: int = 1
    """Tokens in a sequence; 1 where a sample is the unit."""
    precision: str = "fp32"
    """One of PRECISIONS."""
    param_bytes: int = 4
    """Of one element, as the model computes with it (as stored: under amp 4)."""
    grad_bytes: int = 4
    """Of one element of the gradients, as they lie in buckets and travel without a wire."""
    master_bytes: int = 0
    """Of one element of master weights; 0 where the optimizer updates the parameters themselves."""
    optimizer: str = "adamw"
    optimizer_bytes: float = 8.0
    """State per element: 8 for Adam in fp32, 4 for SGD with momentum, 0 for SGD."""
    batch: int = 1
    """The global batch, in samples: what one update is computed from."""
    micro_batch: int = 1
    """Samples that one worker's forward pass takes at a time."""
    accumulation: int = 1
    """Micro-batches of one worker in an update."""
    zero: int = 0
    checkpointing: Checkpointing = "none"
    buffer_bytes: int = 0
    """Of buffers that the model has, such as statistics of batch norms and masks."""
    transient_bytes: float = 0.0
    """Most bytes, for one sample, of what lives for a moment only, such as logits and their gradient in fp32."""
    input_bytes: float = 0.0
    """Of one sample as the loader hands it out."""
    embedding_params: int = 0
    """Parameters that take part by being looked up, and so in no product."""
    trace: "tuple[StepTrace, StepTrace | None] | None" = field(default=None, repr=False, compare=False)
    """Of a step, as it was watched, and of one with another number of samples: memory is predicted from it."""

    @property
    def num_params(self) -> int:
        """Trained elements; what is tied counts once."""
        return sum(layer.num_params for layer in self.layers)

    @property
    def forward_flops(self) -> float:
        """Of one sample."""
        return sum(layer.forward_flops for layer in self.layers)

    @property
    def activation_bytes(self) -> float:
        """Of one sample, without checkpointing."""
        return sum(layer.activation_bytes for layer in self.layers)

    @property
    def step_flops(self) -> float:
        """Of one sample forward and backward, as MFU counts them: what checkpointing computes again is not in it."""
        return 3.0 * self.forward_flops

    def tensors_backward(self) -> list[tuple[int, float]]:
        """Every trained tensor in the order in which gradients come: its elements, and which share of the backward pass
        is over when it comes. What is tied comes with the earliest layer that has it."""
        total = self.forward_flops or float(len(self.layers)) or 1.0
        done, found = 0.0, []
        for layer in reversed(self.layers):
            done += layer.forward_flops if self.forward_flops else 1.0
            found += [(numel, min(1.0, done / total)) for numel in reversed(layer.tensors)]
        return found

    def num_blocks(self) -> int:
        """How many repeated blocks there are."""
        return len({layer.block for layer in self.layers if layer.block >= 0})

    def trained_by(self, workers: int, micro_batch: int | None = None) -> "Workload":
        """The same global batch on so many workers, in equal micro-batches of at most so many samples."""
        each = max(1, math.ceil(self.batch / workers))
        accumulation = math.ceil(each / max(1, min(micro_batch or self.micro_batch, each)))
        return replace(self, micro_batch=math.ceil(each / accumulation), accumulation=accumulation)
