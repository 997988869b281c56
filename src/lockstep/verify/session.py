"""One verification: the script on one worker, on many, and once more where that tells a cause from another."""

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError, WorkerFailed
from lockstep.start import command, host
from lockstep.start.failure import Failure
from lockstep.verify import record
from lockstep.verify.comparison import Comparison, Run
from lockstep.verify.outcome import BATCH_NORM
from lockstep.verify.verdict import Verdict, judge, with_batch_norm_synced


class Interrupted(Exception):
    """This process was told to end, by a signal, while workers were running."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be verified."""

    script: str
    args: Sequence[str]
    workers: int
    steps: int
    as_module: bool = False
    threads: int | None = None
    """Compute threads of each worker, in all runs: their number changes the bits of sums."""
    shows_output: bool = False


def checked(request: Request) -> Request:
    """`request`, with what was left open filled in; raises LaunchError or UsageError if it cannot be right."""
    command.python_command(request.script, request.args, as_module=request.as_module)
    if request.workers < 2:
        raise UsageError(f"{request.workers} workers: one is compared with several, so give 2 or more.")
    if request.steps < 1:
        raise UsageError(f"{request.steps} steps cannot be compared: give 1 or more.")
    return request


def verify(request: Request, announce: Callable[[str], None]) -> Verdict:
    """Run, compare, judge. `announce` is told what is done next.

    Raises WorkerFailed if the script fails, UsageError if it makes no step, Interrupted at a signal.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as folder:
        one = _run(request, 1, Path(folder) / "one", announce)
        many = _run(request, request.workers, Path(folder) / "many", announce)
        verdict = judge(Comparison(one, many))
        if any(cause.name == BATCH_NORM for cause in verdict.causes):
            announce("once more, with lockstep.SyncBatchNorm in place of every batch norm")
            try:
                synced = _run(request, request.workers, Path(folder) / "synced", announce, "--sync-batch-norm")
                verdict = with_batch_norm_synced(verdict, Comparison(one, synced))
            except WorkerFailed:
                announce("the script does not run with SyncBatchNorm, so batch norm as the cause remains a guess")
    return verdict


def _run(request: Request, size: int, folder: Path, announce: Callable[[str], None], *options: str) -> Run:
    folder.mkdir()
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
    records = [record.load(folder, rank) for rank in range(size)]
    found = [each for each in records if each is not None]
    if len(found) < size or not any(each.steps for each in found):
        raise UsageError(
            f"{request.script} made no step of a torch optimizer on {who}, so there is nothing to compare. Give it the "
            "arguments with which it trains."
        )
    if not all(each.steps for each in found):
        idle = next(each.rank for each in found if not each.steps)
        raise UsageError(f"{request.script}: worker {idle} of {size} made no step, and others did. All have to.")
    return Run(found)


def _failed(script: str, who: str, size: int, failure: Failure) -> str:
    if size == 1:  # It had the terminal to itself.
        return f"{script} failed on {who} ({failure}); what it said is above."
    what = f"{script} failed on {who}: worker {failure.rank} failed first ({failure})"
    return f"{what}; its last words:\n{failure.words}" if failure.words else f"{what}; it said nothing on stderr."
