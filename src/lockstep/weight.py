"""What a worker's loss was averaged over, so that gradients are combined by what was counted.

The weight of a batch travels with it: the sharded loader hands a batch out with its weight, the wrapped model finds the
weight by its inputs, and the backward pass has it from the forward pass. `lockstep.backward(loss, weight=...)`
overrules it. Only the threads that read loaders and the training's own use this; each call leaves it whole.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lockstep.errors import UsageError

Factor = float | Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """The weight of one worker's part of a global batch (samples, tokens, ...)."""

    value: float | Tensor
    """What this worker's gradients are multiplied by. A tensor on a GPU is never read on the host."""
    total: float | None = None
    """The sum of `value` over all workers where it is known without asking: by sharded loaders. Else None."""
    counted: float | Tensor | None = None
    """What this worker adds to the sum that gradients are divided by, where that is not `value`."""
    num_parts: int | None = None
    """Between how many workers the batch was cut, where a sharded loader cut it."""
    doubt: str = ""
    """Why it cannot be told whether this is the weight, if so: a backward pass needs an explicit one then."""

    @property
    def is_explicit(self) -> bool:
        """Whether the user gave it to `lockstep.backward`: then only the reduction itself can tell the total."""
        return self.total is None

    @property
    def is_stand_in(self) -> bool:
        """Whether this worker has no sample of the batch, and computes on another's, which must not count here."""
        return bool(self.total) and not isinstance(self.value, Tensor) and not self.value


def checked(weight: Any, where: str) -> float | Tensor:
    """`weight` as a float, or as a tensor on its GPU, which the host does not read; UsageError if it is no count."""
    shape = tuple(getattr(weight, "shape", ()))
    if math.prod(shape) == 1 and isinstance(weight, Tensor) and weight.device.type != "cpu":
        return weight.detach().to(torch.float32).reshape(())
    if math.prod(shape) == 1 and hasattr(weight, "item"):
        weight = weight.item()
    if not isinstance(weight, int | float):
        found = f"a {type(weight).__name__} of shape {list(shape)}" if shape else repr(weight)
        raise UsageError(f"{where}: weight must be one number, not {found}.")
    if not 0 <= weight < math.inf:
        raise UsageError(f"{where}: weight={weight}: a weight is a count, zero or more.")
    return float(weight)


def in_force(explicit: Weight | None, at_forward: Weight | None) -> Weight | None:
    """The weight of a backward pass: an explicit one, else that of the batch which the forward pass saw."""
    if explicit is not None:
        return explicit
    if at_forward is not None and at_forward.doubt:
        raise UsageError(at_forward.doubt)
    return at_forward


def weigh_alike(one: Weight | None, other: Weight | None, size: int) -> bool:
    """Whether batches of these weights count the same on each of `size` workers; None stands for equal parts."""
    totals = [size if weight is None else weight.total for weight in (one, other)]
    return totals[0] == totals[1] or all(total is not None and total % size == 0 for total in totals)


MOST_READ_AHEAD = 64
"""Of the batches of one iteration that no model has seen, so many are remembered."""


class HandOut:
    """A batch that a sharded loader has handed out."""

    __slots__ = ("is_used", "weight")

    def __init__(self, weight: Weight) -> None:
        self.weight = weight
        self.is_used = False
        """Whether a wrapped model has seen it."""

    @property
    def num_rows(self) -> float | Tensor:
        """How long its tensors are; a stand-in has one sample."""
        return self.weight.value or 1


class Walk:
    """One iteration of a sharded loader: what it has handed out and what may still be in use of that.

    A batch is over when another one is handed out after a model has seen it. So one that is read ahead of the batch
    being worked on ends nothing, nor do batches of other loaders.
    """

    def __init__(self, all_of_them: "HandOuts") -> None:
        self._all = all_of_them
        self.open: list[HandOut] = []
        self.has_trained = False

    def hand_out(self, weight: Weight, tensors: Sequence[Tensor]) -> None:
        """These `tensors` are a batch of this weight."""
        handed_out = HandOut(weight)
        # No more than so many, since a loop may never show its batches to a wrapped model.
        self.open = [*(each for each in self.open[-MOST_READ_AHEAD:] if not each.is_used), handed_out]
        self._all.see(self, handed_out, tensors)

    def end(self) -> None:
        """The loader has no more; what was read ahead by a loop that trains is still to be used."""
        self._all.note_unseen(self.open)
        self.open = [each for each in self.open if not each.is_used] if self.has_trained else []
        self._all.end(self)


