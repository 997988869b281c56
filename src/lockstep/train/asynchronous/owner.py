"""The part of the parameters that one worker owns: updated as gradients arrive, by the user's optimizer.

StalenessBound   which gradients may be applied now, so that none is ever staler than the bound. Pure.
Owner            the part itself
"""

import contextlib
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.replica.params import BucketPart


class StalenessBound:
    """What an owner knows of the gradients that are still to come, so that none is ever staler than `bound`.

    The staleness of a gradient is the number of updates that its owner has applied between the reading of the
    parameters it was computed from and the moment it is applied itself. With bound k, version V and outstanding
    readings in the order in which they were made, r_0 <= r_1 <= ..., it keeps

        V + j - r_j <= k    for every place j

    which says that all of them can still be applied in time, one after the other, oldest first:

        reading     adds a last place j with r_j = V: allowed while at most k readings are outstanding
        applying    makes V one more, and moves those behind one place forward, for whom nothing changes; it is allowed
                    if those before it can afford it. The oldest has none before it, so it can always be applied at
                    once, with a staleness V - r_0 <= k.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.version = 0
        """How many updates have been applied."""
        self._readings: dict[int, int] = {}
        """By worker the version that it read, in the order of reading."""

    @property
    def may_read(self) -> bool:
        """Whether a gradient of one reading more could be applied in time."""
        return len(self._readings) <= self.bound

    def read(self, worker: int) -> None:
        """`worker` reads the parameters, for a gradient."""
        assert self.may_read and worker not in self._readings
        self._readings[worker] = self.version

    def may_apply(self, worker: int) -> bool:
        """Whether the gradient of `worker` can be applied now without making an older one too stale."""
        for place, (reader, version) in enumerate(self._readings.items()):
            if reader == worker:
                return True
            if self.version + 1 + place - version > self.bound:
                return False
        raise AssertionError(f"worker {worker} has read nothing")

    def apply(self, worker: int) -> int:
        """The gradient of `worker` is applied; returns its staleness."""
        assert self.may_apply(worker)
        staleness = self.version - self._readings.pop(worker)
        self.version += 1
        return staleness

    def withdraw(self, worker: int) -> None:
        """No gradient will come of what `worker` has read."""
        self._readings.pop(worker, None)


@dataclass(frozen=True, slots=True)
class PushedGradient:
    """What one worker has computed for this part in one step."""

    used: Sequence[int]
    """By parameter, whether it has a gradient at all."""
    flats: Sequence[Tensor]
    """For each bucket the elements of the owned span, in host memory; not to be changed until it is applied."""


class Owner:
    """Applies the updates of one part.

        read        a copy of the part as it is now, noted by the bound, as soon as that allows one reading more
        submit      a gradient has arrived whole: it is applied at once, or kept until the bound allows it
        withdraw    of what was read, no gradient will come

    Called by the threads that serve the other workers and by the worker's own; one lock makes every call whole, so a
    reader never sees half of an update. On a GPU all of it runs in a stream of its own, beside the passes.
    """

    def __init__(self, parts: Sequence[BucketPart], optimizer: torch.optim.Optimizer, scheduler: Any, k: int) -> None:
        """`k`: the bound on staleness."""
        self._parts, self._optimizer, self._scheduler = parts, optimizer, scheduler
        self.bound = StalenessBound(k)
        self._change = threading.Condition()
        self._readers: deque[int] = deque()
        """Workers that wait to read, in the order in which they came: none is overtaken."""
        self._arrived: dict[int, PushedGradient] = {}
        """By worker, in the order of arrival, what could not be applied yet."""
        self._staleness: dict[int, int] = {}
        """By worker, of what was applied and not asked for."""
        self._error: UsageError | None = None
        device = parts[0].own_params.device if parts else torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            for part in parts:
                part.own_grads = torch.empty_like(part.own_params)
        self.see()

    def see(self) -> None:
        """The part was changed from outside: what is read from now on has that."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def read(self, worker: int, out: Sequence[Tensor], timeout_s: float) -> bool:
        """Copy the part, bucket by bucket, to `out` in host memory, for a gradient; False to ask again for a turn."""
        with self._change:
            if worker not in self._readers:
                self._readers.append(worker)
            if not self._change.wait_for(lambda: self._readers[0] == worker and self.bound.may_read, timeout_s):
                return False
            self._readers.popleft()
            self.bound.read(worker)
            self._change.notify_all()
            self._copy_to(out)
            return True

    def look(self, out: Sequence[Tensor]) -> None:
        """The same for no gradient."""
        with self._change:
            self._copy_to(out)

    def submit(self, worker: int, gradient: PushedGradient) -> None:
        """A gradient of `worker` has arrived whole."""
        with self._change:
            self._arrived[worker] = gradient
            self._apply_what_can_be()

    def withdraw(self, worker: int) -> None:
        """The step of `worker` has failed before there was a gradient."""
        with self._change:
            self.bound.withdraw(worker)
            self._staleness[worker] = 0
            self._apply_what_can_be()

    def wait_applied(self, worker: int, timeout_s: float) -> int | None:
        """The staleness of the gradient that `worker` has submitted, once it is applied; None if it is not in time."""
        with self._change:
            self._change.wait_for(lambda: worker in self._staleness or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            return self._staleness.pop(worker, None)

    def _copy_to(self, out: Sequence[Tensor]) -> None:
        with self._on_device():
            for part, copy in zip(self._parts, out, strict=True):
                copy.copy_(part.own_params, non_blocking=True)

    def _apply_what_can_be(self) -> None:
        """In the order of arrival; each that is applied may make room for others."""
        while (worker := next(filter(self.bound.may_apply, self._arrived), None)) is not None:
            try:
                self._apply(self._arrived.pop(worker))
            except Exception as error:
                self._error = UsageError(f"the update by a gradient of worker {worker} failed: {error!r}")
                self._error.__cause__ = error
                self._change.notify_all()
                raise self._error from error
            self._staleness[worker] = self.bound.apply(worker)
        self._change.notify_all()

    def _apply(self, gradient: PushedGradient) -> None:
        """The update takes effect."""
        used = [bool(mark) for mark in gradient.used]
        with self._on_device():
            for part, flat in zip(self._parts, gradient.flats, strict=True):
                if self._stream is None:
                    part.own_grads = flat
                elif part.own_grads is not None:
                    part.own_grads.copy_(flat, non_blocking=True)
                part.hand_out(used)
            self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
            for part in self._parts:
                for param in part.params:
                    param.grad = None

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """A block whose operations have ended with it, on a GPU in the owner's stream."""
        if self._stream is None:
            with torch.no_grad():
                yield
            return
        with torch.no_grad(), torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()
