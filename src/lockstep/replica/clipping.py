"""The norm of the gradients of a whole model, whose parts lie on many workers: each element is counted once."""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.replica.engine import Engine
from lockstep.replica.model_mesh import all_reduce
from lockstep.world import World


def total_norm(engines: Sequence[Engine], norm_type: float, stages: Sequence[World], *, strict: bool) -> Tensor:
    """The norm of what several wrapped models make together, of which further stages lie in other worlds.

    Every worker that has a part of them calls this. strict: raise where the norm is not finite.
    """
    device = engines[0].device
    held = [grad for engine in engines for grad in engine.counted_grads()]
    mine = nn.utils.get_total_norm(held, norm_type) if held else torch.zeros((), device=device)
    doing = "computing the norm of the gradients"
    worlds = [*_worlds(engines[0]), *stages]
    is_largest = math.isinf(norm_type)
    shared = mine.double() if is_largest else mine.double().pow(norm_type)
    for world in worlds:
        all_reduce(shared, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, world, doing)
    total = (shared if is_largest else shared.pow(1 / norm_type)).to(mine.dtype)
    if strict and not torch.isfinite(total):
        raise UsageError(f"the gradients' norm is {total.item()}; pass error_if_nonfinite=False to scale anyway.")
    return total


def _worlds(engine: Engine) -> list[World]:
    """The worlds over each of which what is counted on a worker adds up to the whole model's."""
    split = [engine.split_world] if engine.split is not None else []
    return split + ([engine.mesh.world] if engine.mesh is not None else [])


def require_all_stages(engines: Sequence[Engine], here: Sequence[Engine], *, has_stages: bool) -> None:
    """Raise UsageError where the norm of `engines` would be that of a part of the model.

    here: the engines of all wrapped models of this worker.
    """
    if any(engine.is_stage for engine in engines) and not has_stages:
        raise UsageError(
            "this model's gradients were sent by sync_gradients(), as those of a stage of a pipeline are, so they are "
            "not all there are. Say over which dimension of the mesh the other stages lie: "
            "model.clip_grad_norm_(..., stages=mesh['pp'])."
        )
    if has_stages and any(engine.is_stage and engine not in engines for engine in here):
        raise UsageError(
            "this worker has several stages of a pipeline, which have one norm. Clip them together: "
            "first.clip_grad_norm_(..., stages=mesh['pp'], also=[second])."
        )
    places = [[world.peers.all for world in _worlds(engine)] for engine in engines]
    if any(place != places[0] for place in places):
        raise UsageError(
            "models that are clipped together must be split over the same workers: give all of them the same "
            "device_mesh, all or none of them zero=0, and cut all of them over the same mesh."
        )
