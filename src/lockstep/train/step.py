"""Steps that all workers make together, from one global batch.

Everything is added along one tree over the shards, so that the result has the same bits on any number of workers; with
`wire.Half` all gradients and sums on that tree are rounded to 16 bits, wherever they come about. Where another wire
encodes the gradients, they are added as it says instead: those of a worker's shards add up in `param.grad`, and buffers
are those of the last shard that ran.

    run       each worker its shards, forward and backward; the last one's backward pass sends
    report    losses, weights and norms of all, in one small message
    commit    clip, update, schedule: the one place where the step takes effect
    check     now and then, that the replicas are still equal
"""

import contextlib
import functools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep import faults, seeds, torch_private
from lockstep.data import batch as batches
from lockstep.data.source import GlobalBatch, Shard
from lockstep.errors import StepVoid, WorkerLost
from lockstep.replica.data_parallel import DataParallel
from lockstep.train.cuda_graph import DeviceRates, GraphedStep, can_be_recorded
from lockstep.train.integrity import Integrity
from lockstep.train.recheck import Recheck
from lockstep.train.shards import Shards
from lockstep.train.step_report import StepReport
from lockstep.train.strategy import (
    ShardLoss,
    Stepper,
    StepResult,
    TrainerOptions,
    scale_grads,
    step_optimizer,
)


