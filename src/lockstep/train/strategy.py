"""How the workers' steps become one training: what a strategy is.

    Setting    what a trainer was made of
    Strategy   chosen when the trainer is made; opens a stepper
    Stepper    makes the steps, and knows what it must keep

Without a strategy every step is that of one worker on the whole batch (`Synchronous`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from lockstep.comm.shard_tree import ShardTree
from lockstep.data.shard_source import GlobalBatch
from lockstep.replica.data_parallel import DataParallel
from lockstep.train.deterministic import Determinism
from lockstep.train.feed import Feed, Loading
from lockstep.train.result import StepResult
from lockstep.train.shard_loss import LossFn
from lockstep.world import World


@dataclass(frozen=True, slots=True)
class Setting:
    """What a trainer was made of; its arguments under their names."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    world: World
    tree: ShardTree
    """Which shards there are, and who has which."""
    clip: float | None
    zero: int
    blocks: Any
    bucket_cap_mb: float | None
    wire: Any
    scheduler: Any
    scaler: Any
    determinism: Determinism
    check_every: int
    on_difference: str
    cuda_graph: bool

    @property
    def run(self) -> tuple[int, int]:
        """The first of this worker's shards, and the one behind its last."""
        return self.tree.runs[self.world.rank]

    def feed(self, dataset: Any, loading: Loading, seed: int) -> Feed:
        """This worker's shards of the global batches of `dataset`."""
        return Feed(dataset, loading, run=self.run, shards=self.tree.shards, seed=seed)


class Walkable(Protocol):
    """A source of batches, epoch after epoch: a `Feed`, or what a strategy has in its place."""

    def walk(self, epoch: int, num_skipped: int = 0, stream: Any = None) -> Iterator[GlobalBatch]:
        """The batches of one epoch, from number `num_skipped` on."""


class Stepper(Protocol):
    """Makes the steps of one worker."""

    model: DataParallel
    """The wrapped module, as `loss_fn` gets it."""

    def feed(self, dataset: Any, loading: Loading, seed: int) -> Walkable:
        """Where this worker's batches of `dataset` come from."""

    def step(self, batch: GlobalBatch, seed: int, number: int) -> StepResult:
        """Make step `number`; if that raises, the step has not happened."""

    def check(self, steps: int) -> None:
        """So many steps have taken effect: raise if something is found to be wrong with the replicas."""

    def before_save(self) -> None:
        """All workers are about to save, or to evaluate: let their replicas be what is to be kept."""

    def after_load(self) -> None:
        """Model and optimizer have been set to something else: go on from there."""

    def state_dict(self) -> dict[str, Any]:
        """What is to be kept besides model and optimizer; plain values, the same on all workers."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, perhaps on another number of workers."""


@runtime_checkable
class Independent(Protocol):
    """What a stepper has besides if its workers make their steps each for itself, some more than others."""

    def end_feed(self) -> None:
        """This worker's feed has ended; all workers come here, each when it is so far."""

    def agreed_steps(self, steps: int) -> int:
        """All workers have come together: how many steps they have made, where this one has counted `steps`."""


class Strategy(Protocol):
    """How the workers' steps become one training."""

    def open(self, setting: Setting) -> Stepper:
        """What makes the steps of a trainer; raises UsageError for settings it cannot work with."""
