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

By letters (see `coordination`) no thread waits for a collective, so training and saving cannot block each other.
"""

import threading
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from os import PathLike, fsync
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import CheckpointError, UsageError
from lockstep.keep import folder as folders
from lockstep.keep import json_tree, manifest, tensor_file
from lockstep.keep.coordination import Letters
from lockstep.keep.folder import SaveFolder
from lockstep.keep.manifest import FileEntry, PartReport, PiecePlace, TensorEntry
from lockstep.keep.pieces import HostMemory, Piece
from lockstep.keep.tensor_file import Spec, describe
from lockstep.world import World

DEFAULT_PATIENCE = timedelta(minutes=10)

Prepared = TypeVar("Prepared")
Reports = Callable[[PartReport], list[PartReport]]
"""Gives this worker's report; on worker 0, returns those of all."""


def write(
    folder: str | PathLike[str],
    *,
    step: int,
    pieces: Sequence[Piece],
    tree: object,
    world: World,
    keep_last: int | None = None,
) -> Path:
    """Save a checkpoint as `folder/step-...`, and return that path when it is on disk. Called by every worker.

    step, tree, keep_last: the same on all of them. tree: nested dicts and lists of plain values (`json_tree`).
    pieces: this worker's; together they hold every element of every tensor once. They are not copied.
    folder: on storage that all workers share; worker 0's counts.
    keep_last: checkpoints to keep, this one included; those of earlier steps are deleted when it stands. None: all.

    Raises the same error on every worker, and leaves nothing of this save, if any worker cannot do its part:
    CheckpointError for disks and files, UsageError for arguments. Training can go on after either.
    """
    plan, _ = _agree(Path(folder), step, tree, world, keep_last, lambda: _keys(pieces))

    def reports(report: PartReport) -> list[PartReport]:
        return [PartReport.from_json(each) for each in world.gather_json(report.to_json())]

    return _carry_out(plan, pieces, reports, lambda failure: str(world.gather_json(failure)[0]))


