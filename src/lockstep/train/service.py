"""Serves what this worker owns to the others: a thread for each of them, all over one `Owner`.

Requests are a kind and the number of the asker's step, a gradient with what it consists of behind it; answers are the
same words with the staleness, parameters behind them. A worker asks one thing at a time, so one buffer for each is
enough: the gradient lies there until it is applied, and what is read afterwards is copied there to be sent. A gradient
is applied when it has arrived whole, and not at all if its worker dies before that.

A connection that breaks is noted (`lost`), and ends whatever this worker waits for: `check` is called in every wait.
"""

import enum
import struct
import threading
from collections.abc import Callable, Mapping

from lockstep.errors import UsageError, WorkerLost
from lockstep.train.connection import LOOK_S, Connection, bytes_of
from lockstep.train.flats import Flats
from lockstep.train.owner import Gradient, Owner
from lockstep.train.permits import Permits

REQUEST = struct.Struct("<BQ")
"""Kind, number of the step."""
ANSWER = struct.Struct("<BQQ")
"""Kind, number of the step, staleness."""


class Kind(enum.IntEnum):
    """What is asked for, and answered."""

    READ = 1
    """Parameters, for a gradient."""
    PEEK = 2
    """Parameters, for no gradient."""
    PUSH = 3
    """A gradient; answered when it is applied."""
    WITHDRAW = 4
    """No gradient will come; answered too."""
    ASK = 5
    """A permit to make a step; answered when it is given."""
    GIVE_BACK = 6
    """The permit; not answered."""


class Service:
    """The threads of one worker."""

    def __init__(
        self, owner: Owner, permits: Permits | None, flats: Flats, connections: Mapping[int, Connection]
    ) -> None:
        self._owner, self._permits, self._flats = owner, permits, flats
        self._connections = connections
        self._lost: list[int] = []
        """The first is the cause; others may have ended because of it."""
        self._error: UsageError | None = None
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._serve, args=(connection,), name=f"lockstep-serve-{rank}", daemon=True)
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

    def _serve(self, connection: Connection) -> None:
        desk = _Desk(connection, self._flats, lambda: self._is_closed)
        try:
            while not self._is_closed:
                self._answer(desk)
        except OSError:
            self._lost.append(connection.rank)
        except Exception as error:  # An update that failed. The others learn of it by their connections.
            self._error = error if isinstance(error, UsageError) else UsageError(f"serving failed: {error!r}")
            self._error.__cause__ = error.__cause__ or error
            self.close()

    def _answer(self, desk: "_Desk") -> None:
        """One request."""
        kind, number = desk.request()
        if kind in (Kind.READ, Kind.PEEK):
            self._owner.read(desk.rank, desk.flats, is_counted=kind == Kind.READ)
            desk.answer(kind, number, 0, *desk.views)
        elif kind == Kind.PUSH:
            self._owner.submit(desk.rank, desk.gradient(number))
            desk.answer(kind, number, desk.until(lambda: self._owner.wait_applied(desk.rank, LOOK_S)))
        elif kind == Kind.WITHDRAW:
            self._owner.withdraw(desk.rank, number)
            desk.answer(kind, number, desk.until(lambda: self._owner.wait_applied(desk.rank, LOOK_S)))
        else:
            self._manage_permits(desk, kind, number)

    def _manage_permits(self, desk: "_Desk", kind: int, number: int) -> None:
        permits = self._permits
        assert permits is not None and kind in (Kind.ASK, Kind.GIVE_BACK), f"unknown request {kind}"
        if kind == Kind.GIVE_BACK:
            permits.give_back()
            return
        permits.ask(desk.rank)
        desk.answer(kind, number, desk.until(lambda: 0 if permits.get(desk.rank, LOOK_S) else None))


class _Desk:
    """Where one other worker is served: its connection and its buffer."""

    def __init__(self, connection: Connection, flats: Flats, is_closed: Callable[[], bool]) -> None:
        self._connection, self._is_closed = connection, is_closed
        self.rank = connection.rank
        self.flats = flats.empty()
        self.views = [bytes_of(flat) for flat in self.flats]
        self._used = bytearray(len(flats.used))

    def request(self) -> tuple[int, int]:
        """Kind and number of the next request."""
        head = bytearray(REQUEST.size)
        self._receive(memoryview(head))
        kind, number = REQUEST.unpack(head)
        return kind, number

    def gradient(self, number: int) -> Gradient:
        """What follows a push."""
        self._receive(memoryview(self._used))
        for view in self.views:
            self._receive(view)
        return Gradient(number, self._used, self.flats)

    def answer(self, kind: int, number: int, staleness: int, *views: memoryview) -> None:
        """Send an answer."""
        for view in (memoryview(ANSWER.pack(kind, number, staleness)), *views):
            rest = view
            while rest.nbytes:
                rest = rest[self._connection.send(rest) :]

    def until(self, attempt: Callable[[], int | None]) -> int:
        """What `attempt` gives when it gives something."""
        while (found := attempt()) is None:
            if self._is_closed():
                raise ConnectionAbortedError("this worker is leaving")
        return found

    def _receive(self, view: memoryview) -> None:
        while view.nbytes:
            view = view[self._connection.receive(view) :]
