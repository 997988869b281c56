"""What comes of a comparison: bit-identical, equal within float tolerance, or different. Pure."""

from dataclasses import dataclass
from enum import Enum

from lockstep.verify import causes
from lockstep.verify.cause import Cause
from lockstep.verify.comparison import Comparison
from lockstep.verify.outcome import BATCH_NORM


class Kind(Enum):
    """The three verdicts, in the words in which they are given."""

    BIT_IDENTICAL = "bit-identical"
    EQUAL = "equal within float tolerance"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether many workers train as one does."""

    kind: Kind
    comparison: Comparison
    causes: tuple[Cause, ...] = ()
    """Likely causes of a difference."""

    @property
    def is_same(self) -> bool:
        """Whether the trainings are the same."""
        return self.kind is not Kind.DIFFERENT


def judge(comparison: Comparison) -> Verdict:
    """The verdict on a comparison, by what was recorded in these two runs."""
    found = list(causes.find(comparison))
    one, many = comparison.one.num_steps, comparison.many.num_steps
    if one != many and comparison.first is None and not found:
        found.append(_another_length(one, many, comparison.many.size))
    if comparison.first is not None or found:
        return Verdict(Kind.DIFFERENT, comparison, tuple(found))
    return Verdict(Kind.BIT_IDENTICAL if comparison.is_bit_identical else Kind.EQUAL, comparison)


def with_batch_norm_synced(verdict: Verdict, synced: Comparison) -> Verdict:
    """The verdict once the run on many workers was repeated with SyncBatchNorm in place of every batch norm.

    It was the cause if the first difference is gone. What then still differs has other causes, which the repeated
    run shows without it.
    """
    first, still = verdict.comparison.first, synced.first
    rest = judge(synced).causes if still is not None else ()
    is_gone = first is None or still is None or (still.step, still.relative) != (first.step, first.relative)
    others = [cause for cause in verdict.causes if cause.name != BATCH_NORM]
    batch_norm = [cause for cause in verdict.causes if cause.name == BATCH_NORM and is_gone]
    unknown = [cause for cause in rest if cause not in others]
    return Verdict(verdict.kind, verdict.comparison, (*batch_norm, *others, *unknown))


def _another_length(one: int, many: int, size: int) -> Cause:
    return Cause(
        "another number of steps",
        f"the script makes {one} steps on one worker and {many} on {size}, as far as it was followed",
        "loader = lockstep.shard(loader), which has as many batches on any number of workers",
    )
