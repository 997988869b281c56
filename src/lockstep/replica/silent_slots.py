"""The slots of one bucket of whose gradients nobody tells, and how these come into them: see silent.py.

offer      a pass begins, and the memory is free: every slot, zeroed, is its parameter's gradient, so that autograd
           adds in place what it has computed, and nothing is left to copy
come       which gradients have come: where a slot was offered, its version tells. Where the parameter has another
           one it was not added in place, as under `create_graph`, or the slot was not offered
take_back  the bucket is about to leave while others may still come: no parameter has a slot for its gradient any more
keep       it leaves at the end of the pass: parameters keep their slots, in which their reduced gradients will be
"""

import collections
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lockstep.replica.layout import Slot

_grad_of = operator.attrgetter("grad")
_version_of = operator.attrgetter("_version")
_set_grad: Any = Tensor.grad.__set__  # type: ignore[union-attr]  # A property, as torch has it.


class SilentSlots:
    """Some slots of a bucket. `views` are all of its slots, each with a version of its own, in `flat`."""

    def __init__(
        self,
        numbers: Sequence[int],
        slots: Sequence[Slot],
        params: Sequence[Tensor],
        views: Sequence[Tensor],
        flat: Tensor,
    ) -> None:
        self.numbers = numbers
        """Of the slots, in their bucket."""
        self._params = [params[number] for number in numbers]
        self._views = [views[number] for number in numbers]
        self._runs = [flat[begin:end] for begin, end in _runs(numbers, slots)]
        # On a GPU one kernel copies them all, where adding in place takes one for each.
        self._can_offer = flat.is_cpu and all(
            view.dtype is param.dtype for view, param in zip(self._views, self._params, strict=True)
        )
        self._versions: list[int] | None = None
        """Of the slots when they were offered; None while they are not."""
        self.are_kept = False
        """Whether parameters have kept them when the bucket has left."""
        self.have_all_come = False
        """Whether all gradients were found in their slots."""

    def offer(self) -> None:
        """Let autograd add to the slots themselves. No parameter has a gradient, and nobody uses the memory."""
        if self._can_offer and self._params:
            for run in self._runs:
                run.zero_()
            collections.deque(map(_set_grad, self._params, self._views), maxlen=0)  # By the shortest way.
            self._versions = list(map(_version_of, self._views))

    def come(self, taken: Sequence[bool]) -> tuple[list[int], list[int]]:
        """Numbers of slots whose gradient has come and is not `taken` yet: into the slot, and elsewhere."""
        before, grads = self._versions, list(map(_grad_of, self._params))
        if before is None:
            return [], [n for n, grad in zip(self.numbers, grads, strict=True) if grad is not None and not taken[n]]
        if self._are_all_new(grads, before) and not any(map(taken.__getitem__, self.numbers)):
            self.have_all_come = True
            return list(self.numbers), []
        found: tuple[list[int], list[int]] = [], []
        for number, grad, view, version in zip(self.numbers, grads, self._views, before, strict=True):
            if grad is not None and not taken[number] and (grad is not view or view._version != version):
                found[grad is not view].append(number)
        return found

    def _are_all_new(self, grads: Sequence[Tensor | None], before: Sequence[int]) -> bool:
        """As nearly always, and seen by the shortest way."""
        have_slots = all(map(operator.is_, grads, self._views))
        return have_slots and all(map(operator.ne, map(_version_of, self._views), before))

    def keep(self) -> Sequence[Tensor]:
        """Let parameters keep what they were offered; returns the memory of that, in few tensors."""
        if self._versions is None:
            return ()
        self._versions, self.are_kept = None, True
        return self._runs

    def take_back(self) -> Sequence[Tensor]:
        """Let parameters have no slot for a gradient; returns the memory of those that were offered, in few tensors."""
        if self._versions is None and not self.are_kept:
            return ()
        self._versions, self.are_kept = None, False
        for param, view in zip(self._params, self._views, strict=True):
            if param.grad is view:
                param.grad = None
        return self._runs


def _runs(numbers: Sequence[int], slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """The memory of these slots, in elements, neighbours together."""
    runs: list[tuple[int, int]] = []
    last = -2
    for number in sorted(numbers):
        slot = slots[number]
        begin = runs.pop()[0] if number == last + 1 else slot.offset
        runs.append((begin, slot.offset + slot.numel))
        last = number
    return runs
