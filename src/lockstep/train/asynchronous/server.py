"""What a worker owns, served to the others: a thread for each of them, all over one `Owner`.

A worker asks one thing at a time, so one buffer for each is enough: its gradient lies there until it is applied, and
what it reads afterwards is copied there to be sent. A gradient is applied when it has arrived whole, and not at all if
its worker dies before that.
"""

import enum
import struct
import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from lockstep.errors import UsageError, WorkerLost
from lockstep.train.asynchronous.connection import LOOK_S, Connection, bytes_of
from lockstep.train.asynchronous.owner import Owner, PushedGradient

STALENESS = struct.Struct("<Q")
"""What a push and a withdrawal are answered with."""


class Request(bytes, enum.Enum):
    """What is asked for; one byte."""

    READ = b"r"
    """Parameters, for a gradient; answered with them when the bound on staleness allows it."""
    LOOK = b"l"
    """Parameters, for no gradient."""
    PUSH = b"p"
    """A gradient, which follows: a byte for each parameter, and the part; answered when it is applied."""
    WITHDRAW = b"w"
    """No gradient will come; answered as a push."""


class Service:
    """The threads of one worker.

    A connection that breaks is noted, and ends whatever this worker waits for: `check` is called in every wait.
    """

    def __init__(
        self,
        owner: Owner,
        connections: Mapping[int, Connection],
        make_buffers: Callable[[], list[Tensor]],
        num_params: int,
    ) -> None:
        self._owner, self._connections = owner, connections
        self._lost: list[int] = []
        """The first is the cause; others may have ended because of it."""
        self._error: UsageError | None = None
        self._is_closed = False
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(connection, make_buffers(), bytearray(num_params)),
                name=f"lockstep-serve-{rank}",
                daemon=True,
            )
            for rank, connection in connections.items()
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise if a worker was lost, or an update has failed here."""
        if self._error is not None:
            raise self._error
        if self._lost and not self._is_closed:
            raise WorkerLost(f"the connection of worker {self._lost[0]} broke", (self._lost[0],))

    def close(self) -> None:
        """End all threads, and wait a moment for them."""
        self._is_closed = True
        for connection in self._connections.values():
            connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=2)

    def _serve(self, connection: Connection, flats: list[Tensor], used: bytearray) -> None:
        """Answer another worker; `flats` and `used` are its buffer."""
        views = [bytes_of(flat) for flat in flats]
        try:
            while not self._is_closed:
                self._answer(connection, flats, views, used)
        except OSError:
            self._lost.append(connection.rank)
        except Exception as error:  # An update that failed. The others learn of it by their connections.
            self._error = error if isinstance(error, UsageError) else UsageError(f"serving failed: {error!r}")
            self._error.__cause__ = error.__cause__ or error
            self.close()

    def _answer(self, connection: Connection, flats: list[Tensor], views: list[memoryview], used: bytearray) -> None:
        owner, rank, asked = self._owner, connection.rank, bytearray(1)
        connection.receive_all(asked)
        request = Request(bytes(asked))
        if request in (Request.READ, Request.LOOK):
            if request is Request.READ:
                self._until(lambda: owner.read(rank, flats, LOOK_S) or None)
            else:
                owner.look(flats)
            connection.send_all(*views)
            return
        if request is Request.PUSH:
            connection.receive_all(used, *views)
            owner.submit(rank, PushedGradient(used, flats))
        else:
            owner.withdraw(rank)
        connection.send_all(STALENESS.pack(self._until(lambda: owner.wait_applied(rank, LOOK_S))))

    def _until(self, attempt: Callable[[], int | None]) -> int:
        """What `attempt` gives when it gives something."""
        while (found := attempt()) is None:
            if self._is_closed:
                raise ConnectionAbortedError("this worker is leaving")
        return found
