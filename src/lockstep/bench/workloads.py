"""The work that every variant does: a model and its batches, made by the names of the catalogue.

A model takes the tensors of a batch and returns the loss. Batches are random, a few of them, taken in turn: what is
measured is the step, and not the data.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast

import torch
from torch import Generator, Tensor, nn

from lockstep.bench import gpt
from lockstep.bench.catalogue import WORKLOADS
from lockstep.bench.gpt import GPT
from lockstep.bench.mlp import MLP
from lockstep.bench.recommender import NUM_DENSE, Recommender
from lockstep.bench.resnet import ResNet

Batch = tuple[Tensor, ...]

NUM_BATCHES = 4


class Divisible(Protocol):
    """A model that says how to split it."""

    def units(self) -> Sequence[nn.Module]:
        """The submodules whose parameters are needed together, in the order of the forward pass."""
        ...


def build(workload: str) -> nn.Module:
    """A new model, its weights drawn from torch's generator."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "gpt-40m-small": lambda: GPT(gpt.SIZES["gpt-40m"]),
        "resnet18": ResNet,
        "mlp": MLP,
        "recommender": Recommender,
        "tiny": lambda: MLP(width=16, stages=2, layers=2),
    }
    return GPT(gpt.SIZES[workload]) if workload in gpt.SIZES else makers[workload]()


def units(model: nn.Module) -> Sequence[nn.Module]:
    """What is gathered together where parameters are split."""
    return cast(Divisible, model).units()


def batches(workload: str, size: int, rank: int, device: torch.device, count: int = NUM_BATCHES) -> list[Batch]:
    """`count` batches of `size` samples for one worker, different on every worker."""
    generator = Generator().manual_seed(1 + rank)
    drawn = [_batch(workload, size, generator) for _ in range(count)]
    return [tuple(tensor.to(device) for tensor in batch) for batch in drawn]


def sequences(vocab: int, batch: int, length: int, generator: Generator) -> Batch:
    """Random tokens, and those that follow them."""
    tokens = torch.randint(vocab, (batch, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _batch(workload: str, size: int, generator: Generator) -> Batch:
    if workload.startswith("gpt"):
        vocab = gpt.SIZES[workload.removesuffix("-small")].vocab
        return sequences(vocab, size, WORKLOADS[workload].length, generator)
    if workload == "recommender":
        categories = torch.randint(50_000, (size, 8), generator=generator)
        clicks = torch.randint(2, (size,), generator=generator).float()
        return torch.randn(size, NUM_DENSE, generator=generator), categories, clicks
    shape = {"resnet18": (3, 32, 32), "mlp": (64,), "tiny": (16,)}[workload]
    classes = torch.randint(10, (size,), generator=generator)
    return torch.randn(size, *shape, generator=generator), classes
