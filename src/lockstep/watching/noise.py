"""The gradient noise scale: from which batch on a larger one no longer pays.

McCandlish et al. 2018, appendix A. The gradient of b samples has the squared norm |G|^2 + S/b in expectation, where G
is the true gradient and S the trace of the covariance of one sample's. Each worker knows its own gradient's norm (b
samples), and all know that of the whole batch (B samples), so both unknowns can be estimated without bias:

    S      = (sum_r p_r |g_r|^2 - |g|^2) * B / (N - 1)        p_r = b_r / B, the parts of N workers
    |G|^2  = |g|^2 - S / B

and the noise scale is S / |G|^2, each smoothed by itself, since a ratio of two noisy numbers is biased. `NormGauge`
takes the norms in every 16th step: two reads of the gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


class NormGauge:
    """Takes the squared norms of this worker's own gradients and of the whole batch's. See replica/gauge.py."""

    def __init__(self, model: DataParallel, reducer: Reducer) -> None:
        self._model, self._reducer = model, reducer
        self._is_split = model.parts is not None
        self._counts_sums = model.world.is_main and not self._is_split
        self._own: list[Tensor] = []
        self._apart: list[Tensor] = []
        """Of the whole batch's gradients, those that travelled apart."""
        self.noted: dict[str, float | Tensor] = {}
        """What the step under way has shown: `own`, `share` of the weight; of the whole batch's gradient `whole` on
        worker 0, or, where gradients are split, `part` on every one."""
        # Of split gradients a worker has its part, and has it when all have been handed out.
        self._unsubscribe = model.world.events.subscribe(self._hear) if self._is_split else None
        reducer.gauge = self

    def close(self) -> None:
        """Stop measuring."""
        if self._unsubscribe is not None:
            self._unsubscribe()
        self._reducer.gauge = None

    def see_own(self, step: int, bucket: Bucket) -> None:
        """See Gauge."""
        if _is_due(step) and bucket.plan.slots:
            end = bucket.plan.tail_offset
            grads = bucket.flat_grads if len(bucket.lanes) == 1 else bucket.lanes[:, :end].sum(0)
            self._own.append(_squared(grads))

    def is_due(self, step: int) -> bool:
        """See Gauge."""
        return _is_due(step)

    def see_rows(self, own: Sequence[Tensor], sums: Sequence[Tensor]) -> None:
        """See Gauge."""
        self._own += map(_squared, own)
        self._apart += map(_squared, sums)

    def see_sums(self, step: int, buckets: Sequence[Bucket]) -> None:
        """See Gauge."""
        (own, self._own), (apart, self._apart) = (self._own, []), (self._apart, [])
        if not _is_due(step) or not own:
            return
        self.noted = {"own": _total(own), "share": self._reducer.weighing.counted}
        if self._counts_sums:
            whole = [_squared(bucket.flat_grads) for bucket in buckets if bucket.plan.slots]
            self.noted["whole"] = _total([*whole, *apart])

    def _hear(self, event: Event) -> None:
        if event.kind is Kind.SYNCED and _is_due(event.step) and self.noted:
            owned = [part.grad for _, part, _ in self._model.parts or () if part.grad is not None]
            self.noted["part"] = _total([_squared(grad) for grad in owned]) if owned else 0.0


def _is_due(step: int) -> bool:
    return step % _EVERY == 1


@dataclass(frozen=True, slots=True)
class Norms:
    """What a step showed of one worker's gradient."""

    square: float
    """Its squared norm."""
    num_samples: float


class NoiseScale:
    """The smoothed estimate, on worker 0."""

    def __init__(self) -> None:
        self._noise = self._signal = 0.0
        self._number = 0

    def see(self, norms: Sequence[Norms], whole: float) -> None:
        """Take a step into account: every worker's norms, and the square of the whole batch's."""
        parts = [each for each in norms if each.num_samples > 0]
        batch = sum(each.num_samples for each in parts)
        if len(parts) < 2:
            return
        mean = sum(each.num_samples / batch * each.square for each in parts)
        noise = (mean - whole) * batch / (len(parts) - 1)
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


def whole_of(noted: Mapping[int, Mapping[str, float]], size: int) -> float | None:
    """The square of the whole batch's gradient, if all of it was noted."""
    if len(noted) == size and all("part" in each for each in noted.values()):
        return sum(each["part"] for each in noted.values())
    return noted[0].get("whole") if 0 in noted and len(noted) == size else None


def norms_of(noted: Mapping[int, Mapping[str, float]], samples: Mapping[int, float]) -> list[Norms] | None:
    """Each worker's norms from what it noted; None unless every worker has noted some."""
    if not noted or not all("own" in each for each in noted.values()):
        return None
    # A bucket holds the gradient times the worker's share of the weight. Where losses were weighed beforehand
    # (Trainer) everybody's share is noted as 1, and is that of the samples.
    total = sum(samples.values()) or 1.0
    is_weighed_before = min(each["share"] for each in noted.values()) >= 1.0
    norms = []
    for rank, each in noted.items():
        share = samples[rank] / total if is_weighed_before else each["share"]
        norms.append(Norms(each["own"] / share**2, samples[rank]) if share else Norms(0.0, 0.0))
    return norms


def _squared(grads: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(grads, dtype=torch.float32)
    return norm.square()


def _total(squares: list[Tensor]) -> Tensor:
    return torch.stack([each.reshape(()) for each in squares]).sum()
