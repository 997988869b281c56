"""The ways to train that are compared, by the names of lockstep.bench.catalogue, each with a GPT of its own.

nocomm         the bare module, each worker for itself: no communication at all
ddp            torch's DistributedDataParallel, with its gradients as views of its buckets
lockstep       lockstep.DataParallel
zero1..zero3   the same with `zero=1` to 3
half, int8, sign, topk, lowrank
               lockstep.DataParallel with that wire: bf16, blocks of 256, 1 %, rank 2
auto, auto-any the same with wire="auto", and with an auto that may choose any wire
ddp-bf16, ddp-fp16, ddp-powersgd
               torch's DDP with its own hook: bf16, fp16, or PowerSGD of rank 2 from the third step on
fsdp2          torch's fully_shard, one unit per block

ddp, lockstep and zero take a cap of their buckets in MB, as ddp@4, and a backend, as ddp/gloo: else the world's own.
"""

import argparse
from dataclasses import dataclass

import torch

import lockstep
from lockstep.bench import catalogue, models, variants
from lockstep.bench.models import GPT2, GPT2_SIZES, Batch

__all__ = ["GPT2", "GPT2_SIZES", "Batch", "Setup", "Variant", "batches", "build", "checked"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What all variants of one run have in common."""

    model: str
    batch: int
    """Sequences per worker and step."""
    context: int
    """Tokens per sequence."""
    bf16: bool
    """Whether the forward pass runs under bfloat16 autocast."""


class Variant(variants.Variant):
    """A GPT, wrapped in one of the ways, and its optimizer."""

    def __init__(self, name: str, setup: Setup, world: lockstep.World) -> None:
        torch.manual_seed(0)  # The same first weights for every variant.
        setting = variants.setting(name, build(setup.model), world, bf16=setup.bf16, batch=setup.batch)
        made = variants.make(setting)
        super().__init__(setting, made.model, made.optimizer)


def build(name: str) -> GPT2:
    """A new model of the size called `name`, its weights drawn from torch's generator."""
    return GPT2(GPT2_SIZES[name])


def batches(setup: Setup, world: lockstep.World, count: int = 4) -> list[Batch]:
    """This worker's batches of random tokens, different on every worker."""
    generator = torch.Generator().manual_seed(1 + world.rank)
    vocab = GPT2_SIZES[setup.model].vocab
    drawn = [models.sequences(vocab, setup.batch, setup.context, generator) for _ in range(count)]
    return [tuple(tensor.to(world.device) for tensor in batch) for batch in drawn]


def checked(name: str) -> str:
    """`name`, if there is such a variant, and it needs nothing but torch; a type for argparse."""
    try:
        kind = catalogue.spelled(name).kind
    except lockstep.UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if kind.startswith(tuple(catalogue.DISTRIBUTIONS)):
        raise argparse.ArgumentTypeError(f"{name!r} has calls of its own: measure it with lockstep bench step.")
    return name
