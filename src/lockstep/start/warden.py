"""A second, tiny process that ends the workers if the launcher dies without having done so.

It reads from a pipe whose other end the launcher holds, and which the system closes however the launcher ends, kill -9
included. What is then still on its list, it kills: each worker's process group, with loader processes and whatever
else a worker has started. Each worker enters itself before it does anything else, so there is no moment at which it
exists and is not listed.

Chosen over Linux's parent-death signal, which reaches the worker but not what the worker has started, and counts the
end of the thread that started it as the parent's death.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from lockstep.errors import LaunchError

_WARDEN = """
import os, signal, sys
for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
    signal.signal(number, signal.SIG_IGN)
groups = set()
for entry in map(int, sys.stdin):  # Ends when the launcher has.
    if not entry:
        break
    groups.add(entry) if entry > 0 else groups.discard(-entry)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""

_ENTER = """
import os, sys
list_fd = int(sys.argv[1])
os.write(list_fd, b"%d\\n" % os.getpid())
os.close(list_fd)
os.execv(sys.argv[2], sys.argv[2:])
"""
# Without site packages and environment: 15 ms, and nothing of the user's can interfere.
_PYTHON = ("-I", "-S", "-c")


class Warden:
    """The list of process groups that must not outlive this process. Closed, it ends what is still on it."""

    def __init__(self) -> None:
        if not sys.executable or not os.access(sys.executable, os.X_OK):
            raise LaunchError(
                f"workers are started with this process's own Python, and {sys.executable!r} cannot be executed. "
                "Start from an ordinary Python interpreter."
            )
        read_fd, self.list_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *_PYTHON, _WARDEN],
                stdin=read_fd,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # What ends the launcher, by its process group, must not end the warden.
            )
        except OSError as error:
            os.close(self.list_fd)
            raise LaunchError(f"{sys.executable} could not be started: {error}.") from error
        finally:
            os.close(read_fd)

    def entering(self, command: Sequence[str]) -> list[str]:
        """`command`, to be started with `list_fd` passed on, such that it is on the list before it runs."""
        return [sys.executable, *_PYTHON, _ENTER, str(self.list_fd), *command]

    def enter(self) -> None:
        """Put this process's group on the list, and let go of the list: for a forked worker."""
        os.write(self.list_fd, b"%d\n" % os.getpid())
        os.close(self.list_fd)

    def strike(self, pid: int) -> None:
        """Take an ended worker off the list, since its number may go to another process."""
        self._write(-pid)

    def close(self) -> None:
        """Let the warden end whoever is still listed, and wait for it. Who comes too late to be listed, fails to."""
        self._write(0)  # The end of the pipe alone would not do: a fork by another thread may hold a copy of it.
        os.close(self.list_fd)
        self._process.wait()

    def _write(self, entry: int) -> None:
        with contextlib.suppress(BrokenPipeError):  # Somebody killed the warden; the launcher can do without.
            os.write(self.list_fd, b"%d\n" % entry)

    def __enter__(self) -> "Warden":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
