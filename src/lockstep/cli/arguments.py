"""What options of several commands take: numbers that are large enough, files that can be written."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from lockstep.errors import UsageError


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: a whole number, `least` or more."""

    def number(word: str) -> int:
        if (value := int(word)) < least:
            raise argparse.ArgumentTypeError(f"{word} is too few: give {least} or more")
        return value

    number.__name__ = "int"  # As argparse names it where a word is no number.
    return number


def writable(word: str) -> Path:
    """A type for argparse: a file that can be written, so that no measurement is lost in the end."""
    path = Path(word)
    place = path if path.exists() else path.parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"'{path}' cannot be written: give a file in a folder that exists and is yours"
        )
    return path


def write(path: Path, option: str, content: str | Callable[[Path], object]) -> None:
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
