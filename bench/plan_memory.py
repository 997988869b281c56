"""Predicted against measured memory per worker: models, splitting, optimizers, with and without checkpointing.

    python bench/plan_memory.py                                   2 CPU workers over shm, the whole matrix
    python bench/plan_memory.py --models gpt mlp --zero 0 3 --backends gloo

Predicted is what `lockstep plan` says from a trace of the model on fake tensors: nothing of it is measured, and nothing
of it fitted to a row of this table. Measured is what bench/memory.py measures: the peak of the proportional set size of
a worker, sampled all the time from its second step on, less what it was after a few steps of a tiny model of the same
kind. The largest over the workers counts, and every row runs in workers of its own.
"""

import argparse
import functools
import gc
import itertools
import json
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
from lockstep.plan import machine
from lockstep.plan.memory import Memory, estimate
from lockstep.plan.script import workload_of
from lockstep.plan.tracing import StepTrace, trace_step

MB = 1e6
STEPS = 4


class Encoder(nn.Module):
    """BERT-like: tokens through torch's own post-norm encoder layers, with dropout; every token is predicted."""

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


MODELS: dict[str, tuple[Callable[..., nn.Module], int]] = {
    "gpt": (gpt, 8),
    "bert": (bert, 8),
    "cnn": (cnn, 32),
    "mlp": (mlp, 512),
}
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


def batch_of(model: str, net: nn.Module, size: int, rank: int) -> Batch:
    """A random batch for it, another one on every worker."""
    generator = torch.Generator().manual_seed(1 + rank)
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
    batch = batch_of(model, net, 2 if tiny else MODELS[model][1], world.rank)
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


def predict(model: str, optimizer: str, zero: int, checkpointing: bool, backend: str, workers: int) -> Memory:
    """What `lockstep plan` says, by component."""
    trace = traced(model, optimizer, checkpointing)
    workload = workload_of(trace, name=model, batch=workers * trace.samples, zero=zero)
    return estimate(workload, machine.assembled("cpu", workers, workers), backend=backend)


@functools.cache
def traced(model: str, optimizer: str, checkpointing: bool) -> StepTrace:
    """A step of it on fake tensors."""

    def build() -> tuple[nn.Module, Sequence[Tensor], torch.optim.Optimizer]:
        net = make(model, tiny=False, checkpointing=checkpointing)
        return net, batch_of(model, net, MODELS[model][1], 0), optimizer_of(optimizer, net)

    return trace_step(build)


def main() -> None:
    """Every row in turn; the worst and the median at the end."""
    options = _options()
    torch.set_num_threads(1)
    print(f"{options.workers} workers; MB per worker, least and most of {options.workers} x {options.repeat} measured")
    print(
        f"{'backend':9}{'model':6}{'optimizer':10}{'checkp.':9}{'zero':>4}{'predicted':>11}{'measured':>17}{'ratio':>8}"
    )
    ratios, rows = [], []
    kinds = itertools.product(options.backends, options.models, options.optimizers, options.checkpointing, options.zero)
    for backend, model, optimizer, kept, zero in kinds:
        wanted = predict(model, optimizer, zero, kept == "full", backend, options.workers)
        peaks = []
        for _ in range(options.repeat):
            args = (model, optimizer, zero, kept == "full", backend)
            peaks += lockstep.launch(measure, workers=options.workers, args=args)
        measured = max(peaks)
        ratio = wanted.training / measured
        ratios.append(abs(ratio - 1))
        rows.append(
            {
                "backend": backend,
                "model": model,
                "optimizer": optimizer,
                "checkpointing": kept,
                "zero": zero,
                "predicted": wanted.training,
                "measured": peaks,
                "components": dict(wanted.components()),
            }
        )
        between = f"{min(peaks) / MB:.0f}-{measured / MB:.0f}"
        print(
            f"{backend:9}{model:6}{optimizer:10}{kept:9}{zero:>4}{wanted.training / MB:11.0f}{between:>17}{ratio:8.3f}",
            flush=True,
        )
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    off = sorted(ratios)
    within = sum(each <= 0.1 for each in off)
    print(f"off by {off[len(off) // 2]:.1%} (median), {off[-1]:.1%} (worst); {within} of {len(off)} rows within 10 %")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--optimizers", nargs="+", choices=["adamw", "sgd"], default=["adamw", "sgd"])
    parser.add_argument("--checkpointing", nargs="+", choices=["none", "full"], default=["none", "full"])
    parser.add_argument("--zero", nargs="+", type=int, default=[0, 1, 2, 3])
    parser.add_argument("--backends", nargs="+", choices=["shm", "gloo"], default=["shm"])
    parser.add_argument("--repeat", type=int, default=1, help="how often each row is measured (default 1)")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
