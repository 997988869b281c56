"""Steps that all workers make together, from one global batch.

Everything is added along one tree over the shards, so that the result has the same bits on any number of workers;
where a wire encodes the gradients, they are added as it says instead.

    run       each worker its shards, forward and backward; the last one's backward pass sends
    report    losses, weights and norms of all, in one small message
    commit    clip, update, schedule: the one place where the step takes effect
    check     now and then, that the replicas are still equal
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lockstep.data.shard_source import GlobalBatch
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.integrity import Integrity
from lockstep.replica.shards import Shards
from lockstep.replica.unit_norms import Piece
from lockstep.replica.units import Units
from lockstep.train.feed import Feed, Loading
from lockstep.train.passes import Passes
from lockstep.train.recorded_step import RecordedStep
from lockstep.train.recorded_update import Rates, can_be_recorded
from lockstep.train.report import Report
from lockstep.train.result import StepResult
from lockstep.train.strategy import Setting
from lockstep.train.unordered import Unordered
from lockstep.train.update import move, rate_of


class Synchronous:
    """Makes the steps of one worker."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        ordered = Shards(setting.tree, setting.world.rank) if setting.wire is None else None
        self._shards = Unordered(setting.tree, setting.world) if ordered is None else ordered
        self.model = DataParallel(
            setting.module,
            optimizer=setting.optimizer,
            zero=setting.zero,
            blocks=setting.blocks,
            bucket_cap_mb=setting.bucket_cap_mb,
            wire=setting.wire,
            shards=ordered,
        )
        self._units = Units(list(setting.module.parameters()), setting.world.rank, setting.world.size)
        self._report = Report(setting.world, setting.tree.shards, self._units)
        self.passes = Passes(self.model, self._shards, setting.loss_fn, self._report, setting.scaler)
        self._integrity = Integrity(
            self.model, setting.optimizer, every=setting.check_every, policy=setting.on_difference
        )
        self._rates: Rates | None = None
        self._recorded: RecordedStep | None = None
        if setting.cuda_graph and setting.world.device.type == "cuda":
            self._record()
        if setting.scaler is not None:
            self.model.expect_overflows()

    def _record(self) -> None:
        """On several workers gradients leave during the passes, so these run as they are; bits are the same."""
        setting = self._setting
        if can_be_recorded(setting.optimizer):
            self._rates = Rates(setting.optimizer, setting.world.device)
        if setting.world.size == 1 and setting.wire is None:
            self._recorded = RecordedStep(setting, self.passes.compute, self._rates)
            self.passes.recorded = self._recorded.passes

    def feed(self, dataset: Any, loading: Loading, seed: int) -> Feed:
        """See Stepper."""
        return self._setting.feed(dataset, loading, seed)

    def step(self, batch: GlobalBatch, seed: int, number: int) -> StepResult:
        """See Stepper; a worker whose shard fails raises its error, the others StepVoid."""
        with self._recorded.on_stream() if self._recorded is not None else contextlib.nullcontext():
            self._report.begin()
            try:
                with self._setting.determinism():
                    self.passes.run(batch, seed, number)
            except BaseException:  # The step has not happened.
                self.model.zero_grad()
                self._shards.reset()
                raise
            return self._commit(batch, number + 1)

    def _commit(self, batch: GlobalBatch, number: int) -> StepResult:
        """The step takes effect."""
        setting = self._setting
        if setting.scaler is not None:
            setting.scaler.unscale_(setting.optimizer)
        lr = rate_of(setting.optimizer)
        loss, weight, norm = self._update(batch.total).unbind()
        if setting.scheduler is not None:
            setting.scheduler.step()
        self.model.zero_grad()
        self._shards.reset()
        return StepResult(number, setting.scaler is not None, loss, norm, weight, lr)

    def _update(self, total: int) -> Tensor:
        """Update the weights; returns loss, weight and norm."""
        body = functools.partial(self._clip_and_move, total)
        if self._recorded is not None and self._recorded.update is not None:
            return self._recorded.update.run(body, (total, self.passes.is_weighed), self._prepare)
        if self._rates is None:
            return body()
        self._rates.refresh()
        with self._rates.in_tensors():
            return body()

    def _prepare(self) -> None:
        self._report.prepare(self._pieces())

    def _clip_and_move(self, total: int) -> Tensor:
        loss, weight, norm = self._report.end(self._pieces())
        # Losses were weighed by their share of the samples; where they weigh something else, that is the total.
        ratio = torch.where(weight == 0, 1.0, total / weight)
        norm = norm * ratio
        self._scale(ratio, norm)
        with self._rescaling():
            move(self._setting.optimizer, self._setting.scaler)
        return torch.stack([loss, weight, norm])

    def _pieces(self) -> list[Piece]:
        """The gradients whose norms this worker computes."""
        parts = self.model.parts
        return self._units.of_parts(parts) if parts is not None else self._units.of_whole()

    @contextlib.contextmanager
    def _rescaling(self) -> Iterator[None]:
        """A block in which the loss scale may change: what a wire remembers of gradients then changes with it."""
        scaler, coded = self._setting.scaler, self.model.coded
        if scaler is None or coded is None:
            yield
            return
        before = scaler._scale.clone()  # Not get_scale(), which would wait for the GPU.
        yield
        change = before / scaler._scale
        if change.is_cuda or change.item() != 1.0:
            coded.rescale(change if change.is_cuda else change.item())

    def _scale(self, ratio: Tensor, norm: Tensor) -> None:
        """Bring the gradients to the mean over all that was counted, and to the largest norm."""
        factor, clip = ratio, self._setting.clip
        if clip is not None:
            factor = ratio * torch.clamp(clip / (norm + 1e-6), max=1.0)
        elif not self.passes.is_weighed:
            return
        if factor.device.type == "cpu" and factor.item() == 1.0:
            return
        parts = self.model.parts
        params = [own for _, own, _ in parts] if parts is not None else list(self.model.parameters())
        grads = [param.grad for param in params if param.grad is not None]
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for grad in grads:
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for dtype, alike in by_dtype.items():
            torch._foreach_mul_(alike, factor.to(dtype.to_real()) if factor.is_cuda else factor.item())

    def check(self, steps: int) -> None:
        """See Stepper."""
        self._integrity.check_if_due(steps)

    def before_save(self) -> None:
        """Nothing: replicas are equal after every step."""

    def after_load(self) -> None:
        """See Stepper."""
        self._shards.see_buffers()
        if self._recorded is not None:
            self._recorded.forget()

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing was kept."""
