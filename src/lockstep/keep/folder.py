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
from pathlib import Path

STEP = re.compile(r"step-(\d{9,})")
REPLACED = re.compile(r"\.replaced-step-(\d{9,})")
SAVING = re.compile(r"\.saving-step-\d{9,}-[0-9a-f]{16}")
REMOVED = re.compile(r"\.removed-[0-9a-f]{16}")


def name_of(step: int) -> str:
    """Name of the folder with the checkpoint of `step`."""
    return f"step-{step:09d}"


def checkpoints(root: Path) -> dict[int, Path]:
    """The checkpoints in `root` by step, the latest first. Raises OSError if there is no such folder.

    Between the two renames of a replacement, and after a crash there, the former checkpoint counts.
    """
    # A listing is no snapshot. Whoever misses a step in the first one, because it was being replaced, sees the former
    # checkpoint in the second, or the new one in the third.
    found: dict[int, Path] = {}
    for pattern in (STEP, REPLACED, STEP):
        for path in root.iterdir():
            if match := pattern.fullmatch(path.name):
                step = int(match[1])
                if pattern is STEP or step not in found:
                    found[step] = path
    return dict(sorted(found.items(), reverse=True))


class SaveFolder:
    """The folder of one save under way: `parts` becomes the checkpoint, in `letters` the workers' threads leave word.

    Worker 0 makes it, and holds a lock on it as long as it lives. The lock, and not the name, tells a save that is
    under way from one that crashed: it goes with its process.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parts = path / "parts"
        self.letters = path / "letters"
        self._lock: int | None = None

    @staticmethod
    def make(root: Path, step: int) -> "SaveFolder":
        """A new one in `root`, which is made too where it is missing. Called by worker 0."""
        if not root.exists():
            root.mkdir(parents=True, exist_ok=True)
            sync(root.parent)
        made = SaveFolder(root / f".saving-{name_of(step)}-{secrets.token_hex(8)}")
        made.path.mkdir()
        made._lock = os.open(made.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _lock(made._lock)
            made.parts.mkdir()
            made.letters.mkdir()
            made.verdict_draft.touch()
        except OSError:
            made.close()
            raise
        return made

    @property
    def verdict_draft(self) -> Path:
        """What worker 0 gives its verdict by: there from the start, so that it needs no room for another file then."""
        return self.letters / ".verdict"

    def report_draft(self, rank: int) -> Path:
        """What worker `rank` reports by: empty, and under this name, until it does."""
        return self.letters / f".worker-{rank}"

    def close(self) -> None:
        """Remove, on worker 0, what is left: everything after a failure, nothing but letters after a success."""
        if self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)


def tidy(root: Path) -> None:
    """Remove what crashed saves left in `root`, and undo half a replacement. Called by worker 0 before it writes."""
    for path in list(root.iterdir()):
        if REMOVED.fullmatch(path.name) or (SAVING.fullmatch(path.name) and not _is_locked(path)):
            _remove(path)
        elif REPLACED.fullmatch(path.name):
            replaced = root / path.name.removeprefix(".replaced-")
            if replaced.exists():
                _remove(path)
            else:
                path.rename(replaced)


def publish(parts: Path, root: Path, step: int) -> None:
    """Make the complete folder `parts` the checkpoint of `step`, in place of a former one. Raises OSError."""
    final, former = root / name_of(step), root / f".replaced-{name_of(step)}"
    sync(parts)
    if os.path.lexists(final):
        final.rename(former)
    try:
        parts.rename(final)
    except OSError:
        if os.path.lexists(former):
            former.rename(final)
        raise
    sync(root)
    _remove(former)


def retire(root: Path, step: int, keep_last: int) -> None:
    """Remove checkpoints of earlier steps until, with that of `step`, `keep_last` are left."""
    earlier = [path for other, path in checkpoints(root).items() if other < step]
    for path in earlier[keep_last - 1 :]:
        removed = root / f".removed-{secrets.token_hex(8)}"
        path.rename(removed)
        _remove(removed)


def sync(folder: Path) -> None:
    """Return when the names in `folder` are on disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    """Delete a folder as far as that is possible; of a link, the link."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


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
