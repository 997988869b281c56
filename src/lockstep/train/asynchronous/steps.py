"""The steps of one worker under `Async`.

    batches   claims shards
    step      read, run, push: one update from one shard
    meet      all workers come together: everything is applied, and all hold the same

The protocol behind it, and why it holds, is in `lockstep.train.asynchronous`.
"""

import contextlib
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import seeds
from lockstep.data import batch as batches
from lockstep.data.source import GlobalBatch, Shard
from lockstep.errors import UsageError
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.engine import Engine
from lockstep.replica.layout import in_memory_order
from lockstep.replica.optimizer import SplitOptimizer
from lockstep.replica.params import Owned
from lockstep.train.asynchronous.client import FlatCopy, ParameterClient
from lockstep.train.asynchronous.connection import Connection, connect
from lockstep.train.asynchronous.owner import Owner
from lockstep.train.asynchronous.server import Service
from lockstep.train.asynchronous.shard_queue import (
    QueuePosition,
    QueueRemainder,
    ShardQueue,
    SharedCounter,
    check_queue_data,
)
from lockstep.train.batches import LoaderOptions
from lockstep.train.strategy import ShardLoss, Stepper, StepResult, TrainerOptions


class ServedParams:
    """The parameters of a model that are served: a whole copy to compute with, and the part that this worker owns.

    What is saved and loaded is the parts; `renew` sets the copies to them, and is called on all workers.
    """

    def __init__(self, options: TrainerOptions, staleness: int) -> None:
        self._world, optimizer = options.world, options.optimizer
        world = options.world
        self._params = list(options.module.parameters())
        self.copy = FlatCopy(self._params, world.size)
        self._parts = self.copy.part(world.rank)
        """What this worker owns, bucket by bucket."""
        SplitOptimizer(optimizer).point_at(self._params, self._parts)
        self._owner = Owner(self._parts, optimizer, options.scheduler, staleness)
        opened, accepted = connect(world)
        self.service = Service(self._owner, accepted, self.copy.make_buffers, len(self._params))
        # Each worker has at most one reading outstanding, so with a bound of one less than workers none has to wait.
        takes_turns = staleness < world.size - 1
        self.client = ParameterClient(
            world, self.copy, self._owner, opened, self.service.check, takes_turns=takes_turns
        )
        self.close = weakref.finalize(self, _close, os.getpid(), self.service, opened)
        """Ends the connections and threads; at the latest when nobody has the model any more."""
        self.close.atexit = False

    @property
    def parts(self) -> list[Owned]:
        """What this worker owns, parameter by parameter."""
        return [each for part in self._parts for each in part.owned(self._params)]

    def settle(self) -> None:
        """Return when no gradient is under way, on all workers."""
        self.client.settle()
        self._world.barrier()

    def renew(self) -> None:
        """Every worker reads all parts, which nobody changes meanwhile."""
        self._owner.see()
        self._world.barrier()
        self.client.fetch()
        self._world.barrier()

    @torch.no_grad()
    def take_over(self) -> None:
        """The copy was changed, alike on all workers: let that count in the parts."""
        for each in self.parts:
            flat = in_memory_order(each.param, each.strides)
            each.own.copy_(flat[each.offset : each.offset + each.own.numel()])


class ServedEngine(Engine):
    """Behind a model whose parameters are served; `served` is set once, when it is there."""

    served: ServedParams

    @property
    def parts(self) -> list[Owned]:
        """See Engine."""
        return self.served.parts

    def before_load(self) -> None:
        """See Engine."""
        self.served.settle()

    def after_load(self) -> None:
        """See Engine."""
        self.served.renew()

    @contextlib.contextmanager
    def whole_params(self, call: str) -> Iterator[None]:
        """See Engine: the copy is whole; what is changed in it counts in the parts."""
        self.served.settle()
        self.served.renew()
        yield
        self.served.take_over()
        self.served.renew()

    def release(self) -> None:
        """See Engine."""
        if hasattr(self, "served"):  # Not where the workers could not be connected.
            self.served.close()
        super().release()


class ServedModel(DataParallel):
    """A DataParallel whose parameters are served, and whose gradients are pushed to their owners."""

    _engine_class = ServedEngine
    _engine: ServedEngine

    def __init__(self, options: TrainerOptions, staleness: int) -> None:
        super().__init__(options.module, reduces=False)
        self._engine.served = ServedParams(options, staleness)


def _close(pid: int, service: Service, opened: Mapping[int, Connection]) -> None:
    if pid != os.getpid():  # A loader process, where this is garbage: the connections are its worker's.
        return
    for connection in opened.values():
        connection.close()
    service.close()


@dataclass(frozen=True, slots=True)
class _Here:
    """What a worker says when all meet."""

    reason: str
    steps: int
    """That it has made since they last met."""
    queue: int | None
    """The seed of the queue that it reads."""
    position: QueuePosition | None

    @classmethod
    def from_json(cls, reason: str, steps: int, queue: int | None, position: list[Any] | None) -> "_Here":
        """What a worker has told."""
        if position is None:
            return cls(reason, steps, queue, None)
        epoch, claimed, pending = position
        return cls(reason, steps, queue, QueuePosition(epoch, claimed, tuple((each[0], each[1]) for each in pending)))


