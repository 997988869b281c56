"""Forward and backward of a shard as a CUDA graph: recorded once for each kind of shard, replayed from then on.

A GPU waits for its host where a model's kernels are short: launching each costs some microseconds. A graph is launched
as one. It holds the same kernels in the same order, so the same bits come out; random numbers too, since a replay draws
from the generator as it is seeded then.

What is fixed in a recording: the shapes of the shard, the numbers in it that are not tensors, the size of the global
batch, where the parameters lie, which of them are trained, and which modules are in training. All of that is compared
before a replay, and another recording made where it differs. What else Python did in `loss_fn` is not repeated.

Tensors of a recording (inputs, loss, gradients) keep their memory; gradients are overwritten by the next replay.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data import batch as batches
from lockstep.data import tree
from lockstep.train.cuda_graph import MOST_KINDS, record
from lockstep.train.shard_loss import ShardLoss

WARM_UP = 3
"""Shards of a kind that run as they are first, so that everything lazy is done."""
MOST = 4
"""Recordings to keep: each has memory for its own activations. Shards of further kinds run as they are."""

_PLAIN = (bool, int, float, str, bytes, type(None))

Compute = Callable[[Any, int, int], ShardLoss]
"""Forward and backward of a shard on the device, given its size and that of the global batch."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The passes of one kind of shard."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    """What a shard is copied into."""
    loss: ShardLoss
    grads: list[Tensor | None]
    """Of all parameters, in their order."""


class RecordedPasses:
    """The recordings of one model on a lone worker."""

    def __init__(self, module: nn.Module, device: torch.device, compute: Compute) -> None:
        self._modules, self._params = list(module.modules()), list(module.parameters())
        self._device, self._compute = device, compute
        self._recordings: dict[Hashable, Recording] = {}
        self._seen: Counter[Hashable] = Counter()
        self._where: tuple[int, ...] = ()
        """Where the parameters lie, for those recordings."""

    def forget(self) -> None:
        """Something that recordings depend on has been replaced."""
        self._recordings.clear()
        self._seen.clear()

    def run(self, batch: Any, size: int, total: int, *, is_last: bool) -> ShardLoss | None:
        """Replay the passes of a shard; None if it is to be run as it is.

        Afterwards the parameters have its gradients: those of the recording for the last shard of a step, and copies
        for the others, whose gradients are still needed when the next one runs.
        """
        content = _kind(batch)
        if content is None:
            return None
        self._look_for_params()
        kind = (content, size, total, self._circumstances())
        recording = self._recordings.get(kind)
        if recording is None:
            if len(self._seen) == MOST_KINDS:
                self._seen.clear()
            self._seen[kind] += 1
            if self._seen[kind] <= WARM_UP or len(self._recordings) == MOST:
                return None
            recording = self._recordings[kind] = self._record(batch, size, total)
        for kept, tensor in zip(recording.inputs, _tensors(batch), strict=True):
            kept.copy_(tensor, non_blocking=True)
        recording.graph.replay()
        grads = recording.grads if is_last else _copies(recording.grads)
        for param, grad in zip(self._params, grads, strict=True):
            param.grad = grad
        return recording.loss

    def _look_for_params(self) -> None:
        """Recordings read the parameters where they were: if they lie elsewhere, none is of use."""
        where = tuple(param.data_ptr() for param in self._params)
        if where != self._where:
            self.forget()
            self._where = where

    def _circumstances(self) -> Hashable:
        trained = tuple(param.requires_grad for param in self._params)
        autocast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
        return trained, tuple(module.training for module in self._modules), autocast

    def _record(self, batch: Any, size: int, total: int) -> Recording:
        kept = _kept(batches.move(batch, self._device, non_blocking=True))
        graph, loss = record("what loss_fn and the model do", lambda: self._compute(kept, size, total))
        grads = [param.grad for param in self._params]
        return Recording(graph, _tensors(kept), replace(loss, value=loss.value.detach()), grads)


def _kind(batch: Any) -> Hashable | None:
    """What must be the same of two shards to run the same recording; None if that cannot be told."""
    kinds: list[Hashable] = []
    for leaf in tree.leaves(batch):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            kinds.append((leaf.shape, leaf.dtype))
        elif isinstance(leaf, _PLAIN):
            kinds.append((type(leaf), leaf))
        else:
            return None
    return tuple(kinds)


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in tree.leaves(batch) if isinstance(leaf, Tensor)]


def _kept(batch: Any) -> Any:
    """`batch` with copies of its tensors."""
    if isinstance(batch, Tensor):
        return batch.clone()
    held = tree.children(batch)
    return batch if held is None else tree.rebuild(batch, [_kept(child) for child in held])


def _copies(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    present = [grad for grad in grads if grad is not None]
    fresh = [torch.empty_like(grad) for grad in present]
    torch._foreach_copy_(fresh, present)
    copies = iter(fresh)
    return [None if grad is None else next(copies) for grad in grads]
