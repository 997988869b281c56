"""Where reports and stacks go: the folder `hangs` of the run, and stderr."""

import contextlib
import faulthandler
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from lockstep.watching import hang_stack
from lockstep.watching.hang_report import Report
from lockstep.watching.hang_state import State
from lockstep.watching.hang_verdict import Account


class Writer:
    """One worker's file of stacks, and the report. Failing to write ends nothing: a full disk is no reason to."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.folder = folder
        self._stacks: IO[bytes] | None = None
        self._printed = ""
        """The stack that was printed last: the same one is not printed again."""
        self._frozen = ""
        """The same for a worker that cannot print its own."""
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._stacks = (folder / f"worker-{rank}.txt").open("ab", buffering=0)

    def wind_up(self, seconds: float) -> None:
        """Have this worker's stack written from outside the interpreter if this is not called again in time."""
        faulthandler.dump_traceback_later(seconds, repeat=True, file=self._stacks or sys.__stderr__ or 2)

    def stack(self, state: State) -> None:
        """What every thread of this worker does, to its file; to stderr, where it is new, what the main thread does."""
        stack = hang_stack.dump()
        waits = f"waiting {state.waits_s:.1f} s ({state.waits})" if state.waits else "not waiting for others"
        head = f"lockstep: worker {state.rank} at {time.strftime('%H:%M:%S')}, step {state.step}, {waits}:\n"
        shown = stack
        if self._stacks is not None:
            shown = stack.partition("\nthread ")[0]
            with contextlib.suppress(OSError):
                self._stacks.write(f"{head}{stack}\n".encode())
        if shown != self._printed:
            self._printed = shown
            _print(f"{head}{shown}".rstrip())

    def report(self, report: Report) -> None:
        """The report, for all workers."""
        _print(report.text)
        if self.folder is not None:
            with contextlib.suppress(OSError):
                report.write(self.folder / "hang.json")

    def frozen(self, accounts: Sequence[Account]) -> None:
        """Print the stacks that faulthandler has written for workers that cannot print their own."""
        for account in accounts:
            if self.folder is not None and account.silent_s and account.process not in tuple("TtZX"):
                stack = _last_dump(self.folder / f"worker-{account.peer.rank}.txt", account.silent_s)
                if stack and stack != self._frozen:
                    self._frozen = stack
                    _print(f"lockstep: worker {account.peer.rank}, which is frozen:\n{stack}")

    def close(self) -> None:
        """Leave no file without a word in it."""
        faulthandler.cancel_dump_traceback_later()
        if self._stacks is None:
            return
        self._stacks.close()
        path = Path(self._stacks.name)
        with contextlib.suppress(OSError):  # Others may still have theirs in the folder.
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()


def _print(text: str) -> None:
    """In one piece, so that the lines of several workers do not mix."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def _last_dump(path: Path, within_s: float) -> str:
    """What faulthandler wrote to `path` last, if it was in the last few seconds."""
    try:
        if time.time() - path.stat().st_mtime > within_s:
            return ""
        return path.read_text(errors="replace").rpartition("Timeout (")[2].partition("\n")[2].strip()
    except OSError:
        return ""
