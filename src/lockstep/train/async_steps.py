"""The steps of one worker under `Async`.

    feed     claims shards
    step     read, run, push: one update from one shard
    meet     all workers come together: everything is applied, and all hold the same

The protocol behind it, and why it holds, is in asynchronous.py.
"""

import os
import secrets
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import seeds
from lockstep.data.shard_source import GlobalBatch, Shard
from lockstep.errors import UsageError
from lockstep.train.claims import ClaimedFeed, Counter, Remainder
from lockstep.train.connection import connect
from lockstep.train.feed import Loading
from lockstep.train.owner import Owner
from lockstep.train.parted_model import PartedModel
from lockstep.train.permits import Permits
from lockstep.train.result import StepResult
from lockstep.train.round_trip import KEEPER, RoundTrips
from lockstep.train.service import Service
from lockstep.train.shard_loss import loss_of
from lockstep.train.strategy import Setting


@dataclass(frozen=True, slots=True)
class _Here:
    """What a worker says when all meet."""

    reason: str
    steps: int
    """That it has made since they last met."""
    feed: int | None
    """The seed of the feed that it reads."""
    standing: Any


class Asynchronous:
    """Makes the steps of one worker."""

    def __init__(self, setting: Setting, staleness: int) -> None:
        self._setting, self._world = setting, setting.world
        self.model = PartedModel(setting.module, setting.optimizer)
        self.model.settle, self.model.renew = self._settle_all, self._renew
        self.loss_fn = setting.loss_fn
        world, flats = self._world, self.model.flats
        needs_permit = staleness < world.size - 1
        permits = Permits(staleness + 1) if needs_permit and world.rank == KEEPER else None
        self._owner = Owner(self.model.owned, setting.optimizer, setting.scheduler, world.size, staleness)
        opened, accepted = connect(world)
        self._service = Service(self._owner, permits, flats, accepted)
        self._trips = RoundTrips(
            world, flats, self._owner, permits, opened, self._service.check, needs_permit=needs_permit
        )
        self._connections = opened
        self.model.on_release = self.close
        weakref.finalize(self.model, _end, os.getpid(), self._service, opened).atexit = False
        self._run = world.broadcast(secrets.token_hex(8))
        """Tells the claims of this trainer from those of others in this world."""
        self._num_loads = 0
        self._feed: ClaimedFeed | None = None
        """The one that is read."""
        self._stored: Mapping[str, Any] = {}
        self._made = self._made_by_all = 0
        """Steps since all met, and what came of counting them."""

    # The batches

    def feed(self, dataset: Any, loading: Loading, seed: int) -> ClaimedFeed:
        """See Stepper."""
        counter = Counter(self._world.peers, f"claims/{self._run}/{self._num_loads}", self._service.check)
        feed = ClaimedFeed(
            dataset, loading, shards=self._setting.tree.shards, seed=seed, counter=counter, on_begin=self._see_feed
        )
        if self._stored.get("feed") == seed:
            feed.go_on_from(Remainder.from_json(self._stored["left"]))
        return feed

    def _see_feed(self, feed: ClaimedFeed) -> None:
        self._feed = feed

    # The step

    def step(self, batch: GlobalBatch, seed: int, number: int) -> StepResult:
        """See Stepper: one update from one shard. A worker whose shard fails raises its error, and others go on."""
        shard = _only(batch)
        setting = self._setting
        lr = setting.optimizer.param_groups[0]["lr"] if setting.optimizer.param_groups else 0.0
        self._trips.begin()
        try:
            with setting.determinism():
                loss, weight = self._pass(shard, seeds.derive(seed, "async", batch.epoch, batch.number, shard.number))
                norm = self._clip()
        except BaseException:
            self.model.zero_grad()
            self._trips.withdraw()
            raise
        self.model.flats.collect()
        applied = self._trips.push()
        self._made += 1
        return StepResult(number + 1, False, loss, norm, weight, lr, applied)

    def _pass(self, shard: Shard, seed: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of the shard; returns its loss and what that is the mean over."""
        seeds.seed_everything(seed)
        loss = loss_of(self.loss_fn, self.model, shard.batch, shard.size)
        loss.value.backward()
        return loss.value.detach(), torch.as_tensor(loss.weight)

    def _clip(self) -> Tensor:
        """The norm of this worker's gradient, which is brought to the largest one that is allowed."""
        params = [param for param in self.model.parameters() if param.grad is not None]
        for param in params:
            if param.grad is not None and param.grad.layout is not torch.strided:
                param.grad = param.grad.to_dense()
        grads = [param.grad for param in params if param.grad is not None]
        norm = nn.utils.get_total_norm(grads) if grads else torch.zeros((), device=self._world.device)
        if self._setting.clip is not None:
            nn.utils.clip_grads_with_norm_(params, self._setting.clip, norm)
        return norm

    def check(self, steps: int) -> None:
        """Nothing: replicas differ between meetings, by design."""

    # Meetings

    def before_save(self) -> None:
        """See Stepper."""
        self._meet("saves, evaluates or loads")

    def end_feed(self) -> None:
        """See Independent."""
        self._meet("has come to the end of a feed")

    def agreed_steps(self, steps: int) -> int:
        """See Independent."""
        agreed = steps + self._made_by_all
        self._made_by_all = 0
        return agreed

    def _meet(self, reason: str) -> None:
        """All updates are applied, and every worker has all parameters as they are then."""
        self._trips.settle()
        feed = self._feed
        here = _Here(reason, self._made, feed.seed if feed else None, feed.standing if feed else None)
        everybody: list[_Here] = self._world.gather(here)
        self._require_same(everybody)
        if feed is not None:
            left = feed.remainder.after([each.standing for each in everybody])
            self._stored = {"feed": feed.seed, "left": left.to_json()}
        made = [each.steps for each in everybody]
        self._made_by_all += sum(made) - self._made
        self._made = 0
        if sum(made):
            self._renew()
            self._average_buffers(made)

    def _require_same(self, everybody: list[_Here]) -> None:
        for rank, each in enumerate(everybody):
            if (each.reason, each.feed) != (everybody[0].reason, everybody[0].feed):
                raise UsageError(
                    f"worker {rank} {each.reason} while worker 0 {everybody[0].reason}, perhaps of another feed. With "
                    "Async workers make different numbers of steps: save and evaluate where all of them come by, such "
                    "as after the loop over trainer.batches(...)."
                )

    def _settle_all(self) -> None:
        """No gradient is under way anywhere."""
        self._trips.settle()
        self._world.barrier()

    def _renew(self) -> None:
        """Every worker reads all parts, which nobody changes meanwhile."""
        self._owner.see()
        self._world.barrier()
        self._trips.fetch()
        self._world.barrier()

    def _average_buffers(self, made: list[int]) -> None:
        """Running statistics are each worker's own between meetings; they count by the steps that were made with them.

        Those that are counted, and not averaged, are worker 0's.
        """
        buffers = list(self._setting.module.buffers())
        if not buffers or self._world.size == 1:
            return
        smooth = [buffer for buffer in buffers if buffer.is_floating_point()]
        counted = [buffer for buffer in buffers if not buffer.is_floating_point()]
        share = made[self._world.rank] / sum(made)
        with torch.no_grad():
            for buffer in smooth:
                mine = buffer.double().cpu()
                buffer.copy_(self._world.sum(mine * share if share else torch.zeros_like(mine)))
            for buffer, value in zip(counted, self._world.broadcast([each.cpu() for each in counted]), strict=True):
                buffer.copy_(value)

    # To go on later

    def after_load(self) -> None:
        """Nothing: loading has renewed all copies."""

    def state_dict(self) -> dict[str, Any]:
        """What is left of the feed that is read."""
        return dict(self._stored)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Stepper."""
        self._stored = dict(state)
        self._num_loads += 1
        self._feed = None
        self._made = self._made_by_all = 0

    def close(self) -> None:
        """End the connections; called when the world is left."""
        _end(os.getpid(), self._service, self._connections)


def _end(pid: int, service: Service, connections: Mapping[int, Any]) -> None:
    if pid != os.getpid():  # A loader process, where this is garbage: the connections are its worker's.
        return
    for connection in connections.values():
        connection.close()
    service.close()


def _only(batch: GlobalBatch) -> Shard:
    """The one shard of a claimed batch."""
    filled = [shard for shard in batch.shards if shard.size]
    if len(filled) != 1:
        raise UsageError(
            f"a step with Async is made from one shard that this worker has claimed, and this batch has {len(filled)}. "
            "Take the batches from trainer.batches(...)."
        )
    return filled[0]
