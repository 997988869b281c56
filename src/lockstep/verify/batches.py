"""Whether many workers together saw the samples that one worker saw. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lockstep.verify.comparison import Run


class Kind(Enum):
    """How the samples of a step differ from those of one worker."""

    SAME_ON_ALL = "every worker has the same samples"
    OVERLAP = "workers share samples"
    PADDED = "samples are repeated"
    LEFT_OUT = "samples are left out"
    LARGER = "the batch is larger"
    OTHER = "other samples"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first step whose samples differ."""

    step: int
    kind: Kind
    num_one: int
    """Samples that one worker had in it."""
    num_many: int
    """Samples that all workers together had in it."""
    num_repeated: int = 0
    """Samples of theirs that occur more often than one worker had them."""


def mismatch(one: Run, many: Run, num_steps: int) -> Mismatch | None:
    """The first of the first `num_steps` steps in which the samples differ; None if none does."""
    for number in range(num_steps):
        (alone,), together = samples(one, number), samples(many, number)
        if not alone or not any(together):
            continue
        kind = _kind(alone, together, _seen_before(one, many, number), _share_any(many, num_steps))
        if kind is not None:
            everybody = Counter(sample for part in together for sample in part)
            repeated = (everybody - Counter(alone)).total()
            return Mismatch(number, kind, len(alone), everybody.total(), repeated)
    return None


def samples(run: Run, number: int) -> list[list[str]]:
    """Digests of the samples of one step, by worker."""
    return [[sample for forward in step.forwards for sample in forward.samples] for step in run.steps(number)]


def _kind(alone: list[str], together: list[list[str]], before: set[str], shares_later: bool) -> Kind | None:
    wanted, parts = Counter(alone), [Counter(part) for part in together]
    everybody = sum(parts, Counter[str]())
    if everybody == wanted:
        return None
    if all(part == parts[0] for part in parts):
        return Kind.SAME_ON_ALL
    extra, missing = everybody - wanted, wanted - everybody
    overlap = any((parts[a] & parts[b]) - wanted or _twice(parts[a] & parts[b], wanted) for a, b in _pairs(len(parts)))
    if not missing and all(sample in before or sample in wanted for sample in extra):
        return Kind.PADDED
    if everybody.total() == len(parts) * wanted.total():
        return Kind.OVERLAP if overlap or shares_later else Kind.LARGER
    if overlap:
        return Kind.OVERLAP
    return Kind.LEFT_OUT if not extra else Kind.OTHER


def _twice(shared: Counter[str], wanted: Counter[str]) -> bool:
    return any(wanted[sample] < 2 for sample in shared)


def _pairs(size: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(size) for b in range(a + 1, size)]


def _seen_before(one: Run, many: Run, number: int) -> set[str]:
    parts = [part for run in (one, many) for step in range(number) for part in samples(run, step)]
    return {sample for part in parts for sample in part}


def _share_any(many: Run, num_steps: int) -> bool:
    """Whether a sample of one worker turns up on another in any step: then each takes from the whole data set."""
    by_worker: list[set[str]] = [set() for _ in many.records]
    for number in range(num_steps):
        for seen, part in zip(by_worker, samples(many, number), strict=True):
            seen.update(part)
    return any(by_worker[a] & by_worker[b] for a, b in _pairs(len(by_worker)))


def same_random_states(run: Run, num_steps: int) -> tuple[int, Sequence[int]] | None:
    """The first step in which workers that use dropout began a forward pass in the same random state, and who."""
    for number in range(num_steps):
        steps = run.steps(number)
        if not any(step.drops for step in steps):
            continue
        for passes in zip(*(step.forwards for step in steps), strict=False):
            states = [each.random_state for each in passes]
            alike = [rank for rank, state in enumerate(states) if states.count(state) > 1]
            if alike:
                return number, alike
    return None
