"""Two runs of one script, compared step by step: gradients, weights and buffers, on every worker. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from lockstep.verify.worker_record import (
    Mask,
    RecordedStep,
    Sketch,
    Sketches,
    WorkerRecord,
    distance,
    joined,
    same_bits,
)

FLOOR = 1e-3
"""Differences count against a tensor's own size, or this part of what is usual in the model if that is more."""
_NOISE = 1e-5
"""Gradients below this part of what is usual in the model are rounding errors of zero, as of a bias before a batch
norm."""

KINDS = ("initial weight", "gradient", "weight", "buffer")


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How far one tensor of a run on many workers is from that of the run on one."""

    step: int
    kind: str
    """One of KINDS."""
    name: str
    relative: float
    """The norm of the difference, as a part of the tensor's own."""
    worker: int
    """On which worker it is largest."""
    same_bits: bool
    seen: float = 0.0
    """`relative` with what does not count: elements whose gradients are zero but for their rounding error."""


@dataclass(frozen=True)
class RecordedRun:
    """One run of the script: what each of its workers recorded."""

    records: Sequence[WorkerRecord]

    @property
    def size(self) -> int:
        """How many workers there were."""
        return len(self.records)

    @property
    def num_steps(self) -> int:
        """How many steps all of them made."""
        return min(len(record.steps) for record in self.records)

    @property
    def is_split(self) -> bool:
        """Whether an optimizer has a part of the parameters only."""
        return any(record.is_split for record in self.records)

    def steps(self, number: int) -> list[RecordedStep]:
        """Step `number`, on each worker."""
        return [record.steps[number] for record in self.records]

    def loss(self, number: int) -> float | None:
        """The loss of the global batch: of each pass, the workers' mean by weight; of all passes, the sum."""
        passes = [step.backwards for step in self.steps(number)]
        if self.records[0].is_sharded:
            return sum(each.loss for worker in passes for each in worker if each.loss is not None)
        if not passes[0] or len({len(each) for each in passes}) > 1:
            return None
        total = 0.0
        for pass_ in zip(*passes, strict=True):
            weighed = [(each.weight, each.loss) for each in pass_ if each.weight]
            if not weighed or any(loss is None for _, loss in weighed):
                return None
            total += sum(w * loss for w, loss in weighed if loss is not None) / sum(w for w, _ in weighed)
        return total


class Comparison:
    """A run on one worker against a run on many."""

    def __init__(self, one: RecordedRun, many: RecordedRun) -> None:
        self.one, self.many = one, many
        self.num_steps = min(one.num_steps, many.num_steps)
        epsilons = [record.epsilon for run in (one, many) for record in run.records]
        self._tolerance = math.sqrt(max(epsilons))

    def tolerance(self, step: int) -> float:
        """The relative difference that rounding may make up to this step: differences grow as they go on."""
        return self._tolerance * (1 + step)

    @cached_property
    def differences(self) -> list[TensorDifference]:
        """Every tensor that was compared, in the order in which a training comes to them."""
        return list(self._compared())

    @cached_property
    def first(self) -> TensorDifference | None:
        """Where the runs first part by more than rounding: the largest difference of that step and kind."""
        beyond = self.beyond_rounding
        return max(
            (each for each in beyond if (each.step, each.kind) == (beyond[0].step, beyond[0].kind)),
            key=lambda each: each.relative,
            default=None,
        )

    @cached_property
    def beyond_rounding(self) -> list[TensorDifference]:
        """The differences that rounding does not explain."""
        return [each for each in self.differences if not each.relative <= self.tolerance(each.step)]

    @property
    def largest(self) -> TensorDifference | None:
        """The largest difference of all."""
        return max(self.differences, key=lambda each: each.relative, default=None)

    def _compared(self) -> Iterator[TensorDifference]:
        initial = [record.initial for record in self.many.records]
        yield from self._measured(0, "initial weight", self.one.records[0].initial, initial)
        vague: dict[str, Mask] = {}
        for number in range(self.num_steps):
            (one,), many = self.one.steps(number), self.many.steps(number)
            grads, weights, buffers = (
                [getattr(step, kind) for step in many] for kind in ("grads", "weights", "buffers")
            )
            yield from self._measured(number, "gradient", one.grads, grads, nothing=_noise(one.grads, grads))
            self._add_vague(vague, number, one.grads, grads)
            certain = {name: ~mask for name, mask in vague.items()}
            yield from self._measured(number, "weight", one.weights, weights, certain)
            # A vague bias moves the running mean of the batch norm after it.
            drift = sum(
                max(
                    _gap(one.weights.get(name), other, mask)
                    for _, other in _versions(name, weights, self.many.is_split)
                )
                for name, mask in vague.items()
            )
            yield from self._measured(number, "buffer", one.buffers, buffers, drift=drift)

    def _measured(
        self,
        step: int,
        kind: str,
        alone: Sketches,
        together: Sequence[Sketches],
        certain: Mapping[str, Mask] = MappingProxyType({}),
        nothing: AbstractSet[str] = frozenset(),
        drift: float = 0.0,
    ) -> Iterator[TensorDifference]:
        usual = _usual(alone)
        for name in dict.fromkeys([*alone, *(name for sketches in together for name in sketches)]):
            mine, versions = alone.get(name), _versions(name, together, self.many.is_split)
            is_same = mine is not None and all(other is not None and same_bits(mine, other) for _, other in versions)
            relative, worker = max(
                (_relative(mine, other, usual, drift, certain.get(name)), worker) for worker, other in versions
            )
            seen = max(_relative(mine, other, usual, 0.0, None) for _, other in versions)
            yield TensorDifference(step, kind, name, 0.0 if name in nothing else relative, worker, is_same, seen)

    def _add_vague(self, vague: dict[str, Mask], step: int, alone: Sketches, together: Sequence[Sketches]) -> None:
        """Note the elements whose gradient is not known beyond rounding: zero in all but its rounding error.

        Adam, and whatever else divides a gradient by its own size, may take them anywhere, in the right training too.
        Keys' biases in attention are such, and biases before a batch norm.
        """
        for name, mine in alone.items():
            for _, other in _versions(name, together, self.many.is_split):
                if other is None or len(other.sample) != len(mine.sample) or same_bits(mine, other):
                    continue
                size = np.maximum(np.abs(mine.sample), np.abs(other.sample))
                found = np.abs(mine.sample - other.sample) > self.tolerance(step) * size
                vague[name] = vague.get(name, False) | found