class Asynchronous(Stepper):
    """Makes the steps of one worker."""

    is_independent = True

    def __init__(self, options: TrainerOptions, staleness: int) -> None:
        model = ServedModel(options, staleness)
        super().__init__(options, model)
        self._served = model._engine.served
        self._world = options.world
        self._run = str(self._world.gather_json(secrets.token_hex(8))[0])
        """Tells the claims of this trainer from those of others in this world."""
        self._num_loads = 0
        self._queue: ShardQueue | None = None
        """The one that is read."""
        self._stored: Mapping[str, Any] = {}
        """What is left of the queue that was read when all last met, as a checkpoint has it."""
        self._num_made = 0
        """Steps of this worker since all last met."""

    def check_data(self, dataset: Any, loading: LoaderOptions) -> None:
        """See Stepper."""
        check_queue_data(dataset, loading)

    def batches(self, dataset: Any, loading: LoaderOptions, seed: int) -> ShardQueue:
        """See Stepper."""
        counter = SharedCounter(self._world.peers, f"claims/{self._run}/{self._num_loads}", self._served.service.check)
        shards = self._options.tree.shards
        queue = ShardQueue(dataset, loading, shards=shards, seed=seed, counter=counter, on_begin=self._see_queue)
        if self._stored.get("feed") == seed:
            queue.go_on_from(QueueRemainder.from_json(self._stored["left"]))
        return queue

    def _see_queue(self, queue: ShardQueue) -> None:
        self._queue = queue

    def step(self, batch: GlobalBatch, seed: int, number: int) -> StepResult:
        """See Stepper: one update from one shard. A worker whose shard fails raises its error, and others go on."""
        shard, options, lr = _only(batch), self._options, self._options.lr
        self._served.client.begin()
        try:
            with options.determinism():
                seeds.seed_everything(seeds.derive(seed, "async", batch.epoch, batch.number, shard.number))
                with options.world.events.copying():
                    moved = batches.move(shard.batch, options.world.device, non_blocking=True)
                loss = ShardLoss.of(options.loss_fn(self.model, moved), shard.size)
                loss.value.backward()
                norm = self._clip()
        except BaseException:
            self.model.zero_grad()
            self._served.client.withdraw()
            raise
        self._served.copy.collect()
        staleness = self._served.client.push()
        self._num_made += 1
        return StepResult(number + 1, False, loss.value.detach(), norm, torch.as_tensor(loss.weight), lr, staleness)

    def _clip(self) -> Tensor:
        """The norm of this worker's gradient, which is brought to the largest one that is allowed."""
        params = [param for param in self.model.parameters() if param.grad is not None]
        for param in params:
            if param.grad is not None and param.grad.layout is not torch.strided:
                param.grad = param.grad.to_dense()
        grads = [param.grad for param in params if param.grad is not None]
        norm = nn.utils.get_total_norm(grads) if grads else torch.zeros((), device=self._world.device)
        if self._options.clip is not None:
            nn.utils.clip_grads_with_norm_(params, self._options.clip, norm)
        return norm

    # Meetings

    def before_save(self, steps: int) -> int:
        """See Stepper."""
        return steps + self._meet("saves, evaluates or loads")

    def end_batches(self, steps: int) -> int:
        """See Stepper."""
        return steps + self._meet("has come to the end of a feed")

    def _meet(self, reason: str) -> int:
        """All updates are applied, and every worker has all parameters as they are then.

        Returns how many steps the other workers have made since all last met.
        """
        self._served.client.settle()
        queue = self._queue
        position = astuple(queue.claims.position) if queue else None
        here = [reason, self._num_made, queue.seed if queue else None, position]
        everybody = [_Here.from_json(*theirs) for theirs in self._world.gather_json(here)]
        for rank, each in enumerate(everybody):
            if (each.reason, each.queue) != (everybody[0].reason, everybody[0].queue):
                raise UsageError(
                    f"worker {rank} {each.reason} while worker 0 {everybody[0].reason}, perhaps of another feed. With "
                    "Async workers make different numbers of steps: save and evaluate where all of them come by, such "
                    "as after the loop over trainer.batches(...)."
                )
        if queue is not None:
            left = queue.claims.remainder.after([each.position for each in everybody if each.position is not None])
            self._stored = {"feed": queue.seed, "left": left.to_json()}
        made = [each.steps for each in everybody]
        self._num_made = 0
        if sum(made):
            self._served.renew()
            self._average_buffers(made)
        return sum(made) - made[self._world.rank]

    def _average_buffers(self, made: list[int]) -> None:
        """Running statistics are each worker's own between meetings; they count by the steps that were made with them.

        Those that are counted, and not averaged, are worker 0's.
        """
        buffers = list(self._options.module.buffers())
        if not buffers or self._world.size == 1:
            return
        smooth = [buffer for buffer in buffers if buffer.is_floating_point()]
        counted = [buffer for buffer in buffers if not buffer.is_floating_point()]
        share = made[self._world.rank] / sum(made)
        with torch.no_grad():
            for buffer in smooth:
                mine = buffer.double().cpu()
                buffer.copy_(self._world.all_reduce(mine * share if share else torch.zeros_like(mine)))
            of_main = self._world.gather_tensors(counted if self._world.is_main else [])[0]
            for buffer, value in zip(counted, of_main, strict=True):
                buffer.copy_(value)

    # To go on later

    def state_dict(self) -> dict[str, Any]:
        """What is left of the queue that is read."""
        return dict(self._stored)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Stepper."""
        self._stored = dict(state)
        self._num_loads += 1
        self._queue = None
        self._num_made = 0


def _only(batch: GlobalBatch) -> Shard:
    """The one shard of a claimed batch."""
    filled = [shard for shard in batch.shards if shard.size]
    if len(filled) != 1:
        raise UsageError(
            f"a step with Async is made from one shard that this worker has claimed, and this batch has {len(filled)}. "
            "Take the batches from trainer.batches(...)."
        )
    return filled[0]
