"""Files that commands are told to write: what cannot be written is said with the option that named it."""

import os
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import UsageError


def checked(path: Path, option: str) -> Path:
    """`path`; raises UsageError if it could not be written, so that no measurement is lost in the end."""
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(f"'{path}' cannot be written: give {option} a file in a folder that exists and is yours.")
    return path


def write(path: Path, option: str, content: "str | Callable[[Path], object]") -> None:
    """Write the content, or have it written; raises UsageError if that fails."""
    try:
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            content(path)
    except OSError as error:
        raise UsageError(
            f"'{path}' cannot be written ({error.strerror}): give {option} a file in a folder that exists and is yours."
        ) from error
