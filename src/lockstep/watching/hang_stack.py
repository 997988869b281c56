"""Stacks of this process's threads: in full for people, and what the main thread is in as one line.

A thread is looked at from another one, which needs the interpreter's lock and disturbs nothing. Where the lock is held
by native code nobody in this process can look: there faulthandler writes the stack from a thread without the lock, see
`hangs`.
"""

import linecache
import re
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

import lockstep

THREAD_NAME = "lockstep-hangs"
"""How the names of the threads that watch begin; they are left out of what they write."""

_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
"""Whoever is in a public function of these waits for other workers."""
_WAITING = re.compile(r"\.wait\(")
"""A line that waits for an operation which was started before; the wait itself is native, or torch's or ours."""

_WORKS = (str(Path(torch.__file__).parent), str(Path(lockstep.__file__).parent))
"""Whose operations are waited for."""
_LIBRARIES = (*_WORKS, *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the main thread is."""

    at: str
    """The innermost line of the script's own code, as `train.py:57 in main`."""
    collective: str
    """The collective of torch.distributed that it is in, by name, or empty."""
    awaits_work: bool
    """Whether its line waits for an operation that was started before."""
    depth: int
    """How many frames there are: with `at`, tells one moment of the script from another."""


def spot() -> Spot:
    """Where the main thread is now."""
    frames = sys._current_frames()
    main = list(_outwards(frames.get(threading.main_thread().ident or 0)))
    # With a GPU the hooks of a backward pass run in a thread of autograd's, and what happens in them happens there.
    named = _named()
    native = [list(_outwards(frame)) for ident, frame in frames.items() if ident not in named]
    in_backward = bool(main) and main[0].f_code.co_name == "_engine_run_backward"
    stack = next((stack for stack in native if in_backward and _is_own(_own_frame(stack))), main)
    own = _own_frame(stack)
    collective = next((name for stack in [main, *native] if (name := _collective(stack))), "")
    at = words(own.f_code.co_filename, own.f_lineno, own.f_code.co_name) if own is not None else "native code"
    return Spot(at, collective, own is not None and _awaits_work(stack, own), len(stack))


def dump() -> str:
    """What every thread is doing, the main thread first, with the lines of source."""
    frames = sys._current_frames()
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    parts = []
    for ident, frame in sorted(frames.items(), key=lambda item: item[0] != main):
        name = threads.get(ident, f"native thread {ident}")
        if not name.startswith(THREAD_NAME):
            parts.append(f"thread {name}:\n" + "".join(traceback.format_stack(frame)))
    return "".join(parts)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A thread's frames, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _named() -> set[int | None]:
    """Threads that were started from Python; they are somebody's own, and their waits are not the script's."""
    return {thread.ident for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def _collective(stack: list[FrameType]) -> str:
    """The outermost function of torch.distributed, as the script called it."""
    names = [frame.f_code.co_name for frame in stack if frame.f_code.co_filename.endswith(_COLLECTIVES)]
    return next((f"torch.distributed.{name}" for name in reversed(names) if not name.startswith("_")), "")


def _awaits_work(stack: list[FrameType], own: FrameType) -> bool:
    """Whether the script's line is `work.wait()`, and not the wait for a thread or a process of its own."""
    line = linecache.getline(own.f_code.co_filename, own.f_lineno)
    called = stack[: stack.index(own)][-1:]
    return bool(_WAITING.search(line)) and all(frame.f_code.co_filename.startswith(_WORKS) for frame in called)


def _own_frame(stack: list[FrameType]) -> FrameType | None:
    """The innermost frame that belongs to no library, else the innermost one."""
    return next(filter(_is_own, stack), stack[0] if stack else None)


def _is_own(frame: FrameType | None) -> bool:
    return frame is not None and is_own_file(frame.f_code.co_filename)


def is_own_file(name: str) -> bool:
    """Whether code there belongs to no library."""
    return not name.startswith((*_LIBRARIES, "<frozen"))


def words(filename: str, line: int, function: str) -> str:
    """A line of source, as reports tell it."""
    path = Path(filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{line} in {function}"
