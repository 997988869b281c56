"""Which workers train together now, in an elastic run: the workers' side of the agreement.

Such a run is a row of *generations*: each is a world, with its own groups and its own part of the store. One place
decides who belongs to one: the coordinator (see `lockstep.elastic.coordinator`), in a launcher. A worker has a number
that it keeps, its member number; its rank is its place in a generation. They talk by keys of the run's store, each
written by one side only and at most once, but for `trainer` and `source`:

    deadline/M     by member M, just before: how long it waits for others, in seconds
    card/M         by member M, when it has joined: which process it is
    generation/G   by the coordinator: the members of G, by rank; or why the run stops
    call/G         by the coordinator: G is to end at its next boundary, since somebody waits to be let in
    report/G/M     by member M of G: for it G has ended, and why
    begun/G        by worker 0 of G: how many shards each has, and what it took to begin; for those who read of it
    trainer        by all: the script has made a trainer, so that the run can outlive its workers
    source         by worker 0: which source of batches the run is in
    ready/M/S      by newcomer M: it has built everything, and waits to begin in source S
    admit/M/S      by the coordinator: the generation that M is in; or the source that the run has come to meanwhile

**Who waits for what.** A member that has reported waits for `generation/G+1`, which comes when every member of G has
reported, or has ended, or was silent for so long that the launcher has ended it: so it always comes, and nobody of G
still computes when G+1 begins. A member that dies after its report is found missing by those of G+1, who report in
turn. While a generation opens its groups the waits are for keys of its own part of the store; the coordinator breaks
these waits off when a member of it has died, and the others report. A newcomer's wait ends with the run.
"""

import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.comm.peers import Peer
from lockstep.errors import LockstepError

PREFIX = "elastic/"
PATIENCE = timedelta(days=7)
"""The coordinator always answers, or ends this process: the store's own deadline must not come first."""


def world_prefix(number: int) -> str:
    """Where the keys of a generation's own world begin."""
    return f"lockstep/e{number}"


@dataclass(frozen=True, slots=True)
class Generation:
    """The members of one world."""

    number: int
    members: tuple[int, ...]
    """Member numbers, by rank."""
    peers: tuple[Peer, ...]
    """Their processes, by rank."""


class Generations:
    """One worker's part in the agreement."""

    def __init__(self, store: dist.Store, member: int, me: Peer, backend: str | None, secret: bytes | None) -> None:
        self._shared, self.member, self.me = store, member, me
        self.backend, self.secret = backend, secret
        """What the groups of all generations are opened with: the user's choice, if any, and the run's secret."""
        self._store = store.clone()  # type: ignore[attr-defined]  # With a timeout of its own: groups set that of the shared one.
        self._store.set_timeout(PATIENCE)
        self.current: Generation | None = None
        """The generation that this worker is in; None while it waits to be let in."""
        self.is_called = False
        """Whether the coordinator wants the current generation to end at its next boundary."""

    @property
    def is_waiting(self) -> bool:
        """Whether this worker is not counted yet."""
        return self.current is None

    @property
    def rank(self) -> int:
        """This worker's place in the current generation."""
        assert self.current is not None
        return self.current.members.index(self.member)

    def arrive(self, timeout: timedelta) -> Generation | None:
        """Show that this worker is there. Returns the first generation when it stands; None if the run is beyond it.

        timeout: how long others may take; one that is silent for longer is replaced.
        """
        self._store.set(f"{PREFIX}deadline/{self.member}", str(timeout.total_seconds()))
        self._store.set(f"{PREFIX}card/{self.member}", self.me.format())
        first = self._read(1)
        return first if self.member in first.members else None

    def enter(self, generation: Generation) -> dist.Store:
        """This worker belongs to `generation` now; returns the part of the store that is the generation's own."""
        self.current, self.is_called = generation, False
        threading.Thread(target=self._listen, args=(generation,), name="lockstep-elastic", daemon=True).start()
        return dist.PrefixStore(world_prefix(generation.number), self._shared)

    def leave(self, facts: dict[str, Any]) -> None:
        """The current generation has ended for this worker; `facts` tell the coordinator how."""
        assert self.current is not None
        self._store.set(f"{PREFIX}report/{self.current.number}/{self.member}", json.dumps(facts))

    def following(self) -> Generation:
        """The generation after the current one, when it stands; this worker may not be in it."""
        assert self.current is not None
        return self._read(self.current.number + 1)

    def tell_begun(self, shards: Sequence[int], took_s: float, num_replayed: int) -> None:
        """The current generation trains; said by worker 0, for logs and reports."""
        assert self.current is not None
        told = {"shards": list(shards), "took_s": round(took_s, 4), "replayed": num_replayed}
        self._store.set(f"{PREFIX}begun/{self.current.number}", json.dumps(told))

    def tell_trainer(self) -> None:
        """The script has made a trainer."""
        self._store.set(f"{PREFIX}trainer", "1")

    def tell_source(self, source: int) -> None:
        """The run is in this source of batches now; said by worker 0."""
        self._store.set(f"{PREFIX}source", str(source))

    def ask_in(self, source: int) -> Generation | int:
        """As a newcomer, ready to begin in `source`: the generation to be in, or the source that the run is in."""
        self._store.set(f"{PREFIX}ready/{self.member}/{source}", "1")
        answer = json.loads(self._store.get(f"{PREFIX}admit/{self.member}/{source}"))
        return int(answer["source"]) if "source" in answer else self._read(answer["generation"])

    def stay_out(self) -> None:
        """As a newcomer, come to a step with a batch of the script's own: which one is due, nobody can tell it.

        So it waits for the end of the run. The others go on; should none be left, all start anew.
        """
        print(
            f"lockstep: worker {self.member} cannot be let in: this script makes its batches itself. With those of "
            "trainer.batches(...) a newcomer would find its place in the data.",
            file=sys.stderr,
            flush=True,
        )
        self._store.wait([f"{PREFIX}admit/{self.member}/never"], PATIENCE)

    def _read(self, number: int) -> Generation:
        said = json.loads(self._store.get(f"{PREFIX}generation/{number}"))
        if "stop" in said:
            raise Stopped(said["stop"])
        peers = tuple(replace(Peer.parse(card), rank=rank) for rank, card in enumerate(said["cards"]))
        return Generation(number, tuple(said["members"]), peers)

    def _listen(self, generation: Generation) -> None:
        try:
            self._store.wait([f"{PREFIX}call/{generation.number}"], PATIENCE)
        except RuntimeError:  # The run is over, or keys of an old generation are forgotten.
            return
        if self.current is generation:
            self.is_called = True


class Stopped(LockstepError):
    """The coordinator has ended the run: no generation follows."""
