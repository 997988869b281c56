"""Writing a checkpoint: one protocol, run by the training thread (`write`) or by a thread beside it (`write_async`).

Its phases, and what is left if a worker dies in one of them:

    agree    all workers, training thread: the arguments are checked, worker 0 makes the folder `.saving-...`, one
             gather tells all of them its name, or what is wrong, and another that all see it. Nothing of an earlier
             checkpoint is touched until `publish`, so dying in any phase before it leaves all of them, and a
             `.saving-...` that the next save removes (its lock went with worker 0).
    tidy     worker 0: what crashed saves left is removed, which may make the room that this one needs.
    part     each worker: its pieces, to its own file, synced to disk. If it cannot, it says so in its report.
    reports  each worker to worker 0. One that died gives none: by collectives `WorkerLost` ends the save, by letters
             worker 0's patience does, and either way worker 0 removes the folder.
    commit   worker 0: if all have reported success and their pieces cover every tensor, the manifest is written and
             synced, then the folder, then comes
      publish  one rename to `step-...`. Dying before it: as above. After it: the new checkpoint stands, whole, since
             all of it was on disk before. Where this step had been saved already, its former folder is moved aside
             first; dying between the two renames leaves it aside, where readers find it, and the next save moves it
             back. Power lost before the rename reached the disk: the former state, as a whole.
      retire   checkpoints that `keep_last` does not keep: renamed, then deleted. Dying here leaves some of them, or
             a `.removed-...`; the next save deletes both.
    verdict  worker 0 to all: they raise the same CheckpointError, or none. A worker that dies here changes nothing.

By letters (see `exchange`) nothing in a thread waits for a collective, so training and saving cannot block each other.
"""

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from os import PathLike, fsync
from pathlib import Path

from lockstep.errors import CheckpointError
from lockstep.keep import manifest, part, shelf
from lockstep.keep.exchange import Collectives, Exchange, Letters, Workers
from lockstep.keep.host_memory import HostMemory
from lockstep.keep.part import Report
from lockstep.keep.piece import Piece
from lockstep.keep.plan import Plan, agree

DEFAULT_PATIENCE = timedelta(minutes=10)


def write(
    folder: str | PathLike[str],
    *,
    step: int,
    pieces: Sequence[Piece],
    tree: object,
    world: Workers,
    keep_last: int | None = None,
) -> Path:
    """Save a checkpoint as `folder/step-...`, and return that path when it is on disk. Called by every worker.

    step, tree, keep_last: the same on all of them. tree: nested dicts and lists of what JSON knows; see `keep.tree`.
    pieces: this worker's; together they hold every element of every tensor once. They are not copied.
    folder: on storage that all workers share; worker 0's counts.
    keep_last: checkpoints to keep, this one included; those of earlier steps are deleted when it stands. None: all.

    Raises the same error on every worker, and leaves nothing of this save, if any worker cannot do its part:
    CheckpointError for disks and files, UsageError for arguments. Training can go on after either.
    """
    plan, _ = agree(Path(folder).absolute(), step, tree, world, keep_last, lambda: part.rows(pieces))
    return _carry_out(plan, pieces, Collectives(world))


def write_async(
    folder: str | PathLike[str],
    *,
    step: int,
    pieces: Sequence[Piece],
    tree: object,
    world: Workers,
    keep_last: int | None = None,
    memory: HostMemory | None = None,
    patience: timedelta = DEFAULT_PATIENCE,
    has_lost: Callable[[], bool] = lambda: False,
) -> "Saving":
    """As `write`, but return as soon as the pieces are copied, while a thread does the rest.

    memory: where the copies go. Keep one and give it to every save; a save that still uses it is waited for.
    patience: how long the folder may be without any change before silent workers are given up.
    has_lost: whether a worker is known to be gone; then silence is not borne for long.

    Arguments that cannot be right raise here. What fails later is raised by `Saving.wait`. A script that ends waits
    for its saves.
    """
    memory = memory or HostMemory()

    def prepare() -> list[Piece]:
        part.rows(pieces)
        return memory.copy(pieces)

    memory.claim()
    try:
        plan, copies = agree(Path(folder).absolute(), step, tree, world, keep_last, prepare)
    except BaseException:
        memory.release()
        raise
    return Saving(plan, copies, memory, Letters(plan.workplace, plan.rank, plan.size, patience, has_lost))


