"""Forward and backward of a worker's shards: the first half of a step.

Where parameters are gathered when they are used (zero=3 over gloo or NCCL), all workers must run as many passes: one
with fewer shards, or with empty ones, runs idle passes, which count for nothing.
"""

from typing import Any

from lockstep import seeds
from lockstep.data.shard_source import GlobalBatch, Shard
from lockstep.errors import StepVoid, WorkerLost
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.shards import Shards
from lockstep.train.recorded_passes import RecordedPasses
from lockstep.train.report import Report
from lockstep.train.shard_loss import LossFn, ShardLoss, loss_of
from lockstep.train.unordered import Unordered


class Passes:
    """Runs the shards of one worker, and reports on them."""

    def __init__(
        self, model: DataParallel, shards: Shards | Unordered, loss_fn: LossFn, report: Report, scaler: Any
    ) -> None:
        self._model, self._shards, self._report = model, shards, report
        self.loss_fn = loss_fn
        self._scaler = scaler
        self._world = model.world
        self._most = shards.tree.runs[0][1]
        """Of the shards that a worker has."""
        self.is_weighed = False
        """Whether `loss_fn` has ever given weights of its own."""
        self.recorded: RecordedPasses | None = None
        """Passes as CUDA graphs, where they are wanted."""

    def run(self, batch: GlobalBatch, seed: int, step: int) -> None:
        """Run this worker's shards; afterwards the optimizer's parameters have the gradients.

        If that fails here, the step is void on all workers.
        """
        *others, last = batch.shards
        try:
            if self._model.gathers:
                self._keep_company(batch)
            for shard in others:
                with self._model.no_sync():
                    if shard.size:
                        self._pass(shard, batch.total, seeds.derive(seed, "step", step, shard.number), is_last=False)
                        self._shards.put_away(shard.number)
                    else:
                        self._shards.skip(shard.number, is_last=False)
            if last.size:
                self._pass(last, batch.total, seeds.derive(seed, "step", step, last.number), is_last=True)
            else:
                self._shards.skip(last.number, is_last=True)
                self._send_without_samples(batch)
        except Exception as error:
            if not isinstance(error, StepVoid | WorkerLost):
                self._model.abandon()
            raise
        if self._world.size == 1:
            self._shards.finish_alone(last.number, is_empty=not last.size)

    def _pass(self, shard: Shard, total: int, seed: int, *, is_last: bool) -> None:
        self._shards.begin()
        seeds.seed_everything(seed)
        replayed = None
        if self.recorded is not None and not self._world.events:  # Who watches wants to tell forward from backward.
            replayed = self.recorded.run(shard.batch, shard.size, total, is_last=is_last)
        loss = self._loss(shard.batch, shard.size) if replayed is None else replayed
        self._shards.end(shard.number, shard.size / total)
        self._report.add(shard.number, loss.value, loss.weight)
        if replayed is None:
            self._backward(loss, total)

    def compute(self, batch: Any, size: int, total: int) -> ShardLoss:
        """Forward and backward of a shard, and nothing else."""
        loss = self._loss(batch, size)
        self._backward(loss, total)
        return loss

    def _backward(self, loss: ShardLoss, total: int) -> None:
        factor = loss.weight * self._shards.scale / total
        weighed = loss.value if isinstance(factor, float) and factor == 1.0 else loss.value * factor
        (weighed if self._scaler is None else self._scaler.scale(weighed)).backward()

    def _loss(self, batch: Any, size: int) -> ShardLoss:
        loss = loss_of(self.loss_fn, self._model, batch, size)
        self.is_weighed = self.is_weighed or loss.is_weighed
        return loss

    def _keep_company(self, batch: GlobalBatch) -> None:
        missing = self._most - len(batch.shards) + sum(1 for shard in batch.shards[:-1] if not shard.size)
        for _ in range(missing):
            with self._model.no_sync():
                self.idle_pass(batch)
            self._model.zero_grad()

    def idle_pass(self, batch: GlobalBatch) -> None:
        """Forward and backward of some sample, which count for nothing."""
        sample = next((shard.batch for shard in batch.shards if shard.size), batch.spare)
        self._loss(sample, 1).value.backward()
        self._shards.undo()

    def _send_without_samples(self, batch: GlobalBatch) -> None:
        """The last shard is empty: send what this worker has of the others."""
        if self._model.gathers:
            with self._model.sending_nothing():
                self.idle_pass(batch)
        else:
            self._model.finish_without_pass()
