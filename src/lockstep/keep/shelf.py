"""The folder that checkpoints of one run stand in: names, renames, and what crashed saves leave behind.

    step-000000123                  a whole checkpoint: folders get this name only when everything in them is on disk
    .saving-step-000000123-<token>  a save under way (`parts` becomes the checkpoint), or what is left of one
    .replaced-step-000000123        the former checkpoint of a step that is being saved again
    .removed-<token>                on its way out

A checkpoint appears and goes by one rename, so that at every moment each of them is there as a whole or not at all.
"""

import fcntl
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

STEP = re.compile(r"step-(\d{9,})")
REPLACED = re.compile(r"\.replaced-(step-\d{9,})")
SAVING = re.compile(r"\.saving-step-\d{9,}-[0-9a-f]{16}")
REMOVED = re.compile(r"\.removed-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Standing:
    """A checkpoint on the shelf."""

    step: int
    path: Path


def name_of(step: int) -> str:
    """Name of the folder with the checkpoint of `step`."""
    return f"step-{step:09d}"


def standing(root: Path) -> list[Standing]:
    """The checkpoints in `root`, the one of the latest step first. Raises OSError if there is no such folder.

    Between the two renames of a replacement, and after a crash there, the former checkpoint counts.
    """
    # A listing is no snapshot. Whoever misses a step in the first one, because it was being replaced, sees the former
    # checkpoint in the second, or the new one in the third.
    found: dict[int, Standing] = {}
    for pattern in (STEP, REPLACED, STEP):
        for path in root.iterdir():
            if match := pattern.fullmatch(path.name):
                step = int(match[1].removeprefix("step-"))
                if pattern is STEP or step not in found:
                    found[step] = Standing(step, path)
    return sorted(found.values(), key=lambda one: -one.step)


class Workplace:
    """The folder of one save under way, made by worker 0, which holds a lock on it as long as it lives.

    The lock, and not the name, tells a save that is under way from one that crashed: it goes with its process.
    """

    def __init__(self, root: Path, step: int) -> None:
        if not root.exists():
            root.mkdir(parents=True, exist_ok=True)
            sync(root.parent)
        self.path = root / f".saving-{name_of(step)}-{secrets.token_hex(8)}"
        self.path.mkdir()
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock(self._lock)
            parts_of(self.path).mkdir()
            letters_of(self.path).mkdir()
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Remove what is left here: everything after a failure, nothing but letters after a success."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def parts_of(workplace: Path) -> Path:
    """Where the files of the checkpoint are written."""
    return workplace / "parts"


def letters_of(workplace: Path) -> Path:
    """Where the workers' threads leave word for each other."""
    return workplace / "letters"


def tidy(root: Path) -> None:
    """Remove what crashed saves left in `root`, and undo half a replacement. Called by worker 0 before it writes."""
    for path in list(root.iterdir()):
        if REMOVED.fullmatch(path.name) or (SAVING.fullmatch(path.name) and not _is_locked(path)):
            shutil.rmtree(path, ignore_errors=True)
        elif match := REPLACED.fullmatch(path.name):
            if (root / match[1]).exists():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.rename(root / match[1])


def publish(parts: Path, root: Path, step: int) -> Path:
    """Make the complete folder `parts` the checkpoint of `step`, in place of a former one. Raises OSError."""
    final, former = root / name_of(step), root / f".replaced-{name_of(step)}"
    sync(parts)
    if final.exists():
        final.rename(former)
    try:
        parts.rename(final)
    except OSError:
        if former.exists():
            former.rename(final)
        raise
    sync(root)
    shutil.rmtree(former, ignore_errors=True)
    return final


def retire(root: Path, step: int, keep_last: int) -> None:
    """Remove checkpoints of earlier steps until, with that of `step`, `keep_last` are left."""
    earlier = [one for one in standing(root) if one.step < step]
    for one in earlier[keep_last - 1 :]:
        removed = root / f".removed-{secrets.token_hex(8)}"
        one.path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def sync(folder: Path) -> None:
    """Return when the names in `folder` are on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_locked(path: Path) -> bool:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        return not _lock(handle)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Whether nobody else has the lock. Where a file system has no locks, nobody has."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
