"""One started process, and the warden: a tiny process that ends the workers if the launcher dies before them.

A worker is the head of a session of its own, so that it and all it starts can be ended together.

The warden reads from a pipe whose other end the launcher holds, and which the system closes however the launcher ends,
kill -9 included. What is then still on its list, it kills: each worker's process group, with loader processes and
whatever else a worker has started. Each worker enters itself before it does anything else, so there is no moment at
which it exists and is not listed. A process that a worker started in a session of its own (a server, a daemon) is in no
group of the list: it is known by a variable of the run, which all that workers start inherit, and ended with the run.
On Linux only, and not where a process has cleared its environment; a forked worker's own forks are known by their group
alone.

Chosen over Linux's parent-death signal, which reaches the worker but not what the worker has started, and counts the
end of the thread that started it as the parent's death.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.errors import LaunchError

_WARDEN = """
import os, signal, sys, time
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

def is_marked(pid):
    try:
        with open("/proc/%s/environ" % pid, "rb") as environ:
            return sys.argv[1].encode() in environ.read().split(b"\\0")
    except OSError:
        return False

for _ in range(100):  # A process may start another one while it is looked for.
    marked = [pid for pid in os.listdir("/proc") if pid.isdigit() and is_marked(pid)] if os.path.isdir("/proc") else []
    if not marked:
        break
    for pid in marked:
        try:
            os.kill(int(pid), signal.SIGKILL)
        except OSError:
            pass
    time.sleep(0.01)
"""

_ENTER = """
import os, sys
list_fd = int(sys.argv[1])
os.write(list_fd, b"%d\\n" % os.getpid())
os.close(list_fd)
if cores := os.environ.get("LOCKSTEP_CORES"):
    try:
        os.sched_setaffinity(0, map(int, cores.split(",")))
    except OSError:  # They are not this process's any more. Any others will do.
        pass
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
        self.mark = {"LOCKSTEP_RUN": f"{os.getpid()}-{time.time_ns()}"}
        """The variable by which what workers have started is known; part of every worker's environment."""
        read_fd, self.list_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *_PYTHON, _WARDEN, *("=".join(item) for item in self.mark.items())],
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
        os.environ.update(self.mark)
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


class Worker:
    """One worker's process, as its launcher sees it."""

    def __init__(self, rank: int, pid: int, poll: Callable[[], int | None], warden: Warden) -> None:
        self.rank = rank
        self.pid = pid
        self.code: int | None = None
        """Its exit code once it has ended; minus the number of the signal that killed it."""
        self.ended_at = 0.0
        """When its end was seen, on the monotonic clock."""
        self.told_at: float | None = None
        """When the launcher told it to end, if it did."""
        self.was_stopped = False
        """Whether it was stopped, by a signal, when it was told to end."""
        self._poll = poll
        self._warden = warden

    def has_ended(self) -> bool:
        """Whether it has; at the first sight of that, what it left behind in its session is ended too."""
        if self.code is None:
            self.code = self._poll()
            if self.code is not None:
                self.ended_at = time.monotonic()
                self._signal_group(signal.SIGKILL)
                self._warden.strike(self.pid)
        return self.code is not None

    def end_fd(self) -> int:
        """Can be read once it has ended, and is the caller's to close; OSError where it has, and left nothing."""
        return os.pidfd_open(self.pid)

    @property
    def was_told_to_end(self) -> bool:
        """Whether its end is the launcher's doing."""
        return self.told_at is not None

    @property
    def has_failed(self) -> bool:
        """Whether it ended badly, and by itself."""
        return bool(self.code) and not self.was_told_to_end

    def ask_to_leave(self) -> None:
        """Ask the worker itself, and nothing that it has started, to go when its step is done."""
        if not self.has_ended():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def tell(self, signum: int) -> None:
        """Send a signal to the worker and all it has started, unless it has ended."""
        if self.has_ended():
            return
        if self.told_at is None:
            self.told_at, self.was_stopped = time.monotonic(), _is_stopped(self.pid)
        if not self._signal_group(signum):
            with contextlib.suppress(ProcessLookupError):  # A fork that has not come to make its session.
                os.kill(self.pid, signum)
        if self.was_stopped:
            self._signal_group(signal.SIGCONT)  # A stopped process would get the other signal when it goes on.

    def _signal_group(self, signum: int) -> bool:
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):  # PermissionError: macOS, if only zombies are left.
            return False
        return True


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
