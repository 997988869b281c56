"""A worker's round trips to the owners: read, push, and so on. See asynchronous.py for why none waits for ever.

begin      wait until the gradient of the step before is applied everywhere, then read the newest parameters
push       send the gradient, cut by owner
withdraw   the step has failed: say that no gradient will come
settle     wait until what was pushed is applied everywhere
fetch      the parameters as they are, for no step
"""

from collections.abc import Callable, Mapping

from lockstep.train.connection import Connection, Transfer, Until, bytes_of
from lockstep.train.flats import Flats
from lockstep.train.owner import Gradient, Owner
from lockstep.train.permits import Permits
from lockstep.train.service import ANSWER, REQUEST, Kind
from lockstep.world import World

KEEPER = 0
"""The worker that keeps the permits."""


class Applied:
    """How stale a step's gradient was when it was applied; known once it is."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self._settle = settle
        self.value = 0
        """The largest over the owners."""

    def __call__(self) -> int:
        """The staleness; waits until the gradient is applied everywhere."""
        self._settle()
        return self.value


class RoundTrips:
    """One worker's."""

    def __init__(
        self,
        world: World,
        flats: Flats,
        owner: Owner,
        permits: Permits | None,
        connections: Mapping[int, Connection],
        check: Callable[[], None],
        *,
        needs_permit: bool,
    ) -> None:
        self._world, self._flats, self._owner, self._permits = world, flats, owner, permits
        self._connections, self._check = connections, check
        self._needs_permit = needs_permit
        self._number = 0
        """Of this worker's steps."""
        self._under_way: Applied | None = None
        self._params = {rank: [bytes_of(flat) for flat in flats.params_of(rank)] for rank in connections}
        self._grads = {rank: [bytes_of(flat) for flat in flats.grads_of(rank)] for rank in connections}

    def begin(self) -> None:
        """Read the newest parameters of all owners, for a step."""
        self.settle()
        self._number += 1
        if self._needs_permit:
            self._ask()
        self._read(Kind.READ)

    def push(self) -> Applied:
        """Send the gradients that have been collected."""
        transfer = Transfer(self._check)
        head = REQUEST.pack(Kind.PUSH, self._number) + self._flats.used
        for rank, connection in self._connections.items():
            transfer.send(connection, head)
            for view in self._grads[rank]:
                transfer.send(connection, view)
        self._world.wait(transfer, "sending gradients to their owners")
        me = self._world.rank
        self._owner.submit(me, Gradient(self._number, self._flats.used, self._flats.grads_of(me)))
        return self._end()

    def withdraw(self) -> None:
        """Let the owners not wait for the gradient of the step that was begun."""
        transfer = Transfer(self._check)
        for connection in self._connections.values():
            transfer.send(connection, REQUEST.pack(Kind.WITHDRAW, self._number))
        self._world.wait(transfer, "withdrawing a step that has failed")
        self._owner.withdraw(self._world.rank, self._number)
        self._end()

    def settle(self) -> None:
        """Return when the gradients that were pushed are applied everywhere."""
        if self._under_way is None:
            return
        transfer, answers = Transfer(self._check), []
        for connection in self._connections.values():
            answers.append(bytearray(ANSWER.size))
            transfer.receive(connection, answers[-1])
        self._world.wait(transfer, "waiting for its gradients to be applied")
        found = [staleness for _, _, staleness in map(ANSWER.unpack, answers)]
        assert all(number == self._number for _, number, _ in map(ANSWER.unpack, answers))

        def own(timeout_s: float) -> bool:
            staleness = self._owner.wait_applied(self._world.rank, timeout_s)
            found.extend([] if staleness is None else [staleness])
            return staleness is not None

        self._world.wait(Until(own, self._check), "waiting for older gradients than its own")
        self._under_way.value = max(found)
        self._under_way = None

    def fetch(self) -> None:
        """Read the parameters as they are; all updates must have been applied, and none come meanwhile."""
        self._read(Kind.PEEK)

    def _end(self) -> Applied:
        """The step has left this worker's hands."""
        self._under_way = applied = Applied(lambda: None)
        applied._settle = lambda: self.settle() if self._under_way is applied else None
        if self._needs_permit:
            self.settle()
            self._give_back()
        return applied

    def _read(self, kind: Kind) -> None:
        transfer = Transfer(self._check)
        for connection in self._connections.values():
            transfer.send(connection, REQUEST.pack(kind, self._number))
        for rank, connection in self._connections.items():
            transfer.receive(connection, bytearray(ANSWER.size))
            for view in self._params[rank]:
                transfer.receive(connection, view)
        self._world.wait(transfer, "reading parameters from their owners")
        me = self._world.rank
        self._owner.read(me, self._flats.params_of(me), is_counted=kind == Kind.READ)
        self._flats.publish()

    # Permits

    def _ask(self) -> None:
        doing = "waiting for its turn, which the bound on staleness asks for"
        permits, me = self._permits, self._world.rank
        if permits is not None:
            permits.ask(me)
            self._world.wait(Until(lambda timeout_s: permits.get(me, timeout_s), self._check), doing)
            return
        transfer = Transfer(self._check)
        transfer.send(self._connections[KEEPER], REQUEST.pack(Kind.ASK, self._number))
        transfer.receive(self._connections[KEEPER], bytearray(ANSWER.size))
        self._world.wait(transfer, doing)

    def _give_back(self) -> None:
        if self._permits is not None:
            self._permits.give_back()
            return
        transfer = Transfer(self._check)
        transfer.send(self._connections[KEEPER], REQUEST.pack(Kind.GIVE_BACK, self._number))
        self._world.wait(transfer, "ending its turn")
