"""What the system lets a process have, in words that say what to change: file handles, /dev/shm, a temporary folder.

Needs no torch.
"""

import contextlib
import os
import resource
import tempfile
from collections.abc import Iterator

from lockstep.errors import LaunchError, LockstepError

MOST_FILES = 65_536
_FULL_SHM = ("unable to allocate shared memory", "unable to write to file </torch", "Bus error", "out of shared memory")
"""What torch says of a full /dev/shm: by errors of its own, or of a process that the system has killed."""


def require_file_handles(number: int, who: str) -> None:
    """Raise LaunchError if this process cannot open `number` files more: what waits for one may try without end."""
    opened: list[int] = []
    try:
        while len(opened) < number:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise LaunchError(
            f"{who} needs {number} more file handles, and there are {len(opened)}: {error.strerror}. Raise the limit "
            "(`ulimit -n 4096`), or start fewer workers."
        ) from None
    finally:
        for fd in opened:
            os.close(fd)


def raise_file_handles() -> None:
    """Let this process, and what it starts, open as many files as it may allow itself, up to MOST_FILES.

    Strangers who connect to a port of torch's store take one each, and the usual limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def explain(error: BaseException, who: str) -> LockstepError | None:
    """An error of our own for one that says that a limit was reached; None for any other."""
    text = str(error)
    if "Too many open files" in text:
        return LockstepError(f"{who} ran out of file handles: too many open files. Raise the limit (`ulimit -n 4096`).")
    if any(part in text for part in _FULL_SHM):
        return LockstepError(
            f"{who} ran out of shared memory{_room('/dev/shm')}, through which loader processes hand over batches. "
            "Make it larger (docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm), or keep fewer batches "
            "there (num_workers, prefetch_factor)."
        )
    return None


@contextlib.contextmanager
def explained(who: str) -> Iterator[None]:
    """Within it, errors that say that a limit was reached are raised in our words."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        ours = None if isinstance(error, LockstepError) else explain(error, who)
        if ours is None:
            raise
        raise ours from error


def require_temporary_folder(who: str) -> None:
    """Raise LockstepError if nothing can be written there: a loader process that cannot is waited for without end."""
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"\0")
    except OSError as error:
        raise LockstepError(
            f"{who} found no temporary folder that can be written to, full or read-only: {error}. Point TMPDIR at one "
            "that can."
        ) from error


def _room(folder: str) -> str:
    """How large a file system is, and what is left of it."""
    try:
        there = os.statvfs(folder)
    except OSError:
        return ""
    size, free = there.f_blocks * there.f_frsize / 1e6, there.f_bavail * there.f_frsize / 1e6
    return f" ({folder} has {size:.0f} MB, of which {free:.0f} are free)"
