"""One started process: the head of a session of its own, so that it and all it starts can be ended together."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from lockstep.errors import LaunchError
from lockstep.start.warden import Warden


class Worker:
    """One worker's process, as its launcher sees it."""

    def __init__(self, rank: int, pid: int, poll: Callable[[], int | None], warden: Warden) -> None:
        self.rank = rank
        self.pid = pid
        self.code: int | None = None
        """Its exit code once it has ended; minus the number of the signal that killed it."""
        self.ended_at = 0.0
        """When its end was seen, on the monotonic clock."""
        self.was_told_to_end = False
        """Whether its end is the launcher's doing."""
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

    @property
    def has_failed(self) -> bool:
        """Whether it ended badly, and by itself."""
        return bool(self.code) and not self.was_told_to_end

    def tell(self, signum: int) -> None:
        """Send a signal to the worker and all it has started, unless it has ended."""
        if self.has_ended():
            return
        self.was_told_to_end = True
        if not self._signal_group(signum):
            with contextlib.suppress(ProcessLookupError):  # A fork that has not come to make its session.
                os.kill(self.pid, signum)

    def _signal_group(self, signum: int) -> bool:
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):  # PermissionError: macOS, if only zombies are left.
            return False
        return True


def execute(
    command: Sequence[str],
    environ: Mapping[str, str],
    warden: Warden,
    *,
    stdin: int | None = None,
    output: int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `command` as a worker's process, on the warden's list and in a session of its own."""
    try:
        return subprocess.Popen(
            warden.entering(command),
            env=environ,
            stdin=stdin,
            stdout=output,
            stderr=output,
            pass_fds=(warden.list_fd, *pass_fds),
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} could not be started: {error}.") from error
