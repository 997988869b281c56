"""What a trainer can be made of."""

import torch
from torch import nn

from lockstep.errors import UsageError
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.world import World


def require(
    module: object, optimizer: object, loss_fn: object, shards: object, clip: object, threads: object, world: World
) -> None:
    """Raise UsageError for arguments that cannot be right."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"Trainer takes a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if not callable(loss_fn):
        raise UsageError(f"loss_fn must be a function of (model, shard), got {type(loss_fn).__name__}.")
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
        raise UsageError(f"shards={shards!r}: a global batch is cut into one or more shards.")
    if shards < world.size:
        raise UsageError(
            f"shards={shards} on {world.size} workers: each worker needs at least one. Start at most {shards} workers, "
            "or use more shards from the beginning of the run."
        )
    if clip is not None and (not isinstance(clip, int | float) or not clip > 0):
        raise UsageError(f"clip={clip!r}: the largest norm of the gradient, above 0, or None.")
    if not isinstance(threads, int) or threads < 1:
        raise UsageError(f"threads={threads!r}: a worker computes with at least one.")
    if isinstance(module, nn.Module):
        for name, part in module.named_modules():
            if isinstance(part, SyncBatchNorm | nn.SyncBatchNorm):
                raise UsageError(
                    f"{name!r} is a {type(part).__name__}, whose forward pass needs all workers at once. Trainer uses "
                    "the statistics of each shard: give it the model as it was before conversion."
                )


def require_graph(cuda_graph: object, strategy: object) -> None:
    """Raise UsageError for a step that cannot be recorded."""
    if not isinstance(cuda_graph, bool):
        raise UsageError(f"cuda_graph={cuda_graph!r}: whether to record steps as CUDA graphs, True or False.")
    if cuda_graph and strategy is not None:
        raise UsageError(
            f"cuda_graph=True with strategy={strategy!r}: recorded are steps that all workers make together. Leave one "
            "of the two out."
        )
