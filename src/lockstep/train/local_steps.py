"""A step of one worker by itself: its shards of the global batch, and an update from them. Nothing is sent.

run      forward and backward of each shard that has samples, weighed
scale    bring the gradients to the mean over what was counted here, and to the largest norm
commit   update, schedule
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep import seeds
from lockstep.data.shard_source import GlobalBatch, Shard
from lockstep.replica.data_parallel import DataParallel
from lockstep.train.result import StepResult
from lockstep.train.shard_loss import loss_of
from lockstep.train.strategy import Setting
from lockstep.train.update import apply


class LocalSteps:
    """Makes steps of one worker that others know nothing of."""

    def __init__(self, setting: Setting, model: DataParallel) -> None:
        self._setting, self._model = setting, model
        begin, end = setting.run
        self._row = torch.zeros(2, end - begin, dtype=torch.float64, device=setting.world.device)
        self._losses, self._weights = self._row
        """Of this worker's shards, in order."""
        self._is_weighed = False
        """Whether `loss_fn` has ever given weights of its own."""

    def step(self, batch: GlobalBatch, seed: int, number: int) -> StepResult:
        """Make step `number` from this worker's shards; if that raises, the weights are as they were.

        A worker whose shards have no samples makes no update; its schedule goes on like that of the others.
        """
        self._row.zero_()
        samples = sum(shard.size for shard in batch.shards)
        try:
            with self._setting.determinism():
                self._run(batch.shards, samples, seed, number)
        except BaseException:
            self._model.zero_grad()
            raise
        return self._commit(samples, number + 1)

    def _run(self, shards: Sequence[Shard], samples: int, seed: int, number: int) -> None:
        for place, shard in enumerate(shards):
            if shard.size:
                seeds.seed_everything(seeds.derive(seed, "step", number, shard.number))
                self._pass(place, shard, samples)

    def _pass(self, place: int, shard: Shard, samples: int) -> None:
        setting = self._setting
        loss = loss_of(setting.loss_fn, self._model, shard.batch, shard.size)
        self._losses[place] = loss.value.detach().reshape(())
        self._weights[place] = loss.weight
        self._is_weighed = self._is_weighed or loss.is_weighed
        # By the share of the samples; where losses weigh something else, the total is known after the last shard.
        factor = loss.weight / samples
        weighed = loss.value if isinstance(factor, float) and factor == 1.0 else loss.value * factor
        (weighed if setting.scaler is None else setting.scaler.scale(weighed)).backward()

    def _commit(self, samples: int, number: int) -> StepResult:
        """The step takes effect, here."""
        setting = self._setting
        weight = self._weights.sum()
        counted = torch.where(self._weights == 0, 0.0, self._losses * self._weights)
        loss = counted.sum() / torch.where(weight == 0, 1.0, weight)
        if not samples:
            return self._pause(loss, weight, number)
        if setting.scaler is not None:
            setting.scaler.unscale_(setting.optimizer)
        norm = self._scale(torch.where(weight == 0, 1.0, samples / weight))
        lr = apply(setting.optimizer, setting.scaler, setting.scheduler)
        self._model.zero_grad()
        return StepResult(number, setting.scaler is not None, loss, norm, weight, lr)

    def _pause(self, loss: Tensor, weight: Tensor, number: int) -> StepResult:
        """There is nothing to learn from in this step."""
        setting = self._setting
        lr = setting.optimizer.param_groups[0]["lr"]
        if setting.scheduler is not None:
            setting.scheduler.step()
        return StepResult(number, setting.scaler is not None, loss, torch.zeros_like(loss), weight, lr)

    def _scale(self, ratio: Tensor) -> Tensor:
        """Bring the gradients to the mean over all that was counted, and to the largest norm; returns the norm."""
        grads = _values(self._model.module)
        norm = torch.zeros_like(ratio)
        if grads:
            norm = nn.utils.get_total_norm(grads).to(ratio) * ratio
        factor, clip = ratio, self._setting.clip
        if clip is not None:
            factor = ratio * torch.clamp(clip / (norm + 1e-6), max=1.0)
        if (clip is not None or self._is_weighed) and (factor.is_cuda or factor.item() != 1.0):
            for dtype in {grad.dtype for grad in grads}:
                alike = [grad for grad in grads if grad.dtype == dtype]
                torch._foreach_mul_(alike, factor.to(dtype.to_real()) if factor.is_cuda else factor.item())
        return norm


def _values(module: nn.Module) -> list[Tensor]:
    """The gradients' numbers: of sparse ones those that are there."""
    found = []
    for param in module.parameters():
        if param.grad is not None and param.grad.is_sparse:
            param.grad = param.grad.coalesce()
            found.append(param.grad._values())
        elif param.grad is not None:
            found.append(param.grad)
    return found
