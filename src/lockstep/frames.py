"""Where the threads of this process stand: whose code they are in, and the main thread's place.

Threads are looked at from another one, while they run. Their frame objects are not touched: to make one of another
thread's frame allocates, which may collect garbage, which may let the other thread go on; its frame is gone by then,
and what is written to it lands in another one (CPython 3.11: runs died of it, in the garbage collector or wherever).
faulthandler walks all threads natively in one go, with the interpreter's lock, and gives plain text.
"""

import faulthandler
import os
import re
import sysconfig
import tempfile
import threading
import traceback
from pathlib import Path
from traceback import FrameSummary
from typing import IO

import torch

PACKAGES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
"""The folders of torch and of this package."""
_LIBRARIES = (*PACKAGES, *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))
_THREAD = re.compile(r"(?:Thread|Current thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
"""As faulthandler writes them."""

Stack = list[FrameSummary]
"""Innermost frame first."""


def stacks() -> dict[int, Stack]:
    """Where every thread is, by its number, all at one moment; of each at most its 100 innermost frames."""
    with _scratch_file() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = file.read().decode("ascii", "replace").splitlines()
    found: dict[int, Stack] = {}
    stack: Stack = []
    for line in lines:
        if (head := _THREAD.match(line)) is not None:
            stack = found[int(head[1], 16)] = []
        elif (frame := _FRAME.match(line)) is not None:
            stack.append(FrameSummary(_unescaped(frame[1]), int(frame[2]), _unescaped(frame[3]), lookup_line=False))
    return found


def _scratch_file() -> IO[bytes]:
    """A file without a name."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("lockstep-stacks"), "r+b")
    return tempfile.TemporaryFile()


def _unescaped(text: str) -> str:
    """What faulthandler writes in ASCII, as it was."""
    return text.encode("ascii").decode("unicode_escape") if "\\" in text else text


def main_stack() -> Stack:
    """The frames of the main thread."""
    return stacks().get(threading.main_thread().ident or 0, [])


def own_frame(stack: Stack) -> FrameSummary | None:
    """The innermost frame that belongs to no library, else the innermost one."""
    return next(filter(is_own, stack), stack[0] if stack else None)


def is_own(frame: FrameSummary | None) -> bool:
    """Whether a frame belongs to no library."""
    return frame is not None and is_own_file(frame.filename)


def is_own_file(name: str) -> bool:
    """Whether code there belongs to no library."""
    return not name.startswith((*_LIBRARIES, "<frozen"))


def at(frame: FrameSummary | None) -> str:
    """A frame's line of source, as `train.py:57 in main`."""
    return words(frame.filename, frame.lineno or 0, frame.name) if frame is not None else "native code"


def words(filename: str, line: int, function: str) -> str:
    """A line of source, as reports tell it."""
    path = Path(filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line} in {function}"


def listing(stack: Stack) -> str:
    """A stack in Python's own form, with the lines of source."""
    return "".join(traceback.format_list(stack[::-1]))
