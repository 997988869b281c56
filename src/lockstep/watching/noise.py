"""The gradient noise scale: from which batch on a larger one no longer pays.

McCandlish et al. 2018, appendix A. The gradient of b samples has the squared norm |G|^2 + S/b in expectation, where G
is the true gradient and S the trace of the covariance of one sample's. Each worker knows its own gradient's norm (b
samples), and all know that of the whole batch (B samples), so both unknowns can be estimated without bias:

    S      = (sum_r p_r |g_r|^2 - |g|^2) * B / (N - 1)        p_r = b_r / B, the parts of N workers
    |G|^2  = |g|^2 - S / B

and the noise scale is S / |G|^2, each smoothed by itself, since a ratio of two noisy numbers is biased. `GradNorms`
takes the norms in every 16th step: two reads of the gradients.
"""

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lockstep.events import Event, Kind
from lockstep.replica.bucket import Bucket
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.reducer import Reducer

_EVERY = 16
"""A step in which norms are taken costs two reads of the gradients on top of a dozen of forward, backward and update;
in one of 16 steps that is under 1 %: bench/watching.py."""
_SMOOTHING = 0.9


class GradNorms:
    """Squared norms of this worker's own gradients and of the whole batch's, taken in the backward pass's thread."""

    def __init__(self, model: DataParallel, reducer: Reducer) -> None:
        # Weak, since the reducer holds this: a wrapper that is dropped is to go at once.
        self._model, self._reducer = weakref.ref(model), weakref.ref(reducer)
        self._grad_weight = reducer.grad_weight
        self._is_split = model._engine.parts is not None
        self._counts_sums = model.world.is_main and not self._is_split
        self._own: list[Tensor] = []
        self._apart: list[Tensor] = []
        """Of the whole batch's gradients, those that travelled apart."""
        self._noted: dict[str, float | Tensor] = {}
        # Of split gradients a worker has its part, and has it when all have been handed out.
        self._unsubscribe = model.world.events.subscribe(self._hear) if self._is_split else None
        if self._unsubscribe is not None:
            weakref.finalize(model, self._unsubscribe).atexit = False
        reducer.observer = self

    def close(self) -> None:
        """Stop measuring."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        if (reducer := self._reducer()) is not None:
            reducer.observer = None

    def take(self) -> dict[str, float | Tensor]:
        """What the step that ended has shown, if anything: `own` and its `share` of the weight.

        And of the whole batch's gradient `whole` on worker 0, or, where gradients are split, `part` on every worker.
        """
        noted, self._noted = self._noted, {}
        return noted

    # The reducer calls these, which knows this as a GradObserver.

    def see_own(self, step: int, bucket: Bucket) -> None:
        """`bucket` has all that this worker adds, and is about to be sent."""
        if self.is_due(step) and bucket.plan.slots:
            end = bucket.plan.tail_offset
            grads = bucket.flat_grads if len(bucket.lanes) == 1 else bucket.lanes[:, :end].sum(0)
            self._own.append(_squared(grads))

    @staticmethod
    def is_due(step: int) -> bool:
        """Whether the gradients of this step are measured."""
        return step % _EVERY == 1

    def see_rows(self, own: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """Gradients that travelled apart from buckets: what this worker added, and what they will be."""
        self._own += map(_squared, own)
        self._apart += map(_squared, sums)

    def see_sums(self, step: int, buckets: Sequence[Bucket]) -> None:
        """All buckets of the pass have arrived, and hold what the gradients will be."""
        (own, self._own), (apart, self._apart) = (self._own, []), (self._apart, [])
        if not self.is_due(step) or not own:
            return
        self._noted = {"own": _total(own), "share": self._grad_weight.counted}
        if self._counts_sums:
            whole = [_squared(bucket.flat_grads) for bucket in buckets if bucket.plan.slots]
            self._noted["whole"] = _total([*whole, *apart])

    def _hear(self, event: Event) -> None:
        model = self._model()
        if event.kind is Kind.SYNCED and self.is_due(event.step) and self._noted and model is not None:
            owned = [part.own.grad for part in model._engine.parts or () if part.own.grad is not None]
            self._noted["part"] = _total([_squared(grad) for grad in owned]) if owned else 0.0


class NoiseScale:
    """The smoothed estimate, on worker 0."""

    def __init__(self) -> None:
        self._noise = self._signal = 0.0
        self._number = 0

    def see(self, notes: Mapping[int, Mapping[str, float]], samples: Mapping[int, float]) -> None:
        """Take a step into account: what every worker has noted of its gradients, and its samples, by rank."""
        whole = notes[0].get("whole") if 0 in notes else None
        if all("part" in noted for noted in notes.values()):
            whole = sum(noted["part"] for noted in notes.values())
        if whole is None or not all("own" in noted for noted in notes.values()):
            return
        squares = own_squares(notes, samples)
        batch = sum(samples[rank] for rank in squares)
        if len(squares) < 2:
            return
        mean = sum(samples[rank] / batch * square for rank, square in squares.items())
        noise = (mean - whole) * batch / (len(squares) - 1)
        self._number += 1
        # The plain mean at first, so that the first step does not linger.
        weight = max(1.0 / self._number, 1.0 - _SMOOTHING)
        self._noise += weight * (noise - self._noise)
        self._signal += weight * (whole - noise / batch - self._signal)

    @property
    def value(self) -> float | None:
        """In samples; None before there is an estimate, and where noise hides the gradient altogether."""
        if self._number < 2 or self._signal <= 0 or self._noise <= 0:
            return None
        return self._noise / self._signal


def own_squares(notes: Mapping[int, Mapping[str, float]], samples: Mapping[int, float]) -> dict[int, float]:
    """The squared norm of each worker's own gradient, of those that had samples."""
    # A bucket holds the gradient times the worker's share of the weight. Where losses were weighed beforehand
    # (Trainer) everybody's share is noted as 1, and is that of the samples.
    total = sum(samples.values()) or 1.0
    is_weighed_before = min(noted["share"] for noted in notes.values()) >= 1.0
    shares = {rank: samples[rank] / total if is_weighed_before else noted["share"] for rank, noted in notes.items()}
    return {rank: notes[rank]["own"] / share**2 for rank, share in shares.items() if share and samples[rank] > 0}


def _squared(grads: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(grads, dtype=torch.float32)
    return norm.square()


def _total(squares: list[Tensor]) -> Tensor:
    return torch.stack([each.reshape(()) for each in squares]).sum()
