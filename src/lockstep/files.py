"""Files of a folder that a stranger may have filled: regular ones only, read up to a bound.

A link may lead out of the folder, a pipe has no end, a device neither: none of them is opened. Needs no torch.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path, *, buffering: int = -1) -> BinaryIO:
    """The file `path` itself, opened for reading; raises OSError, without waiting, if it is a link, pipe or device."""
    try:
        # Without O_NONBLOCK opening a pipe that nobody writes to does not return.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise not_regular(path) if error.errno == errno.ELOOP else error from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise not_regular(path)
    return os.fdopen(handle, "rb", buffering=buffering)


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """All of the regular file `path`; raises OSError if that is more than `most_bytes`."""
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def not_regular(path: Path) -> OSError:
    """What opening such a `path` raises."""
    return OSError(errno.EINVAL, "it is a link, a pipe or a device, and no regular file of this folder", str(path))
