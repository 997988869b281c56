"""Sparse gradients (embeddings with `sparse=True`): gathered as they are, since few rows are cheaper than a table.

Every worker's rows go to every worker, which adds them up in order of rank: the same bits everywhere. The dense
table is never built. Rows are exchanged at the end of the backward pass, after one message that says how many.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.replica.bucket import Factor
from lockstep.world import World


def exchange(param: Tensor, factor: Factor, world: World, group: dist.ProcessGroup) -> Tensor:
    """The weighted sum over all workers of `param.grad`, sparse; called by all workers for the same parameter."""
    mine = _own_rows(param)
    indices, values = mine.indices(), mine.values() * factor
    if isinstance(factor, float) and factor == 0.0:
        indices, values = indices[:, :0], values[:0]
    counts = torch.zeros(world.size, dtype=torch.int64, device=indices.device)
    counts[world.rank] = indices.shape[1]
    _finish(dist.all_reduce(counts, group=group, async_op=True), counts, world)
    per_worker = counts.tolist()
    all_indices = _gather(indices.t().contiguous(), per_worker, world, group)
    all_values = _gather(values.contiguous(), per_worker, world, group)
    return torch.sparse_coo_tensor(all_indices.t(), all_values, param.shape, check_invariants=False).coalesce()


def _own_rows(param: Tensor) -> Tensor:
    grad = param.grad
    if grad is None:
        rows = torch.zeros(0, *param.shape[1:], dtype=param.dtype, device=param.device)
        nowhere = torch.zeros(1, 0, dtype=torch.int64, device=param.device)
        return torch.sparse_coo_tensor(nowhere, rows, param.shape, check_invariants=False).coalesce()
    sparse = grad if grad.is_sparse else grad.detach().to_sparse(1)
    return sparse.detach().coalesce()


def _gather(rows: Tensor, per_worker: list[int], world: World, group: dist.ProcessGroup) -> Tensor:
    """Every worker's rows, one after the other; they travel padded to the longest part."""
    longest = max(per_worker)
    padded = rows.new_zeros(longest, *rows.shape[1:])
    padded[: rows.shape[0]] = rows
    parts = [torch.empty_like(padded) for _ in per_worker]
    _finish(dist.all_gather(parts, padded, group=group, async_op=True), padded, world)
    return torch.cat([part[:count] for part, count in zip(parts, per_worker, strict=True)])


def _finish(work: dist.Work | None, tensor: Tensor, world: World) -> None:
    if tensor.device.type == "cpu":
        world.wait(work, "exchanging sparse gradients")
    elif work is not None:
        work.wait()