def disagreeing(among: Sequence[Sketches], is_split: bool = False) -> list[str]:
    """Names of tensors whose bits are not the same on all workers that have the whole of them.

    is_split: whether workers may have a part of each only. Else all of them should have it.
    """
    found = []
    for name in dict.fromkeys(name for sketches in among for name in sketches):
        versions = [each for _, each in _versions(name, among, is_split)]
        whole = [each for each in versions if each is not None]
        if len(whole) < len(versions) or not all(same_bits(whole[0], each) for each in whole):
            found.append(name)
    return found


def _versions(name: str, among: Sequence[Sketches], is_split: bool) -> list[tuple[int, Sketch | None]]:
    """A tensor as each worker has it; where it is split, what the workers' pieces make together."""
    held = [sketches.get(name) for sketches in among]
    there = [(worker, each) for worker, each in enumerate(held) if each is not None]
    if not is_split or not there:
        return list(enumerate(held))
    pieces = [each for _, each in there if not each.is_whole]
    return [(there[0][0], joined(pieces))] if pieces else list(there)


def _relative(mine: Sketch | None, other: Sketch | None, usual: float, drift: float, among: Mask | None) -> float:
    gap = max(0.0, _gap(mine, other, among) - drift)
    if gap == 0:
        return 0.0
    there = [each for each in (mine, other) if each is not None]
    scale = max(*(each.norm for each in there), FLOOR * usual * math.sqrt(there[0].numel), 0.0)
    relative = gap / scale if scale else math.inf
    return relative if math.isfinite(relative) else math.inf


def _gap(mine: Sketch | None, other: Sketch | None, among: Mask | None = None) -> float:
    """The norm of the difference; what one of them does not have counts as zero."""
    if mine is not None and other is not None:
        return distance(mine, other, among if among is not None and len(among) == len(mine.sample) else None)
    return next((each.norm for each in (mine, other) if each is not None), 0.0)


def _usual(sketches: Sketches) -> float:
    """The root of the mean square of all elements; single numbers, as counters are, do not count."""
    squares = [(each.square, each.covered) for each in sketches.values() if each.numel > 1]
    finite = [(square, count) for square, count in squares if math.isfinite(square)]
    return math.sqrt(sum(square for square, _ in finite) / max(1, sum(count for _, count in finite)))


def _noise(alone: Sketches, together: Sequence[Sketches]) -> set[str]:
    """Names of parameters whose gradient is a rounding error of zero in all these runs."""
    limit = _NOISE * _usual(alone)
    return {
        name
        for name, mine in alone.items()
        if all(each[name].norm < limit * math.sqrt(mine.numel) for each in (alone, *together) if name in each)
    }
