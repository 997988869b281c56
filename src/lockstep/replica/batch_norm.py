"""Batch normalisation over the global batch, on CPU and GPU.

Forward: each worker computes count, mean and squared deviation of its part; all are gathered and combined by Chan's
formula, which loses no digits where sums of squares would. Backward: the two per-channel sums that the formula
needs are added over the workers *by weight*, since each worker's gradient will be multiplied by its weight only
later, on its way into the bucket. With that, uneven parts give the gradients of plain batch norm on the whole batch.
A stand-in takes part with a count of zero.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import UsageError
from lockstep.replica.collectives import finish
from lockstep.weight import Weight, in_force
from lockstep.world import World, join

DOING = "normalising a batch over all workers"


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation whose statistics are those of the global batch; takes BatchNorm1d, 2d and 3d's place.

    `SyncBatchNorm.convert(net)` puts it in place of every batch norm of a network. On one worker, and in evaluation,
    it is plain batch norm. All workers must call it in the same order.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    @classmethod
    def convert(cls, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> nn.Module:
        """`module` with every batch norm in it replaced; parameters and buffers stay the same objects.

        What a subclass of torch's batch norms adds stays, unless it has a forward pass of its own (as timm's
        BatchNormAct2d, which applies an activation): that raises UsageError before anything is replaced.
        """
        plain = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
        for name, part in module.named_modules():
            normalises_only = type(part).forward in plain and "forward" not in vars(part)
            if isinstance(part, _BatchNorm) and not isinstance(part, cls) and not normalises_only:
                raise UsageError(
                    f"{name or 'the module'!r} is a {type(part).__qualname__}, a batch norm with a forward pass of its "
                    "own, which SyncBatchNorm would drop. Build the model with torch.nn.BatchNorm2d and what that adds "
                    "after it, or let the class inherit from lockstep.SyncBatchNorm and call super().forward."
                )
        return cls._converted(module, process_group)

    @classmethod
    def _converted(cls, module: nn.Module, process_group: dist.ProcessGroup | None) -> nn.Module:
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            return cls._in_place_of(module, process_group)
        for name, child in module.named_children():
            setattr(module, name, cls._converted(child, process_group))
        return module

    convert_sync_batchnorm = convert
    """torch's name for it."""

    @classmethod
    def _in_place_of(cls, old: _BatchNorm, group: dist.ProcessGroup | None) -> "SyncBatchNorm":
        if not type(old).__module__.startswith("torch."):
            kind: Any = type(f"Sync{type(old).__name__}", (cls, type(old)), {})
            new = kind.__new__(kind)
            new.__dict__.update(old.__dict__, process_group=group)
            return cast(SyncBatchNorm, new)
        new = cls(
            old.num_features,
            old.eps,
            old.momentum,
            False,
            old.track_running_stats,
            process_group=group,
            device="meta",
        )
        new.affine = old.affine
        new._parameters.update(old._parameters)
        new._buffers.update(old._buffers)
        new.train(old.training)
        return new

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise UsageError(f"SyncBatchNorm needs an input of two or more dimensions, got {input.dim()}.")

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input` of shape (N, C, ...)."""
        self._check_input_dim(input)
        world = join() if self.training else None  # One worker may evaluate alone.
        if world is not None and self.process_group is not None:
            world = world.within(self.process_group)
        if world is None or world.size == 1:
            return super().forward(input)
        momentum = self._advance()
        output, mean, var, total = _Normalize.apply(input, self.weight, self.bias, self.eps, world)
        if self.training and self.track_running_stats and self.running_mean is not None:
            self._track(mean, var, total, momentum)
        return cast(Tensor, output)

    def _advance(self) -> float:
        """Count the batch; returns how much it weighs in the running statistics."""
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return self.momentum or 0.0

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, total: Tensor, momentum: float) -> None:
        assert self.running_mean is not None and self.running_var is not None
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        unbiased = var * (total / (total - 1).clamp(min=1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalize(torch.autograd.Function):
    """Batch norm with statistics over all workers; also returns them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, world: World
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        batch_weight = world.hand_outs.in_use
        is_counted = batch_weight is None or not batch_weight.is_stand_in
        mean, var, total = _global_statistics(x, world, is_counted=is_counted)
        ctx.save_for_backward(x, weight, mean, var, total)
        ctx.eps = eps
        ctx.world = world
        ctx.weight_at_forward = batch_weight
        # Parameters in the statistics' dtype: that is the mix which torch's kernels know for half inputs.
        weight, bias = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        output = torch.empty_like(x)
        if x.numel():  # torch's kernels crash on nothing.
            output = torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, torch.backends.cudnn.enabled)
        ctx.mark_non_differentiable(mean, var, total)
        return output, mean, var, total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, total = ctx.saved_tensors
        world: World = ctx.world
        param_dtype = weight.dtype if weight is not None else x.dtype
        weight = None if weight is None else weight.to(mean.dtype)
        grad_x, grad_weight, grad_bias = torch.empty_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        if x.numel():
            # What plain batch norm gives for constant statistics, and the sums of dy * x_hat and dy, in one pass.
            grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
                grad_output.contiguous(), x, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
            )
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_bias.to(mean.dtype), grad_weight.to(mean.dtype)])
            sum_dy, sum_dy_xhat = _sum_by_weight(
                sums, world, in_force(world.accumulation.in_force, ctx.weight_at_forward)
            )
            inv_std = torch.rsqrt(var + ctx.eps)
            slope = inv_std if weight is None else weight * inv_std
            deviation = x - _along_channels(mean.to(x.dtype), x)
            grad_x.addcmul_(deviation, _along_channels((-slope * inv_std * sum_dy_xhat / total).to(x.dtype), x))
            grad_x.sub_(_along_channels((slope * sum_dy / total).to(x.dtype), x))
        has_weight, has_bias = ctx.needs_input_grad[1:3]
        return (
            grad_x,
            grad_weight.to(param_dtype) if has_weight else None,
            grad_bias.to(param_dtype) if has_bias else None,
            None,
            None,
        )


def _along_channels(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(1, -1, *([1] * (x.dim() - 2)))


def _global_statistics(x: Tensor, world: World, *, is_counted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, biased variance and count per channel over all workers, the same bits on each of them.

    is_counted: False on a worker whose batch is a stand-in, which takes part with a count of zero.
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    channels = x.shape[1]
    count = x.numel() // channels if channels and is_counted else 0
    mine = torch.zeros(2 * channels + 1, dtype=dtype, device=x.device)
    if count:
        dims = [d for d in range(x.dim()) if d != 1]
        var, mean = torch.var_mean(x.to(dtype), dim=dims, correction=0)
        mine[:channels], mine[channels:-1], mine[-1] = mean, var * count, count
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    finish(partial(dist.all_gather, everyone, mine, group=world.group, async_op=True), world, mine.device, DOING)
    rows = torch.stack(everyone)
    means, deviations, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = counts.sum()
    if x.device.type == "cpu" and total < 2:
        raise UsageError(
            f"SyncBatchNorm got {int(total)} value(s) per channel over all workers in training; it needs two or more. "
            "Use a larger batch, or drop the last one (drop_last=True)."
        )
    mean = (means * counts).sum(0) / total
    var = (deviations.sum(0) + ((means - mean).square() * counts).sum(0)) / total
    return mean, var, total


def _sum_by_weight(sums: Tensor, world: World, weight: Weight | None) -> Tensor:
    """The workers' sums, each times its weight, in units of this worker's own weight."""
    factor = 1.0 if weight is None else weight.value
    weighted = torch.zeros_like(sums) if isinstance(factor, float | int) and not factor else sums * factor
    finish(partial(dist.all_reduce, weighted, group=world.group, async_op=True), world, weighted.device, DOING)
    if isinstance(factor, Tensor):
        return weighted / torch.where(factor == 0, torch.ones_like(factor), factor)
    return weighted / factor if factor else weighted
