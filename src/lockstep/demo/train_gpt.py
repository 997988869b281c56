"""The training itself, as users write theirs, on what everyone who can run this has: Python's own standard library.

An examiner looks on.
"""

import os
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import lockstep
from lockstep.demo.examiner import Examiner, Findings
from lockstep.demo.gpt import ByteGPT, Recipe, loss_of
from lockstep.errors import UsageError

MAX_BYTES = 16 << 20

_SKIPPED = {
    *("site-packages", "dist-packages"),  # Not the standard library.
    *("test", "tests", "idle_test"),  # As large as all the rest together.
    *("encodings", "pydoc_data"),  # Tables and texts, hardly any code.
}


def corpus_folder() -> Path:
    """Where this Python keeps its standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(root: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """The source files under `root` in the order of their names, one after the other; at most `max_bytes`.

    The same on every worker of a host. Raises UsageError where there is no source code.
    """
    text = bytearray()
    for file in _sources(root):
        text += file.read_bytes() + b"\n"
        if len(text) >= max_bytes:
            break
    if not text:
        raise UsageError(
            f"there is no Python source code in {root}: this Python has its standard library only in compiled form, "
            "and the demo learns from the source. Use a Python that has it, as those from python.org, uv, conda and "
            "Linux distributions do."
        )
    return bytes(text[:max_bytes])


def _sources(root: Path) -> Iterator[Path]:
    found: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _SKIPPED]  # Not even looked into: site-packages are many.
        found.extend(Path(folder, name) for name in names if name.endswith(".py") and name not in _SKIPPED)
    yield from sorted(found)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """`text` cut into windows of `context` bytes; an item is a window and the bytes that follow each of its bytes."""

    def __init__(self, text: bytes, context: int) -> None:
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._context = context

    def __len__(self) -> int:
        return max(0, (len(self._bytes) - 1) // self._context)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._context
        window = self._bytes[start : start + self._context + 1].long()
        return window[:-1], window[1:]


def train(recipe: Recipe) -> Findings | None:
    """Train by `recipe`; returns what was found, on worker 0. Called on every worker."""
    world = lockstep.join(seed=recipe.seed)
    net = ByteGPT(recipe.shape).to(world.device)
    windows = Windows(read_corpus(corpus_folder()), recipe.shape.context)
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