class Synchronous(Stepper):
    """Makes the steps of one worker."""

    def __init__(self, options: TrainerOptions, *, starts_equal: bool = False) -> None:
        """`starts_equal`: all workers have the same weights and buffers already."""
        world = options.world
        self._shards = Shards(options.tree, world, options.module, options.rounds_to) if options.keeps_bits else None
        model = DataParallel(
            options.module,
            init_sync=not starts_equal,
            optimizer=options.optimizer,
            zero=options.zero,
            blocks=options.blocks,
            bucket_cap_mb=options.bucket_cap_mb,
            wire=None if options.keeps_bits else options.wire,
            shards=self._shards,
            keeps_units=True,
        )
        super().__init__(options, model)
        model._engine.drive()
        if options.scaler is not None:
            model._engine.expect_overflows()
        # Without shards DataParallel takes the mean over the workers, and a sum is meant.
        self._loss_scale = 1.0 if options.keeps_bits else float(world.size)
        self._took_s: list[float] = []
        """How long the forward pass of a shard of mean size took, for each of this step."""
        self._is_weighted: bool | None = None
        """Whether `loss_fn` gives weights of its own in this step: for all shards or for none, see StepReport. Not
        known where no shard here has samples."""
        self._params = list(options.module.parameters())
        """Walking through the modules for them takes as long as a hundred kernels."""
        self._report = StepReport(world, options.tree.shards, self._params, options.wants_change)
        self._integrity = Integrity(model, options.optimizer, every=options.check_every, policy=options.on_difference)
        self._recheck = Recheck(options, model, self._shards) if self._shards is not None else None
        self._rates: DeviceRates | None = None
        self._graphed: GraphedStep | None = None
        if options.cuda_graph and world.device.type == "cuda":
            if can_be_recorded(options.optimizer):
                self._rates = DeviceRates(options.optimizer, world.device)
            # On several workers gradients leave during the passes, so these run as they are; bits are the same.
            if world.size == 1 and options.keeps_bits:
                self._graphed = GraphedStep(options, self._compute, self._rates)

    def step(self, batch: GlobalBatch, seed: int, number: int) -> StepResult:
        """See Stepper; a worker whose shard fails raises its error, the others StepVoid."""
        with self._graphed.on_stream() if self._graphed is not None else contextlib.nullcontext():
            self._report.begin(batch.total)
            self._took_s.clear()
            self._is_weighted = None
            try:
                if self._recheck is not None:
                    self._recheck.check_if_due(batch, seed, number)
                with self._passes():
                    faults.at("compute", number)
                    for shard in batch.shards:
                        is_last = shard is batch.shards[-1]
                        with contextlib.nullcontext() if is_last else self.model.no_sync():
                            if shard.size:
                                seeds.seed_everything(seeds.derive(seed, "step", number, shard.number))
                                self._run_shard(shard, batch.total, is_last=is_last)
                            else:
                                self._skip_shard(shard, is_last=is_last)
                return self._commit(batch.total, number + 1)
            except BaseException:  # The step has not happened.
                self._reset()
                if self._options.scaler is not None:
                    torch_private.forget_unscaling(self._options.scaler, self._options.optimizer)
                raise

    @contextlib.contextmanager
    def _passes(self) -> Iterator[None]:
        """A block of deterministic passes; if one fails here, the step is void on all workers."""
        try:
            with self._options.determinism():
                yield
        except Exception as error:
            if not isinstance(error, StepVoid | WorkerLost):
                self.model._engine.abandon()
            raise

    def _run_shard(self, shard: Shard, total: int, *, is_last: bool) -> None:
        """Forward and backward of one shard; called on the worker that has it."""
        options, shards = self._options, self._shards
        if shards is not None:
            shards.begin()
        replayed = self._replay(shard, total, is_last=is_last)
        if replayed is not None:
            loss = replayed
        else:
            with options.world.events.copying():
                moved = batches.move(shard.batch, options.world.device, non_blocking=True)
            begun = time.perf_counter()
            loss = ShardLoss.of(options.loss_fn(self.model, moved), shard.size)
            self._took_s.append((time.perf_counter() - begun) / shard.size * total / options.tree.shards)
        self._is_weighted = loss.is_weighted
        self._report.add(shard.number, loss)
        if shards is not None:
            shards.end_forward(shard.number, shard.size / total)
        if replayed is None:
            loss.backward(total, options.scaler, self._loss_scale)
        if shards is not None:
            shards.end_backward(shard.number)

    def _skip_shard(self, shard: Shard, *, is_last: bool) -> None:
        """A shard without samples has no passes; others may wait for what the last one would have sent."""
        if self._shards is not None:
            self._shards.end_forward(shard.number, 0.0)
        if is_last:
            self.model._engine.finish_without_pass()
        if self._shards is not None:
            self._shards.end_backward(shard.number)

    def _replay(self, shard: Shard, total: int, *, is_last: bool) -> ShardLoss | None:
        """Forward and backward as a CUDA graph, if it has been recorded; None to run them."""
        if self._graphed is None or self._options.world.events:  # Who watches wants to tell forward from backward.
            return None
        return self._graphed.passes.run(shard.batch, shard.size, total, is_last=is_last)

    def _compute(self, batch: Any, size: int, total: int) -> ShardLoss:
        """Forward and backward of a shard on the device, and nothing else: what is recorded."""
        loss = ShardLoss.of(self._options.loss_fn(self.model, batch), size)
        loss.backward(total, self._options.scaler)
        return loss

    def _commit(self, total: int, number: int) -> StepResult:
        """The step takes effect."""
        options = self._options
        faults.at("vote", number - 1)
        if options.scaler is not None:
            options.scaler.unscale_(options.optimizer)
        lr = options.lr
        if self._took_s:
            self._report.took(min(self._took_s))  # The others were disturbed.
        self._report.write_known()
        loss, weight, norm = self._update(total).unbind()
        if self._shards is not None and self._graphed is not None:
            self._shards.commit()
        faults.at("commit", number - 1)
        self._report.look_later()
        if options.scheduler is not None:
            options.scheduler.step()
        self._reset()
        return StepResult(number, options.scaler is not None, loss, norm, weight, lr)

    def _reset(self) -> None:
        for param in self._params:
            param.grad = None
        for part in self.model._engine.parts or ():
            part.own.grad = None
        if self._shards is not None:
            self._shards.reset()

    def _update(self, total: int) -> Tensor:
        """Update the weights; returns loss, weight and norm."""
        body = functools.partial(self._clip_and_update, total)
        if self._graphed is not None and self._graphed.update is not None:
            prepare = functools.partial(self._report.write_norms, self.model._engine.parts)
            return self._graphed.update.run(body, (total, self._is_weighted), prepare)
        if self._rates is None:
            return body()
        self._rates.refresh()
        with self._rates.in_tensors():
            return body()

    def _clip_and_update(self, total: int) -> Tensor:
        options, parts = self._options, self.model._engine.parts
        loss, weight, norm = self._report.end(parts)
        ratio = None
        if self._is_weighted is not False:
            # Losses were weighted by their share of the samples; where they weigh something else, that is the total.
            ratio = torch.where(weight == 0, 1.0, total / weight)
            norm = norm * ratio
        if self._shards is not None and self._graphed is None:  # What is recorded can only copy from fixed places.
            self._shards.commit()  # Before the update, at whose end others look at the whole.
        if ratio is not None or options.clip is not None:
            params = [part.own for part in parts] if parts is not None else self._params
            scale_grads([param.grad for param in params if param.grad is not None], ratio, norm, options.clip)
        self._step_optimizer()
        return torch.stack([loss, weight, norm])

    def _step_optimizer(self) -> None:
        scaler, wire = self._options.scaler, self.model._engine.wire
        if scaler is None or wire is None:
            step_optimizer(self._options.optimizer, scaler)
            return
        before = torch_private.loss_scale(scaler).clone()
        step_optimizer(self._options.optimizer, scaler)
        change = before / torch_private.loss_scale(scaler)
        if change.is_cuda or change.item() != 1.0:  # What a wire remembers of gradients changes with their scale.
            wire.rescale(change if change.is_cuda else change.item())

    @property
    def shard_times(self) -> list[float]:
        """See Stepper."""
        return self._report.times

    @property
    def is_change_due(self) -> bool:
        """See Stepper."""
        return self._report.is_change_due

    def check(self, steps: int) -> None:
        """See Stepper."""
        self._integrity.check_if_due(steps)

    def after_load(self) -> None:
        """See Stepper."""
        if self._shards is not None:
            self._shards.buffers.see()
        if self._graphed is not None:
            self._graphed.forget()