def write_async(
    folder: str | PathLike[str],
    *,
    step: int,
    pieces: Sequence[Piece],
    tree: object,
    world: World,
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
        _keys(pieces)
        return memory.copy(pieces)

    memory.claim()
    try:
        plan, copies = _agree(Path(folder), step, tree, world, keep_last, prepare)
    except BaseException:
        memory.release()
        raise
    return Saving(plan, copies, memory, Letters(plan.folder, plan.rank, plan.size, patience, has_lost))


class Saving:
    """A checkpoint that is being written by a thread."""

    def __init__(self, plan: "SavePlan", copies: Sequence[Piece], memory: HostMemory, letters: Letters) -> None:
        self.step = plan.step
        """The step whose state is being saved."""
        self._result = SaveResult(plan.step)
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
class SaveResult:
    """How a save ended: shared by the Saving and its thread, so that whichever is the last to go can speak up."""

    step: int
    path: Path | None = None
    error: BaseException | None = None
    was_asked: bool = False

    def __del__(self) -> None:
        if self.error is not None and not self.was_asked:
            reason = f"{type(self.error).__name__}: {self.error}"
            warnings.warn(f"the checkpoint of step {self.step} was not written. {reason}", stacklevel=1)


def _run(result: SaveResult, plan: "SavePlan", copies: Sequence[Piece], memory: HostMemory, letters: Letters) -> None:
    """What the thread does. It knows the result and not the Saving, which can so be dropped while it runs."""
    try:
        memory.wait_copied()
        result.path = _carry_out(plan, copies, letters.reports, letters.verdict)
    except BaseException as error:
        result.error = error
    finally:
        memory.release()
        # The error's traceback holds this frame: without this, error and result would keep each other alive.
        del result


# Agreeing: the only phase that always uses collectives, and so runs in the thread that trains.


@dataclass(frozen=True, slots=True)
class SavePlan:
    """A save that all workers have agreed to make."""

    folder: SaveFolder
    step: int
    plain_tree: Any
    """The tree as JSON holds it."""
    keep_last: int | None
    rank: int
    size: int

    @property
    def root(self) -> Path:
        """The folder that the checkpoint will stand in."""
        return self.folder.path.parent


@dataclass(frozen=True, slots=True)
class Opening:
    """What a worker tells the others before anything is written."""

    folder: str
    """Of the save, as worker 0 has made it; empty on others."""
    step: int
    tree_crc32: int
    failure: str
    is_usage: bool
    """Whether the failure is a mistake in the call."""


def _agree(
    root: Path, step: int, tree: object, world: World, keep_last: int | None, prepare: Callable[[], Prepared]
) -> tuple[SavePlan, Prepared]:
    """Check the arguments, `prepare`, make the save's folder and tell the others; called by every worker.

    Raises the same error on all of them if one fails or if they do not mean the same checkpoint.
    """
    root = root.absolute()
    made, prepared, plain, failure = None, None, None, ""
    cause: Exception | None = None
    try:
        _check(step, keep_last)
        plain = json_tree.encode(tree)
        prepared = prepare()
        if world.rank == 0:
            made = SaveFolder.make(root, step)
    except Exception as error:
        cause = error
        failure = f"worker {world.rank} {describe(error, root)}"
        if not isinstance(error, OSError):
            failure = f"worker {world.rank}: {error}"
    try:
        path, crc32 = str(made.path) if made else "", zlib.crc32(json_tree.canonical(plain))
        told = world.gather_json([path, step, crc32, failure, isinstance(cause, UsageError)])
        openings = [Opening(*theirs) for theirs in told]
        _compare(openings, cause)
        folder = made or SaveFolder(Path(openings[0].folder))
        _lay_out_letters(folder, world)
    except BaseException:
        if made:
            made.close()
        raise
    assert prepared is not None
    return SavePlan(folder, step, plain, keep_last, world.rank, world.size), prepared


def _check(step: int, keep_last: int | None) -> None:
    if type(step) is not int or step < 0:
        raise UsageError(f"step={step!r}: the number of a step is a whole number from 0.")
    if keep_last is not None and keep_last < 1:
        raise UsageError(f"keep_last={keep_last}: at least the checkpoint that is being written is kept.")


def _compare(openings: Sequence[Opening], cause: Exception | None) -> None:
    failed = [opening for opening in openings if opening.failure]
    if failed:
        kind = UsageError if failed[0].is_usage else CheckpointError
        raise kind(failed[0].failure) from cause
    for rank, opening in enumerate(openings):
        if opening.step != openings[0].step:
            raise UsageError(f"worker 0 saves step {openings[0].step} and worker {rank} step {opening.step}.")
        if opening.tree_crc32 != openings[0].tree_crc32:
            raise UsageError(
                f"worker {rank} saves another tree than worker 0. It must be the same on all workers: give what "
                "differs as pieces, or as a list of all workers' values."
            )


def _lay_out_letters(folder: SaveFolder, world: World) -> None:
    """Every worker makes the empty letter that it will report by, where worker 0 has made the folder.

    A worker that later finds no room, not even for a file, can still rename the letter and so say that it has failed.
    """
    failure = ""
    try:
        folder.report_draft(world.rank).touch(exist_ok=False)
    except OSError as error:
        is_there = folder.path.is_dir()
        failure = f"worker {world.rank} {describe(error, folder.path)}" if is_there else "blind"
    said = world.gather_json(failure)
    blind = [str(rank) for rank, failure in enumerate(said) if failure == "blind"]
    if blind:
        raise CheckpointError(
            f"worker {', '.join(blind)} does not see {folder.path}, which worker 0 has made. Save to a folder on "
            "storage that all workers share, by a path that means the same on all of them."
        )
    if any(said):
        raise CheckpointError(f"no checkpoint: {next(filter(None, said))} Earlier checkpoints are as they were.")


# Carrying out: in whichever thread.


def _carry_out(plan: SavePlan, pieces: Sequence[Piece], reports: Reports, verdict: Callable[[str], str]) -> Path:
    """The phases after `agree`. Returns the checkpoint's path or raises the CheckpointError that all workers raise.

    reports, verdict: how workers hear of each other, see `coordination`.
    """
    try:
        if plan.rank == 0:
            _tidy(plan)
        failure = verdict(_judge(plan, _write_part(plan, pieces), reports))
    except OSError as error:
        raise CheckpointError(f"worker {plan.rank} {describe(error, plan.folder.path)}") from error
    finally:
        plan.folder.close()
    if failure:
        raise CheckpointError(failure)
    return plan.root / folders.name_of(plan.step)


def _tidy(plan: SavePlan) -> None:
    try:
        folders.tidy(plan.root)
    except OSError as error:
        warnings.warn(f"what an earlier save left could not be removed: {error}", stacklevel=2)


def _keys(pieces: Sequence[Piece]) -> list[str]:
    """The names of `pieces` in their worker's file. Raises UsageError for what cannot be written.

    A tensor of which a worker has one piece keeps its name there; with several, their offsets are added to it.
    """
    held = Counter(piece.name for piece in pieces)
    keys = []
    kinds: dict[str, tuple[object, object]] = {}
    for piece in pieces:
        piece.check()
        tensor_file.check_dtype(piece.name, piece.flat.dtype)
        kind = (tuple(piece.shape), piece.flat.dtype)
        if kinds.setdefault(piece.name, kind) != kind:
            raise UsageError(f"the pieces of {piece.name!r} are of {kinds[piece.name]} and of {kind}: give one tensor.")
        keys.append(piece.name if held[piece.name] == 1 else f"{piece.name}@{piece.begin}")
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if repeated:
        raise UsageError(f"this worker has two pieces that would both be called {repeated[0]!r}: give each once.")
    return keys


def _write_part(plan: SavePlan, pieces: Sequence[Piece]) -> PartReport:
    """Write this worker's file. Never raises: a failure is part of the report, and leaves no file."""
    name = f"worker-{plan.rank:05d}-of-{plan.size:05d}.safetensors"
    path = plan.folder.parts / name
    metadata = {"format": "pt", "lockstep": "part of a checkpoint: see manifest.json", "step": str(plan.step)}
    try:
        flats = dict(zip(_keys(pieces), (piece.flat for piece in pieces), strict=True))
        specs = {key: Spec(flat.dtype, tuple(flat.shape)) for key, flat in flats.items()}
        num_bytes, crc32 = tensor_file.write(path, specs, lambda key: (flats[key],), metadata)
    except Exception as error:
        # The file goes first: on a full disk it makes the room that the report needs.
        tensor_file.remove(path)
        return PartReport(plan.rank, f"worker {plan.rank} {describe(error, path)}")
    tensors: dict[str, TensorEntry] = {}
    for key, piece in zip(flats, pieces, strict=True):
        places = tensors[piece.name].places if piece.name in tensors else ()
        if piece.flat.numel():  # A tensor without elements has no places.
            places = (*places, PiecePlace(name, key, piece.begin, piece.flat.numel()))
        tensors[piece.name] = TensorEntry(tuple(piece.shape), piece.flat.dtype, places)
    return PartReport(plan.rank, "", {name: FileEntry(num_bytes, crc32)}, tensors)


def _judge(plan: SavePlan, report: PartReport, reports: Reports) -> str:
    """Report, and on worker 0 commit; what kept it from that, as text for all the others."""
    if plan.rank:
        reports(report)
        return ""
    try:
        _commit(plan, reports(report))
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"worker 0 {describe(error, plan.folder.path)}"
    return ""


def _commit(plan: SavePlan, reports: Sequence[PartReport]) -> None:
    """Make the parts a checkpoint. Raises CheckpointError, with nothing changed, if they are none."""
    failed = [report for report in reports if report.failure]
    if failed:
        ranks = ", ".join(str(report.rank) for report in failed[1:])
        others = f" ({len(failed) - 1} more of {plan.size} workers failed too: {ranks}.)" if ranks else ""
        raise CheckpointError(f"no checkpoint: {failed[0].failure}{others} Earlier checkpoints are as they were.")
    path = plan.folder.parts / manifest.NAME
    try:
        text = manifest.assemble(reports, plan.step, plan.plain_tree)
        with path.open("x") as file:
            file.write(text)
            file.flush()
            fsync(file.fileno())
        folders.publish(plan.folder.parts, plan.root, plan.step)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"no checkpoint: worker 0 {describe(error, path)}") from error
    if plan.keep_last is not None:
        try:
            folders.retire(plan.root, plan.step, plan.keep_last)
        except OSError as error:
            warnings.warn(f"the new checkpoint stands, but an old one could not be removed: {error}", stacklevel=2)
