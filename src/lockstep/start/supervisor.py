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
        is_over: Callable[[], bool] = lambda: False,
        notice: timedelta = NOTICE,
    ) -> None:
        """Watch over `workers`.

        attend: called between looks, for so many seconds at most, to do whatever else the launcher has to do.
        is_over: tells that workers have no more reason to go on, besides one of them having failed.
        notice: how long they may then still take.
        """
        self._workers = workers
        self._attend = attend
        self._is_over = is_over
        self._notice = notice

    def watch(self) -> None:
        """Return when all workers have ended: by themselves, or ended from here soon after one has failed."""
        give_up = float("inf")
        while self._running():
            self._attend(LOOK_SECONDS)
            if give_up == float("inf") and (self._is_over() or any(worker.has_failed for worker in self._workers)):
                give_up = time.monotonic() + self._notice.total_seconds()
            if time.monotonic() > give_up:
                self.end(signal.SIGTERM)
                return

    def end(self, signum: int) -> None:
        """Ask all workers to end by a signal, and kill those that have not when the grace time is over."""
        self._tell(signum, GRACE)
        self.kill()

    def kill(self) -> None:
        """Leave no worker running. Only one that hangs inside the system's kernel is not waited for."""
        self._tell(signal.SIGKILL, GRACE)

    def _tell(self, signum: int, patience: timedelta) -> None:
        for worker in self._workers:
            worker.tell(signum)
        give_up = time.monotonic() + patience.total_seconds()
        while self._running() and time.monotonic() < give_up:
            time.sleep(LOOK_SECONDS / 5)

    def _running(self) -> list[Worker]:
        return [worker for worker in self._workers if not worker.has_ended()]