class Saving:
    """A checkpoint that is being written by a thread."""

    def __init__(self, plan: Plan, copies: Sequence[Piece], memory: HostMemory, letters: Letters) -> None:
        self.step = plan.step
        """The step whose state is being saved."""
        self._result = _Result(plan.step)
        # Not a daemon: a script that ends without waiting still gets its last checkpoint.
        self._thread = threading.Thread(
            target=_run, args=(self._result, plan, copies, memory, letters), name=f"lockstep-save-{plan.step}"
        )
        self._thread.start()

    def done(self) -> bool:
        """Whether the save has ended on this worker, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The checkpoint's path, when it stands. Raises CheckpointError, on every worker, if it cannot be written."""
        self._thread.join()
        self._result.was_asked = True
        if self._result.error is not None:
            raise self._result.error
        assert self._result.path is not None
        return self._result.path


@dataclass(slots=True)
class _Result:
    """How a save ended: shared by the Saving and its thread, so that whichever is the last to go can speak up."""

    step: int
    path: Path | None = None
    error: BaseException | None = None
    was_asked: bool = False

    def __del__(self) -> None:
        if self.error is not None and not self.was_asked:
            reason = f"{type(self.error).__name__}: {self.error}"
            warnings.warn(f"the checkpoint of step {self.step} was not written. {reason}", stacklevel=1)


def _carry_out(plan: Plan, pieces: Sequence[Piece], exchange: Exchange) -> Path:
    """The phases after `agree`. Returns the checkpoint's path or raises the CheckpointError that all workers raise."""
    try:
        if plan.held:
            _tidy(plan)
        report = part.write(shelf.parts_of(plan.workplace), plan.rank, plan.size, plan.step, pieces)
        failure = exchange.verdict(_judge(plan, report, exchange))
    except OSError as error:
        raise CheckpointError(part.describe(error, plan.rank, plan.workplace)) from error
    finally:
        if plan.held:
            plan.held.close()
    if failure:
        raise CheckpointError(failure)
    return plan.root / shelf.name_of(plan.step)


def _judge(plan: Plan, report: Report, exchange: Exchange) -> str:
    """Report, and on worker 0 commit; what kept it from that, as text for all the others."""
    if not plan.held:
        exchange.reports(report)
        return ""
    try:
        _commit(plan, exchange.reports(report))
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return part.describe(error, plan.rank, plan.workplace)
    return ""


def _tidy(plan: Plan) -> None:
    try:
        shelf.tidy(plan.root)
    except OSError as error:
        warnings.warn(f"what an earlier save left could not be removed: {error}", stacklevel=2)


def _commit(plan: Plan, reports: Sequence[Report]) -> None:
    """Make the parts a checkpoint. Raises CheckpointError, with nothing changed, if they are none."""
    failed = [report for report in reports if report.failure]
    if failed:
        others = f" ({len(failed) - 1} more of {plan.size} workers failed too.)" if len(failed) > 1 else ""
        raise CheckpointError(f"no checkpoint: {failed[0].failure}{others} Earlier checkpoints are as they were.")
    parts = shelf.parts_of(plan.workplace)
    try:
        text = manifest.assemble(reports, plan.step, plan.plain_tree)
        with (parts / manifest.NAME).open("x") as file:
            file.write(text)
            file.flush()
            fsync(file.fileno())
        shelf.publish(parts, plan.root, plan.step)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"no checkpoint: {part.describe(error, 0, parts / manifest.NAME)}") from error
    if plan.keep_last is not None:
        try:
            shelf.retire(plan.root, plan.step, plan.keep_last)
        except OSError as error:
            warnings.warn(f"the new checkpoint stands, but an old one could not be removed: {error}", stacklevel=2)


def _run(result: _Result, plan: Plan, copies: Sequence[Piece], memory: HostMemory, letters: Letters) -> None:
    """What the thread does. It knows the result and not the Saving, which can so be dropped while it runs."""
    try:
        memory.wait_copied()
        result.path = _carry_out(plan, copies, letters)
    except BaseException as error:
        result.error = error
    finally:
        memory.release()
        # The error's traceback holds this frame: without this, error and result would keep each other alive.
        del result
