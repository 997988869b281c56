"""One verification: the script on one worker, on many, and once more where that tells a cause; then the verdict."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from lockstep.errors import UsageError, WorkerFailed
from lockstep.start import command, host
from lockstep.start.failure import Failure
from lockstep.verify import worker_record
from lockstep.verify.causes import BATCH_NORM, Cause
from lockstep.verify.causes import find as find_causes
from lockstep.verify.comparison import Comparison, RecordedRun


class VerdictKind(Enum):
    """The three verdicts, in the words in which they are given."""

    BIT_IDENTICAL = "bit-identical"
    EQUAL = "equal within float tolerance"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class TrainingVerdict:
    """Whether many workers train as one does."""

    kind: VerdictKind
    comparison: Comparison
    causes: tuple[Cause, ...] = ()
    """Likely causes of a difference."""
    in_float64: Comparison | None = None
    """The same two runs in float64, where they were made: what is left there is no rounding."""
    failure: str = ""
    """Why they could not be made, where they were to be."""

    @property
    def is_same(self) -> bool:
        """Whether the trainings are the same."""
        return self.kind is not VerdictKind.DIFFERENT

    @property
    def may_be_rounding(self) -> bool:
        """Whether nothing but numbers says that the trainings differ: a kink, as of ReLU, makes much of rounding."""
        by_numbers = all(cause.by_numbers for cause in self.causes)
        return not self.is_same and self.comparison.first is not None and by_numbers


class Interrupted(Exception):
    """This process was told to end, by a signal, while workers were running."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    """What is to be verified."""

    script: str
    args: Sequence[str]
    workers: int
    steps: int
    as_module: bool = False
    threads: int | None = None
    """Compute threads of each worker, in all runs: their number changes the bits of sums."""
    shows_output: bool = False


def verify(request: VerifyRequest, announce: Callable[[str], None]) -> TrainingVerdict:
    """Run, compare, judge. `announce` is told what is done next.

    Raises LaunchError or UsageError if the request cannot be right, WorkerFailed if the script fails, UsageError if it
    makes no step, Interrupted at a signal.
    """
    command.python_command(request.script, request.args, as_module=request.as_module)
    if request.workers < 2:
        raise UsageError(f"{request.workers} workers: one is compared with several, so give 2 or more.")
    if request.steps < 1:
        raise UsageError(f"{request.steps} steps cannot be compared: give 1 or more.")
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        verdict = _judged(request, Path(folder), announce)
        if verdict.may_be_rounding:
            announce("once more, all in float64: is it rounding?")
            try:
                verdict = with_float64(verdict, _judged(request, Path(folder) / "float64", announce, "--float64"))
            except (WorkerFailed, UsageError) as error:
                announce("the script does not run in float64")
                verdict = replace(verdict, failure=str(error).splitlines()[-1])
    return verdict


def _judged(request: VerifyRequest, folder: Path, announce: Callable[[str], None], *options: str) -> TrainingVerdict:
    """What one comparison says, once it was tried whether syncing batch norm, where that may be it, mends it."""
    one = _run(request, 1, folder / "one", announce, *options)
    many = _run(request, request.workers, folder / "many", announce, *options)
    verdict = judge(Comparison(one, many))
    if any(cause.name == BATCH_NORM for cause in verdict.causes):
        announce("once more, with lockstep.SyncBatchNorm in place of every batch norm")
        try:
            synced = _run(request, request.workers, folder / "synced", announce, "--sync-batch-norm", *options)
            verdict = with_batch_norm_synced(verdict, Comparison(one, synced))
        except WorkerFailed:
            announce("the script does not run with SyncBatchNorm, so batch norm as the cause remains a guess")
    return verdict


def _run(
    request: VerifyRequest, size: int, folder: Path, announce: Callable[[str], None], *options: str
) -> RecordedRun:
    folder.mkdir(parents=True)
    who = "1 worker" if size == 1 else f"{size} workers"
    announce(f"running on {who}")
    flags = [*options, *(["--module"] if request.as_module else []), *(["--show"] if request.shows_output else [])]
    outcome = command.run(
        [
            *(sys.executable, "-m", "lockstep.verify.worker", *flags),
            *(str(folder), str(request.steps), request.script, *request.args),
        ],
        workers=size,
        threads=host.num_threads(request.threads, request.workers, os.environ),
    )
    if outcome.signum:
        raise Interrupted(outcome.status)
    if outcome.failure is not None:
        raise WorkerFailed(_failed(request.script, who, size, outcome.failure))
    records = [worker_record.load(folder, rank) for rank in range(size)]
    found = [each for each in records if each is not None]
    if len(found) < size or not any(each.steps for each in found):
        raise UsageError(
            f"{request.script} made no step of a torch optimizer on {who}, so there is nothing to compare. Give it the "
            "arguments with which it trains."
        )
    if not all(each.steps for each in found):
        idle = next(each.rank for each in found if not each.steps)
        raise UsageError(f"{request.script}: worker {idle} of {size} made no step, and others did. All have to.")
    return RecordedRun(found)


def _failed(script: str, who: str, size: int, failure: Failure) -> str:
    if size == 1:  # It had the terminal to itself.
        return f"{script} failed on {who} ({failure}); what it said is above."
    what = f"{script} failed on {who}: worker {failure.rank} failed first ({failure})"
    return f"{what}; its last words:\n{failure.stderr}" if failure.stderr else f"{what}; it said nothing on stderr."


def judge(comparison: Comparison) -> TrainingVerdict:
    """The verdict on a comparison, by what was recorded in these two runs."""
    found = list(find_causes(comparison))
    one, many = comparison.one.num_steps, comparison.many.num_steps
    if one != many and comparison.first is None and not found:
        length = Cause(
            "another number of steps",
            f"the script makes {one} steps on one worker and {many} on {comparison.many.size}, as far as it was "
            "followed",
            "loader = lockstep.shard(loader), which has as many batches on any number of workers",
        )
        found.append(length)
    if comparison.first is not None or found:
        return TrainingVerdict(VerdictKind.DIFFERENT, comparison, tuple(found))
    return TrainingVerdict(VerdictKind.BIT_IDENTICAL if comparison.is_bit_identical else VerdictKind.EQUAL, comparison)


def with_batch_norm_synced(verdict: TrainingVerdict, synced: Comparison) -> TrainingVerdict:
    """The verdict once the run on many workers was repeated with SyncBatchNorm in place of every batch norm.

    It was the cause if the first difference is gone. What then still differs has other causes, which the repeated
    run shows without it.
    """
    first, still = verdict.comparison.first, synced.first
    rest = judge(synced).causes if still is not None else ()
    is_gone = first is None or still is None or (still.step, still.relative) != (first.step, first.relative)
    others = [cause for cause in verdict.causes if cause.name != BATCH_NORM]
    batch_norm = [
        replace(cause, by_numbers=still is not None) for cause in verdict.causes if cause.name == BATCH_NORM and is_gone
    ]
    unknown = [cause for cause in rest if cause not in others]
    return TrainingVerdict(verdict.kind, verdict.comparison, (*batch_norm, *others, *unknown))


def with_float64(verdict: TrainingVerdict, exact: TrainingVerdict) -> TrainingVerdict:
    """The verdict once both runs were repeated in float64, where `exact` was found: that one counts.

    The tolerance is the same there. A mistake differs as much as before; rounding, by next to nothing.
    """
    kind = exact.kind if exact.kind is VerdictKind.DIFFERENT else VerdictKind.EQUAL
    return TrainingVerdict(kind, verdict.comparison, exact.causes, exact.comparison)
