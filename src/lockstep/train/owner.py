"""The part of the parameters that one worker owns: updated as gradients arrive, by the user's optimizer.

    read        a copy of the part as it is now, noted in the ledger
    submit      a gradient has arrived whole: it is applied at once, or kept until the ledger allows it
    withdraw    of what was read, no gradient will come

Called by the threads that serve the other workers and by the worker's own; one lock makes every one of them whole, so
a reader never sees half of an update. On a GPU all of it runs in a stream of its own, beside the passes.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.replica.part import Part
from lockstep.train.ledger import Ledger
from lockstep.train.update import apply


@dataclass(frozen=True, slots=True)
class Gradient:
    """What one worker has computed for this part in one step."""

    number: int
    """Of the worker's step; each is applied once."""
    used: Sequence[int]
    """By parameter, whether it has a gradient at all."""
    flats: Sequence[Tensor]
    """For each bucket the elements of the owned span, in host memory; not to be changed until it is applied."""


class Owner:
    """Applies the updates of one part."""

    def __init__(
        self, parts: Sequence[Part], optimizer: torch.optim.Optimizer, scheduler: Any, size: int, bound: int
    ) -> None:
        self._parts, self._optimizer, self._scheduler = parts, optimizer, scheduler
        self._ledger = Ledger(bound)
        self._change = threading.Condition()
        self._arrived: dict[int, Gradient] = {}
        """By worker, in the order of arrival, what could not be applied yet."""
        self._staleness: dict[int, int] = {}
        """By worker, of what was applied and not asked for."""
        self._applied = [0] * size
        """By worker, how many of its steps have ended here."""
        self._error: UsageError | None = None
        device = parts[0].own_params.device if parts else torch.device("cpu")
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            for part in parts:
                part.own_grads = torch.empty_like(part.own_params)
        self.see()

    @property
    def version(self) -> int:
        """How many updates have been applied."""
        return self._ledger.version

    def see(self) -> None:
        """The part was changed from outside: what is read from now on has that."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def read(self, worker: int, out: Sequence[Tensor], *, is_counted: bool) -> None:
        """Copy the part, bucket by bucket, to `out` in host memory; counted unless no gradient is to come of it."""
        with self._change, self._on_device():
            if is_counted:
                self._ledger.read(worker)
            for part, copy in zip(self._parts, out, strict=True):
                copy.copy_(part.own_params, non_blocking=True)

    def submit(self, worker: int, gradient: Gradient) -> None:
        """A gradient of `worker` has arrived whole."""
        with self._change:
            self._expect(worker, gradient.number)
            self._arrived[worker] = gradient
            self._apply_what_can_be()

    def withdraw(self, worker: int, number: int) -> None:
        """Step `number` of `worker` has failed before there was a gradient."""
        with self._change:
            self._expect(worker, number)
            self._ledger.withdraw(worker)
            self._end(worker, 0)
            self._apply_what_can_be()

    def wait_applied(self, worker: int, timeout_s: float) -> int | None:
        """The staleness of the gradient that `worker` has submitted, once it is applied; None if it is not in time."""
        with self._change:
            self._change.wait_for(lambda: worker in self._staleness or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            return self._staleness.pop(worker, None)

    def _expect(self, worker: int, number: int) -> None:
        assert number == self._applied[worker] + 1, f"step {number} after {self._applied[worker]} of worker {worker}"

    def _apply_what_can_be(self) -> None:
        """In the order of arrival; each that is applied may make room for others."""
        while (worker := next(filter(self._ledger.may_apply, self._arrived), None)) is not None:
            try:
                self._apply(self._arrived.pop(worker))
            except Exception as error:
                self._error = UsageError(f"the update by a gradient of worker {worker} failed: {error!r}")
                self._error.__cause__ = error
                self._change.notify_all()
                raise self._error from error
            self._end(worker, self._ledger.apply(worker))

    def _end(self, worker: int, staleness: int) -> None:
        self._applied[worker] += 1
        self._staleness[worker] = staleness
        self._change.notify_all()

    def _apply(self, gradient: Gradient) -> None:
        """The update takes effect."""
        used = [bool(mark) for mark in gradient.used]
        with self._on_device():
            for part, flat in zip(self._parts, gradient.flats, strict=True):
                if self._stream is None:
                    part.own_grads = flat
                elif part.own_grads is not None:
                    part.own_grads.copy_(flat, non_blocking=True)
                part.hand_out(used)
            apply(self._optimizer, None, self._scheduler)
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
