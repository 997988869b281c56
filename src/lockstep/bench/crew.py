"""A crew: workers that hold one or more variants, and take their steps when they are told to.

Every worker connects to a Unix socket of this process and answers its orders (see holder.py). Between orders workers
wait in `recv`, and use no processor. The call that started them runs in a thread here; it raises if a worker ends, and
the others are ended then. Whoever waits for an answer sees the connection closed, and raises CrewLost with the reason.
"""

import contextlib
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import lockstep
from lockstep.bench import holder
from lockstep.bench.contest import Contest
from lockstep.bench.holder import Answer, Ready, Step, Try, first_line
from lockstep.bench.results import Entry
from lockstep.errors import WorkerLost

POLL_S = 0.1


class CrewLost(Exception):
    """A worker of a crew has ended."""

    def __init__(self, variant: str, reason: str) -> None:
        super().__init__(f"{variant}: {reason}")
        self.variant = variant
        """What it was about."""
        self.reason = reason


class Crew:
    """The workers of one or more variants."""

    def __init__(self, asked: Contest, address: str) -> None:
        """Start them; what they raise before they are ready is raised here. `address`: a path for the socket."""
        self.used = 0.0
        """Processor time of all workers until their last answers, in seconds."""
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(asked, address), daemon=True)
        self._links: list[Connection] = []
        try:
            self._links = self._connected(address, asked.workers)
            answers: list[Ready] = [link.recv() for link in self._links]
            self.ready = answers[0]
        except (EOFError, ConnectionError):
            self._close()
            raise self._error or WorkerLost("a worker ended before it was ready.", ()) from None
        except BaseException:
            self._close()
            raise

    def try_out(self, name: str) -> Entry | str:
        """Make a variant: what its first steps took, or why it failed."""
        found: Entry | str = self._ask(Try(name))[0]
        return found

    def step(self, name: str) -> float:
        """The seconds that a step of the variant took, until the last worker was done."""
        seconds: Sequence[float] = self._ask(Step(name))
        return max(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _run(self, asked: Contest, address: str) -> None:
        try:
            lockstep.launch(holder.serve, asked.workers, args=(asked, address))
        except BaseException as error:
            self._error = error

    def _connected(self, address: str, workers: int) -> list[Connection]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(workers)
            listener.settimeout(POLL_S)
            self._thread.start()
            links: list[Connection] = []
            while len(links) < workers:
                with contextlib.suppress(TimeoutError):
                    accepted, _ = listener.accept()
                    accepted.setblocking(True)
                    links.append(Connection(accepted.detach()))
                if not self._thread.is_alive():
                    raise EOFError
        return links

    def _ask(self, order: Try | Step) -> Sequence[Any]:
        try:
            for link in self._links:
                link.send(order)
            answers: list[Answer] = [link.recv() for link in self._links]
        except (EOFError, OSError):
            self._thread.join()
            reason = first_line(self._error) if self._error else "a worker ended without a word"
            raise CrewLost(order.name, reason) from None
        self.used = sum(answer.used for answer in answers)
        return [answer.content for answer in answers]

    def _close(self) -> None:
        """Let the workers end."""
        for link in self._links:
            with contextlib.suppress(OSError):
                link.send(None)
            link.close()
        if self._thread.ident is not None:
            self._thread.join()
