"""Sparse gradients (embeddings with `sparse=True`): gathered as they are, since few rows are cheaper than a table.

Every worker's rows go to every worker, which adds them up in order of rank: the same bits everywhere. The dense
table is never built. Rows are exchanged at the end of the backward pass, after one message that says how many.
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.replica.collectives import finish
from lockstep.replica.layout import ALIGNMENT_BYTES
from lockstep.weight import Factor
from lockstep.world import World

Rows = tuple[Tensor, Tensor]
"""Numbers of rows of a table, and what is in them."""


def exchange(param: Tensor, factor: Factor, world: World, group: dist.ProcessGroup) -> Tensor:
    """The weighted sum over all workers of `param.grad`, sparse; called by all workers for the same parameter."""
    rows = torch.zeros(0, dtype=torch.int64, device=param.device)
    values = param.detach().new_zeros(0, *param.shape[1:])
    if param.grad is not None and not (isinstance(factor, float) and factor == 0.0):
        grad = param.grad.detach()
        mine = (grad if grad.is_sparse else grad.to_sparse(1)).coalesce()
        rows, values = mine.indices()[0], mine.values() * factor
    gathered = [tables[0] for tables in gather_rows([(rows, values)], world, group, "exchanging sparse gradients")]
    indices = torch.cat([theirs for theirs, _ in gathered]).unsqueeze(0)
    everything = torch.cat([theirs for _, theirs in gathered])
    return torch.sparse_coo_tensor(indices, everything, param.shape, check_invariants=False).coalesce()


def gather_rows(tables: Sequence[Rows], world: World, group: dist.ProcessGroup, doing: str) -> list[list[Rows]]:
    """Every worker's rows of some tables, by worker and table: all in one message, padded to the longest."""
    device = tables[0][0].device
    counts = torch.zeros(world.size, len(tables), dtype=torch.int64, device=device)
    counts[world.rank] = torch.tensor([len(rows) for rows, _ in tables])
    finish(partial(dist.all_reduce, counts, group=group, async_op=True), world, device, doing)
    shapes = [values.shape[1:] for _, values in tables]
    widths = [shape.numel() * values.itemsize for shape, (_, values) in zip(shapes, tables, strict=True)]
    cuts = [_cut(per_table, widths) for per_table in counts.tolist()]
    longest = max(length for _, length in cuts)
    messages = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in cuts]
    own = torch.zeros(longest, dtype=torch.uint8, device=device)
    for (of_rows, of_values), (rows, values) in zip(cuts[world.rank][0], tables, strict=True):
        own[of_rows].view(torch.int64).copy_(rows)
        own[of_values].view(values.dtype).copy_(values.reshape(-1))
    if longest:
        finish(partial(dist.all_gather, messages, own, group=group, async_op=True), world, device, doing)
    return [
        [
            (message[of_rows].view(torch.int64), message[of_values].view(values.dtype).view(-1, *shape))
            for (of_rows, of_values), (_, values), shape in zip(cut, tables, shapes, strict=True)
        ]
        for message, (cut, _) in zip(messages, cuts, strict=True)
    ]


def _cut(counts: Sequence[int], widths: Sequence[int]) -> tuple[list[tuple[slice, slice]], int]:
    """Where each table's rows and values lie in a message, each aligned; and how long it is."""
    cuts, end = [], 0
    for count, width in zip(counts, widths, strict=True):
        begin, middle = end, _aligned(end + count * 8)
        end = _aligned(middle + count * width)
        cuts.append((slice(begin, begin + count * 8), slice(middle, middle + count * width)))
    return cuts, end


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
