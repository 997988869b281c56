"""Waits for workers, and ends them when there is no more point in waiting."""

import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from lockstep.start.worker import Worker

NOTICE = timedelta(seconds=5)
"""How long the others may go on when one has failed. Workers that wait for it look after their peers every second,
and end by themselves with an error that names it: worth waiting for. `comm.peers` takes 4 s at most."""
GRACE = timedelta(seconds=5)
"""How long a worker that was asked to end has until it is killed."""
LOOK_SECONDS = 0.05


class Supervisor:
    """Sees to it that all workers end. Phases: watch; end, if something came up; kill, always."""

    def __init__(
        self,
        workers: Sequence[Worker],
        *,
        attend: Callable[[float], None],
        is_over: Callable[[], bool],
        is_urgent: Callable[[], bool] = lambda: False,
        notice: timedelta = NOTICE,
    ) -> None:
        """Watch over `workers`.

        attend: called between looks, for so many seconds at most, to do whatever else the launcher has to do.
        is_over: tells that workers have no more reason to go on, as when one has failed.
        is_urgent: tells that workers which were asked to end are to be killed without further ado.
        notice: how long they may still take when it is over.
        """
        self._workers = workers
        self._attend = attend
        self._is_over = is_over
        self._is_urgent = is_urgent
        self._notice = notice

    def watch(self) -> None:
        """Return when all workers have ended: by themselves, or ended from here soon after it is over."""
        give_up = float("inf")
        while self._running():
            self._attend(LOOK_SECONDS)
            if give_up == float("inf") and self._is_over():
                give_up = time.monotonic() + self._notice.total_seconds()
            if time.monotonic() > give_up:
                self.end(signal.SIGTERM)
                return

    def end(self, signum: int) -> None:
        """Ask all workers to end by a signal, and kill those that have not when the grace time is over."""
        self._tell(signum, until=self._is_urgent)
        self.kill()

    def kill(self) -> None:
        """Leave no worker running. Only one that hangs inside the system's kernel is not waited for."""
        self._tell(signal.SIGKILL, until=lambda: False)

    def _tell(self, signum: int, until: Callable[[], bool]) -> None:
        """Send a signal, and wait for the workers to end, for the grace time at most."""
        for worker in self._workers:
            worker.tell(signum)
        give_up = time.monotonic() + GRACE.total_seconds()
        while self._running() and time.monotonic() < give_up and not until():
            time.sleep(LOOK_SECONDS / 5)

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if not worker.has_ended()]
