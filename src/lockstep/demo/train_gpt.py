"""The training itself, as users write theirs, on what everyone who can run this has: Python's own standard library.

An examiner looks on.
"""

import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.demo.examiner import Examiner, Findings
from lockstep.demo.gpt import ByteGPT, Recipe, loss_of
from lockstep.errors import UsageError


def corpus_folder() -> Path:
    """Where this Python keeps its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(folder: Path) -> bytes:
    """The source files in `folder`, not below it, in the order of their names: of the standard library about 5 MB.

    The same on every worker of a host. Raises UsageError where there is no source code.
    """
    text = b"\n".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    if not text:
        raise UsageError(
            f"there is no Python source code in {folder}: this Python has its standard library only in compiled form, "
            "and the demo learns from the source. Use a Python that has it, as those from python.org, uv, conda and "
            "Linux distributions do."
        )
    return text


def windows_of(text: bytes, context: int) -> TensorDataset:
    """`text` cut into windows of `context` bytes; an item is a window and the bytes that follow each of its bytes."""
    count = (len(text) - 1) // context
    whole = torch.frombuffer(bytearray(text[: count * context + 1]), dtype=torch.uint8).long()
    return TensorDataset(whole[:-1].view(count, context), whole[1:].view(count, context))


def train(recipe: Recipe) -> Findings | None:
    """Train by `recipe`; returns what was found, on worker 0. Called on every worker."""
    world = lockstep.join(seed=recipe.seed)
    net = ByteGPT(recipe.shape).to(world.device)
    windows = windows_of(read_corpus(corpus_folder()), recipe.shape.context)
    if not world.size <= recipe.batch <= len(windows):
        raise UsageError(
            f"a batch of {recipe.batch} samples: give at least {world.size}, one for each worker, and at most "
            f"{len(windows)}, which is all there are."
        )
    with Examiner(world, net, recipe) as examiner:
        model = lockstep.DataParallel(net)
        loader = lockstep.shard(DataLoader(windows, recipe.batch, shuffle=True, drop_last=True))
        optimizer, schedule = recipe.optimizer(model)
        for x, y in _batches(loader, recipe.steps):
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            examiner.end_step(model, x, y, loss)
        return examiner.conclude()


def _batches(loader: Any, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` batches, over as many epochs as that takes."""
    taken = count()
    while True:
        for batch in loader:
            if next(taken) == steps:
                return
            yield batch
