"""One verification: the script on one worker, on many, and once more where that tells a cause; then the verdict."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError, WorkerFailed
from lockstep.start import command, host
from lockstep.verify import worker_record
from lockstep.verify.causes import BATCH_NORM, Cause
from lockstep.verify.causes import find as find_causes
from lockstep.verify.comparison import Comparison, RecordedRun
from lockstep.watching.number_format import counted


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
class VerifiedScript:
    """The script that is verified, and how each of its runs is started."""

    path: str
    args: Sequence[str]
    workers: int
    as_module: bool = False
    threads: int | None = None
    """Compute threads of each worker, in all runs: their number changes the bits of sums."""
    shows_output: bool = False

    def run(self, size: int, folder: Path, steps: int, args: Sequence[str], *options: str, **how: Any) -> None:
        """Run it on `size` workers, with a recorder beside each that writes into `folder`: see worker.py.

        options: of the recorder. how: to be run, as `start.command.run` takes it. Raises WorkerFailed if it fails, and
        Interrupted at a signal.
        """
        flags = [*options, *(["--module"] if self.as_module else []), *(["--show"] if self.shows_output else [])]
        outcome = command.run(
            [sys.executable, "-m", "lockstep.verify.worker", *flags, str(folder), str(steps), self.path, *args],
            workers=size,
            threads=host.num_threads(self.threads, self.workers, os.environ),
            **how,
        )
        if outcome.signum:
            raise Interrupted(outcome.status)
        failure = outcome.failure
        if failure is None:
            return
        where = f"{self.path} failed on {counted(size, 'worker')}"
        if size == 1:  # It had the terminal to itself.
            raise WorkerFailed(f"{where} ({failure}); what it said is above.")
        what = f"{where}: worker {failure.rank} failed first ({failure})"
        raise WorkerFailed(
            f"{what}; its last words:\n{failure.stderr}" if failure.stderr else f"{what}; it said nothing on stderr."
        )


def verify(script: VerifiedScript, steps: int, announce: Callable[[str], None]) -> TrainingVerdict:
    """Run, compare, judge. `announce` is told what is done next.

    Raises LaunchError or UsageError if the request cannot be right, WorkerFailed if the script fails, UsageError if it
    makes no step, Interrupted at a signal.
    """
    command.python_command(script.path, script.args, as_module=script.as_module)  # Refuses one that is not there.
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        runs = _Runs(script, steps, Path(folder), announce)
        verdict = runs.judged()
        if verdict.may_be_rounding:
            announce("once more, all in float64: is it rounding?")
            try:
                verdict = with_float64(verdict, runs.judged("--float64"))
            except (WorkerFailed, UsageError) as error:
                announce("the script does not run in float64")
                verdict = replace(verdict, failure=str(error).splitlines()[-1])
    return verdict


@dataclass(frozen=True, slots=True)
class _Runs:
    """The runs of one verification."""

    script: VerifiedScript
    steps: int
    folder: Path
    announce: Callable[[str], None]

    def judged(self, *options: str) -> TrainingVerdict:
        """What one comparison says, once it was tried whether syncing batch norm, where that may be it, mends it."""
        one, many = self._run(1, *options), self._run(self.script.workers, *options)
        verdict = judge(Comparison(one, many))
        if any(cause.name == BATCH_NORM for cause in verdict.causes):
            self.announce("once more, with lockstep.SyncBatchNorm in place of every batch norm")
            try:
                synced = self._run(self.script.workers, "--sync-batch-norm", *options)
                verdict = with_batch_norm_synced(verdict, Comparison(one, synced))
            except WorkerFailed:
                self.announce("the script does not run with SyncBatchNorm, so batch norm as the cause remains a guess")
        return verdict

    def _run(self, size: int, *options: str) -> RecordedRun:
        who = counted(size, "worker")
        self.announce(f"running on {who}")
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        self.script.run(size, folder, self.steps, self.script.args, *options)
        found = worker_record.load(folder)
        if len(found) < size or not any(each.steps for each in found):
            raise UsageError(
                f"{self.script.path} made no step of a torch optimizer on {who}, so there is nothing to compare. Give "
                "it the arguments with which it trains."
            )
        if not all(each.steps for each in found):
            idle = next(each.rank for each in found if not each.steps)
            raise UsageError(f"{self.script.path}: worker {idle} of {size} made no step, and others did. All have to.")
        return RecordedRun(found)


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
    is_identical = all(each.same_bits for each in comparison.differences)
    return TrainingVerdict(VerdictKind.BIT_IDENTICAL if is_identical else VerdictKind.EQUAL, comparison)


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
