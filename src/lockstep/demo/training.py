"""The training itself, as users write theirs; an examiner looks on."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

import lockstep
from lockstep.demo import corpus
from lockstep.demo.corpus import Windows
from lockstep.demo.examiner import Examiner
from lockstep.demo.findings import Findings
from lockstep.demo.gpt import GPT, loss_of
from lockstep.demo.recipe import Recipe
from lockstep.errors import UsageError


def train(recipe: Recipe) -> Findings | None:
    """Train by `recipe`; returns what was found, on worker 0. Called on every worker."""
    world = lockstep.join(seed=recipe.seed)
    net = GPT(recipe.shape).to(world.device)
    windows = Windows(corpus.read(corpus.folder()), recipe.shape.context)
    if not world.size <= recipe.batch <= len(windows):
        raise UsageError(
            f"a batch of {recipe.batch} samples: give at least {world.size}, one for each worker, and at most "
            f"{len(windows)}, which is all there are."
        )
    with Examiner(world, net, recipe) as examiner:
        model = lockstep.DataParallel(net)
        loader = lockstep.shard(DataLoader(windows, recipe.batch, shuffle=True, drop_last=True), device=True)
        optimizer, schedule = recipe.optimizer(model)
        for x, y in _batches(loader, recipe.steps):
            examiner.begin_step()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            examiner.end_step(x, y, loss)
        return examiner.conclude()


def _batches(loader: Any, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` batches, over as many epochs as that takes."""
    taken = count()
    while True:
        for batch in loader:
            if next(taken) == steps:
                return
            yield batch