class HandOuts:
    """The batches of all sharded loaders of this worker that may still be in use."""

    def __init__(self, size: int) -> None:
        self._size = size
        """Of the world."""
        self._by_tensor: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._walks: list[Walk] = []
        """Those under way, the one that handed out, or whose batch was used, last at the end."""
        self._ended: Walk | None = None
        """The last one, if what it read ahead has not been used."""
        self.have_begun = False
        """Whether any loader was ever read."""
        self.in_use: Weight | None = None
        """The weight of the batch that a wrapped model saw last; None where that is of no sharded loader."""
        self._outlasts = False
        """Whether that batch was read ahead, and its loader had ended when the model saw it."""
        self._are_unseen = False
        """Whether the loader that ended last handed out batches that weigh differently, and no model saw any."""

    def see(self, walk: Walk, handed_out: HandOut, tensors: Sequence[Tensor]) -> None:
        """`walk` has handed out a batch of these tensors."""
        self.have_begun = True
        self._ended = None
        self._are_unseen = False
        self._walks = [each for each in self._walks if each is not walk] + [walk]
        for tensor in tensors:
            self._by_tensor[tensor] = handed_out

    def note_unseen(self, left: Sequence[HandOut]) -> None:
        """A loader ends, and these of its batches are all that may still be in use."""
        self._are_unseen = not self._alike(left) and not any(each.is_used for each in left)

    def end(self, walk: Walk) -> None:
        """`walk` hands out no more."""
        self._walks = [each for each in self._walks if each is not walk]
        if walk.open:
            self._ended = walk

    @property
    def is_standing_in(self) -> bool:
        """Whether the batch that this worker works on is a stand-in, that of another worker."""
        return bool(self._walks) and self._walks[-1].open[-1].weight.is_stand_in

    @property
    def may_stand_in(self) -> bool:
        """Whether this worker may still work on a stand-in that was read ahead, or may be done with all its batches."""
        return self._outlasts and not self._walks and self.in_use is not None and self.in_use.is_stand_in

    def find(self, tensors: Sequence[Tensor], *, trains: bool) -> Weight | None:
        """The weight of the batch that these inputs of a model are of; None where no sharded loader is being read.

        Tensors of a batch, and views of them, are known. Others (moved, transformed) are of the batch that may still be
        in use; where several may be that weigh differently, of the one that is as long.
        """
        self.in_use = None
        if not self.have_begun:
            return None
        found = [tagged for each in tensors if (tagged := self._tagged(each)) is not None]
        if not found:
            walks = self._walks or ([self._ended] if self._ended is not None else [])
            found = [each for walk in walks for each in walk.open]
            if not self._alike(found):
                lengths = {len(each) for each in tensors if each.ndim}
                found = [each for each in found if each.num_rows in lengths] or found
            if self._alike(found):  # They are used in the order in which they were handed out.
                found = [next((each for each in found if not each.is_used), found[-1])] if found else []
        if not found:
            return Weight(1.0, float(self._size), doubt=_UNSEEN) if trains and self._are_unseen else None
        self._outlasts = not any(found[-1] in walk.open for walk in self._walks)
        self._use(found, trains=trains)
        weight = found[-1].weight
        is_clear = self._alike(found)
        self.in_use = weight if is_clear else replace(weight, doubt=_doubt([each.weight for each in found]))
        return self.in_use

    def find_none(self) -> None:
        """A wrapped model is called with what is of no sharded loader."""
        self.in_use = None

    def _alike(self, found: Sequence[HandOut]) -> bool:
        size = found[0].weight.num_parts or self._size if found else self._size
        return all(weigh_alike(each.weight, found[0].weight, size) for each in found[1:])

    def _tagged(self, tensor: Tensor) -> HandOut | None:
        tagged: HandOut | None = self._by_tensor.get(tensor)
        return self._by_tensor.get(tensor._base) if tagged is None and tensor._base is not None else tagged

    def _use(self, found: list[HandOut], *, trains: bool) -> None:
        for each in found:
            each.is_used = True
        for walk in [walk for walk in self._walks if any(each in found for each in walk.open)]:
            walk.has_trained |= trains
            walk.open.sort(key=lambda each: each in found)
            self._walks = [each for each in self._walks if each is not walk] + [walk]


class Accumulation:
    """The weights that `lockstep.backward` was given for the micro-batches since the last update.

    Local gradients add up as they come, so later micro-batches are scaled against the first one: the sum then
    stands for `reference` each, and what was counted is the mean of the weights.
    """

    def __init__(self) -> None:
        self.in_force: Weight | None = None
        """The explicit weight of the backward pass that is running; None in any other pass."""
        self._reference: Factor = 1.0
        self._sum: Factor = 0.0
        self._count = 0

    def add(self, weight: Factor) -> tuple[Factor, Weight]:
        """What to scale this micro-batch's loss by, and the weight of the accumulated gradients."""
        if self._count == 0:
            self._reference = _one_if_zero(weight)
        self._count += 1
        self._sum = self._sum + weight
        return weight / self._reference, Weight(self._reference, counted=self._sum / self._count)

    def pending(self) -> Weight | None:
        """The weight of what was accumulated so far; None where `lockstep.backward` was given none."""
        return Weight(self._reference, counted=self._sum / self._count) if self._count else None

    def end(self) -> Factor:
        """Forget them; returns what brings the accumulated gradients to their mean weight where nothing is reduced."""
        factor = 1.0 if self._count <= 1 else self._reference / _one_if_zero(self._sum / self._count)
        self._reference, self._sum, self._count = 1.0, 0.0, 0
        return factor


def _one_if_zero(value: Factor) -> Factor:
    if isinstance(value, Tensor):
        return torch.where(value == 0, torch.ones_like(value), value)
    return value if value else 1.0


def refuse_both(one: Weight | None, other: Weight | None) -> UsageError:
    """The error for one backward pass over batches of two weights."""
    return UsageError(_doubt([weight for weight in (one, other) if weight is not None]))


_UNSEEN = (
    "a model trains on a batch that is of no sharded loader as it was handed out, and batches that do not all weigh "
    "the same were read from a loader that has ended since, by list(loader), say. If this is one of those, changed on "
    "the way, its weight is lost: read the loader in the loop, or keep loader.num_samples with each batch and call "
    "lockstep.backward(loss, weight=num_samples). If it is none of them: lockstep.backward(loss, weight=len(x))."
)


def _doubt(weights: Sequence[Weight]) -> str:
    parts = sorted({f"{weight.value:g} of {weight.total:g}" for weight in weights})
    return (
        f"this worker's loss may count by more than one weight, and they differ: it has {' and '.join(parts)} samples "
        "of batches that sharded loaders have handed out. Either batches are read ahead and changed before the model "
        "sees them, or one loss is made of several batches. Say what it counts by: lockstep.backward(loss, "
        "weight=len(x))."
    )
