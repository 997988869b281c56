"""Gradients that arrive without a word: once the order of gradients is known, not each of them needs a hook.

A hook costs more than the bytes of a small gradient, and nothing is done with it until its bucket leaves. So only large
ones are heard of, and in each bucket the last one that is expected: then the others are looked for. Where all is sent
at the end of a pass, large ones that are computed in their slots (see lending.py) are not heard of either. That
gradients are there is news only if they were not when the pass began. So all are heard of again, for good, as soon as

    gradients are there when a pass begins (they are zeroed in place, or not at all), or accumulated without being sent
    one comes in a later place than expected, or in portions: it is sent at the end of the pass, or in an extra round

Each worker decides for itself. So it is too where the output has no tensor by which a pass could be heard of. What
cannot be noticed is a pass that comes to none of the output's tensors, and to no parameter but silent ones: a loss that
the module keeps to itself, of few parameters. Its gradients stay where they are until the next pass.
"""

import itertools
import operator
from collections.abc import Sequence, Set

from torch import Tensor

from lockstep.replica.arrivals import Arrivals, Receiver, is_only_ours
from lockstep.replica.bucket import Bucket
from lockstep.replica.buckets import Buckets

_grad_of = operator.attrgetter("grad")


class Silent:
    """The parameters of one replica of whose gradients nobody tells; none until the order is known."""

    def __init__(
        self,
        arrivals: Arrivals,
        buckets: Buckets,
        params: Sequence[Tensor],
        computed_in_place: Set[int],
        *,
        is_over: bool,
    ) -> None:
        self._arrivals = arrivals
        self._buckets = buckets
        self._params = params
        self._computed_in_place = computed_in_place
        """Parameters whose gradients are expected to be; they change."""
        self._seen: dict[int, int] = {}
        """At which place each parameter's gradient comes."""
        self._indices: list[int] = []
        self._chosen: list[Tensor] = []
        """The parameters of these numbers."""
        self._is_over = is_over
        """Whether all are heard of for good."""
        self.is_due = False
        """Whether they are to be chosen before the next pass."""

    def expect(self, seen: Sequence[int]) -> None:
        """Gradients come in this order."""
        self._seen = {index: place for place, index in enumerate(seen)}
        self.is_due = True

    def choose(self, receiver: Receiver) -> None:
        """Choose anew, for the buckets that there are now: between two passes, or before the first gradient of one."""
        self.is_due = False
        if self._is_over or not self._seen:
            return
        self._indices = []
        in_place = frozenset[int]() if self._buckets.leave_early else self._computed_in_place
        for bucket in self._buckets.all:
            early = self._early_slots(bucket)
            small = [slot for slot in early if bucket.waits[slot]]
            quiet = [slot for slot in early if bucket.indices[slot] in in_place]
            bucket.silence(small, quiet)
            self._indices += [bucket.indices[slot] for slot in (*small, *quiet)]
        self._chosen = [self._params[index] for index in self._indices]
        self._arrivals.silence(self._indices, receiver)

    def _early_slots(self, bucket: Bucket) -> list[int]:
        """Those of whose gradients somebody may hear, and that come before another one."""
        last = max((self._seen.get(index, -1) for index in bucket.indices), default=-1)
        return [
            slot
            for slot, index in enumerate(bucket.indices)
            if self._seen.get(index, last) < last
            and index not in self._buckets.deferred
            and is_only_ours(bucket.params[slot])
        ]

    def has_any(self) -> bool:
        """Whether one has a gradient now."""
        return not all(map(operator.is_, map(_grad_of, self._chosen), itertools.repeat(None)))

    def found(self) -> set[int]:
        """Those that have a gradient now."""
        return {index for index, param in zip(self._indices, self._chosen, strict=True) if param.grad is not None}

    def end(self, receiver: Receiver) -> None:
        """Let all be heard of again: between two passes, or before the first gradient of one."""
        if self._indices:
            self._indices, self._chosen = [], []
            for bucket in self._buckets.all:
                bucket.silence(())
            self._arrivals.silence((), receiver)
        self._is_over = True
