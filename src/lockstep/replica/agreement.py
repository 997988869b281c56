"""Every worker starts from the same model: the same parameters in name, shape, dtype and order, and the same values.

And, as long as nobody knows better, that every worker trains on samples of its own.
"""

import hashlib
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data import tree
from lockstep.errors import ModelMismatch
from lockstep.replica.collectives import finish
from lockstep.replica.fingerprint import fingerprints
from lockstep.replica.layout import memory_order, strides_of
from lockstep.replica.local_params import local_part
from lockstep.world import World

MESSAGE_BYTES = 64 << 20
"""Tensors are sent together up to this size: few messages, and no second model in memory."""
_MOST_HASHED = 1 << 16
"""Elements of an input that are looked at: samples that differ do so soon."""


def describe(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """What there is to agree on of parameters or buffers, in order: also how they lie in memory, as gradients will."""
    lines = []
    for name, tensor in named:
        order = [dim for dim in memory_order(strides_of(tensor)) if tensor.shape[dim] != 1]
        where = f", dimensions {order} in memory" if order != sorted(order) else ""
        lines.append(f"{name!r} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{where}")
    return lines


def require_same(world: World, mine: Sequence[str], kind: str) -> None:
    """Return if all workers describe the same; else every worker raises ModelMismatch naming the first difference."""
    digest = hashlib.sha256("\n".join(mine).encode()).hexdigest()
    if len(set(world.gather_json(digest))) == 1:
        return
    everyone = world.gather_json(mine)
    for place, row in enumerate(zip_longest(*everyone)):
        for rank, entry in enumerate(row):
            if entry != row[0]:
                raise ModelMismatch(
                    f"the models differ: {kind} number {place} is {row[0] or 'absent'} on worker 0 but "
                    f"{entry or 'absent'} on worker {rank}. Build the same model on every worker: its shape and memory "
                    "format must not depend on the rank, on the data of one worker or on the order of a set."
                )


def warn_of_differences(world: World, named: Sequence[tuple[str, Tensor]]) -> None:
    """Warn, on worker 0, where the workers have different values: worker 0's are about to be taken."""
    mine = fingerprints([tensor for _, tensor in named])
    digest = hashlib.sha256(repr(mine).encode()).hexdigest()
    if len(set(world.gather_json(digest))) == 1:
        return
    everyone = world.gather_json(mine)
    places = [place for place, row in enumerate(zip(*everyone, strict=True)) if len(set(row)) > 1]
    ranks = [str(rank) for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if world.is_main:
        warnings.warn(
            f"the models have different values: {named[places[0]][0]!r} first, in {len(places)} of {len(named)} tensors"
            f", on worker {', '.join(ranks)} others than on worker 0. Worker 0's are taken. To build them alike, call "
            "lockstep.join(seed=...) or torch.manual_seed(...) before the model is made, on every worker with the same "
            "number; to load them, load on every worker.",
            stacklevel=2,
        )


def start_equal(
    world: World,
    names: Sequence[str],
    params: Sequence[nn.Parameter],
    owners: Sequence[tuple[nn.Module, str]],
    *,
    with_buffers: bool,
) -> None:
    """Raise ModelMismatch where models differ; set weights and buffers to worker 0's, and warn if they were others."""
    assert world.group is not None
    buffers = [owner._buffers[name] for owner, name in owners] if with_buffers else []
    named = list(zip(names, params, strict=True))
    require_same(world, describe(named), "parameter")
    pairs = zip(owners, buffers, strict=False)
    known = [(name, local_part(buffer)) for (_, name), buffer in pairs if buffer is not None]
    require_same(world, describe(known), "buffer")
    there = [(name, tensor) for name, tensor in (*named, *known) if not tensor.is_meta]
    warn_of_differences(world, there)
    with torch.no_grad():
        broadcast([tensor for _, tensor in there], world, 0, world.group)


def broadcast(tensors: Sequence[Tensor], world: World, source: int, group: dist.ProcessGroup) -> None:
    """Give `tensors` the values they have on worker `source`, in few messages."""
    for batch in in_messages(tensors):
        real = [torch.view_as_real(t) if t.is_complex() else t for t in batch]
        flat = torch.cat([t.detach().reshape(-1) for t in real])
        doing = "receiving the first weights and buffers" if source == 0 else "receiving weights"
        finish(partial(dist.broadcast, flat, group=group, group_src=source, async_op=True), world, flat.device, doing)
        if world.rank != source:
            for tensor, piece in zip(real, flat.split([t.numel() for t in real]), strict=True):
                tensor.detach().copy_(piece.view(tensor.shape))


def in_messages(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors of one device and dtype together, up to MESSAGE_BYTES."""
    batches: list[list[Tensor]] = []
    open_batches: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        kind = (tensor.device, tensor.dtype)
        size = tensor.numel() * tensor.element_size()
        if kind not in open_batches or sizes[kind] + size > MESSAGE_BYTES:
            open_batches[kind] = []
            batches.append(open_batches[kind])
            sizes[kind] = 0
        open_batches[kind].append(tensor)
        sizes[kind] += size
    return batches


class SameInputs:
    """Warns once where all workers train on the same samples, as they do if a loader is not sharded.

    In the first step the workers compare digests of what their models were given, and if these are the same, in the
    second step too: so the first steps have one small message more, and the others none.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._digest: str | None = None
        self._num_same = 0

    def see(self, inputs: Any) -> None:
        """A model is about to be given `inputs`; those of sharded loaders are known to differ."""
        tensors = [leaf for leaf in tree.leaves(inputs) if type(leaf) is Tensor and leaf.layout is torch.strided]
        is_captured = any(each.is_cuda for each in tensors) and torch.cuda.is_current_stream_capturing()
        if self._world.hand_outs.have_begun or is_captured:
            self._digest = None
            return
        digest = hashlib.blake2b(digest_size=8)
        for each in tensors:
            data = each.detach().cpu().contiguous().reshape(-1)[:_MOST_HASHED]
            digest.update(repr(each.shape).encode() + data.view(torch.uint8).numpy().tobytes())
        self._digest = digest.hexdigest() if any(each.numel() for each in tensors) else None

    def compare(self) -> bool:
        """Called at the end of a step on every worker; returns whether it is to be called again."""
        digests = self._world.gather_json(self._digest)
        if None in digests or len(set(digests)) > 1:
            return False
        self._num_same += 1
        if self._num_same == 2 and self._world.is_main:
            warnings.warn(
                f"all {self._world.size} workers train on the same samples: what their models were given in the first "
                f"two steps was the same, so {self._world.size} workers do the work of one. Shard the loader: "
                "loader = lockstep.shard(loader).",
                stacklevel=2,
            )
        return self._num_same < 2
