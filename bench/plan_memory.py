"""Predicted against measured memory per worker: models, stages of splitting, optimizers, with and without checkpointing.

    python bench/plan_memory.py                                   2 CPU workers over shm, the whole matrix
    python bench/plan_memory.py --models gpt mlp --zero 0 3 --backends gloo

Predicted is what `lockstep plan` says from a trace of the model on fake tensors: nothing of it is measured, and nothing
of it fitted to a row of this table. Measured is what bench/memory.py measures: the peak of the proportional set size of
a worker, sampled all the time from its second step on, less what it was after a few steps of a tiny model of the same
kind. The largest over the workers counts, and every row runs in workers of its own.
"""

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.bench.machine import MemorySampler, used_bytes
from lockstep.bench.models import GPT2, MLP, Batch, ResNet, sequences
from lockstep.demo.gpt import Shape

MB = 1e6
STEPS = 4


class Encoder(nn.Module):
    """BERT-like: tokens, some of them masked, through torch's own post-norm encoder layers; every token is predicted."""

    def __init__(self, vocab: int, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.1, "gelu", batch_first=True) for _ in range(layers)
        )
        self.transform = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss of one batch."""
        x = self.norm(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits = self.head(functional.gelu(self.transform(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Checkpointed(nn.Module):
    """A block whose inside is computed again in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """What the block returns."""
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


def gpt(*, tiny: bool) -> nn.Module:
    """GPT-2 in small: fused causal attention, a tied head."""
    return GPT2(Shape(vocab=4096, context=128, layers=2 if tiny else 7, heads=5, width=40 if tiny else 320))


def bert(*, tiny: bool) -> nn.Module:
    """A bidirectional encoder with dropout, and a head of its own."""
    return Encoder(4096 if not tiny else 64, 128, 2 if tiny else 6, 4, 32 if tiny else 256)


def cnn(*, tiny: bool) -> nn.Module:
    """ResNet-18 for small pictures, with batch norms."""
    return ResNet(widths=(8, 8, 8, 8)) if tiny else ResNet()


def mlp(*, tiny: bool) -> nn.Module:
    """Layers of 1024 x 1024, around residuals."""
    return MLP(width=64, stages=2, layers=1) if tiny else MLP(width=1024, stages=4, layers=4)


MODELS: dict[str, tuple[Callable[..., nn.Module], int]] = {"gpt": (gpt, 8), "bert": (bert, 8), "cnn": (cnn, 32), "mlp": (mlp, 512)}
"""Makers, and samples per worker."""


def make(model: str, *, tiny: bool, checkpointing: bool) -> nn.Module:
    """A new model."""
    torch.manual_seed(0)
    net = MODELS[model][0](tiny=tiny)
    if checkpointing:
        blocks = net.stages if isinstance(net, MLP) else net.blocks
        assert isinstance(blocks, nn.ModuleList)
        for number, block in enumerate(blocks):
            blocks[number] = Checkpointed(block)
    return net


def batch_of(model: str, net: nn.Module, size: int) -> Batch:
    """A random batch for it."""
    generator = torch.Generator().manual_seed(1)
    if model in ("gpt", "bert"):
        return sequences(net.tokens.num_embeddings, size, 128, generator)
    shape = (3, 32, 32) if model == "cnn" else (net.head.in_features,)
    return torch.randn(size, *shape, generator=generator), torch.randint(10, (size,), generator=generator)


def optimizer_of(name: str, net: nn.Module) -> torch.optim.Optimizer:
    """AdamW as torch makes it by itself, or SGD with momentum."""
    if name == "adamw":
        return torch.optim.AdamW(net.parameters(), lr=1e-4)
    return torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)


def measure(model: str, optimizer: str, zero: int, checkpointing: bool, backend: str) -> int:
    """The peak of one worker, in bytes; runs on every worker."""
    torch.set_num_threads(1)
    world = lockstep.join(backend=backend)
    _peak(world, model, optimizer, zero, checkpointing, tiny=True)
    gc.collect()
    world.barrier()
    before = used_bytes(world.device)
    world.barrier()
    peak = _peak(world, model, optimizer, zero, checkpointing, tiny=False) - before
    world.barrier()
    return peak


def _peak(world: lockstep.World, model: str, optimizer: str, zero: int, checkpointing: bool, *, tiny: bool) -> int:
    net = make(model, tiny=tiny, checkpointing=checkpointing)
    batch = batch_of(model, net, 2 if tiny else MODELS[model][1])
    chosen = optimizer_of(optimizer, net)
    wrapped = lockstep.DataParallel(net, optimizer=chosen, zero=zero)
    sampler = MemorySampler()
    for step in range(STEPS):
        if step == 1:
            world.barrier()
            sampler.start()
        loss = wrapped(*batch)
        loss.backward()
        chosen.step()
        chosen.zero_grad()
    peak = sampler.end()
    world.barrier()
    return peak
