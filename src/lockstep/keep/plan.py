"""What the workers agree on before anything is written: the step, the tree, and where to write.

This is the only part of a save that always uses collectives, and so runs in the thread that trains.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lockstep.errors import CheckpointError, UsageError
from lockstep.keep import part, shelf, tree
from lockstep.keep.exchange import Workers

Prepared = TypeVar("Prepared")


@dataclass(frozen=True, slots=True)
class Plan:
    """A save that all workers have agreed to make."""

    root: Path
    """The folder that the checkpoint will stand in."""
    workplace: Path
    """The folder of this save, until then."""
    step: int
    plain_tree: Any
    """The tree as JSON holds it."""
    keep_last: int | None
    rank: int
    size: int
    held: shelf.Workplace | None
    """The workplace as its maker, worker 0, holds it."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a worker tells the others before anything is written."""

    workplace: str
    step: int
    tree_crc32: int
    failure: str
    is_usage: bool
    """Whether the failure is a mistake in the call."""


def agree(
    root: Path,
    step: int,
    content: object,
    world: Workers,
    keep_last: int | None,
    prepare: Callable[[], Prepared],
) -> tuple[Plan, Prepared]:
    """Check the arguments, `prepare`, make the workplace and tell the others; called by every worker.

    Raises the same error on all of them if one fails or if they do not mean the same checkpoint.
    """
    held, prepared, plain, failure = None, None, None, ""
    cause: Exception | None = None
    try:
        _check(step, keep_last)
        plain = tree.encode(content)
        prepared = prepare()
        if world.rank == 0:
            held = shelf.Workplace(root, step)
    except Exception as error:
        is_file = isinstance(error, OSError)
        failure = part.describe(error, world.rank, root) if is_file else f"worker {world.rank}: {error}"
        cause = error
    try:
        opening = Opening(
            str(held.path) if held else "",
            step,
            zlib.crc32(tree.canonical(plain)),
            failure,
            isinstance(cause, UsageError),
        )
        openings = world.gather(opening)
        _compare(openings, cause)
        workplace = Path(openings[0].workplace)
        _check_shared(workplace, world)
    except BaseException:
        if held:
            held.close()
        raise
    assert prepared is not None
    return Plan(workplace.parent, workplace, step, plain, keep_last, world.rank, world.size, held), prepared


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


def _check_shared(workplace: Path, world: Workers) -> None:
    blind = [str(rank) for rank, sees in enumerate(world.gather(workplace.is_dir())) if not sees]
    if blind:
        raise CheckpointError(
            f"worker {', '.join(blind)} does not see {workplace}, which worker 0 has made. Save to a folder on storage "
            "that all workers share, by a path that means the same on all of them."
        )
