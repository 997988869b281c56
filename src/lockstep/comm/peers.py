"""Who else is in this world, and how to wait for them without waiting for ever.

A wait is cut into slices of a second. Between slices a worker looks whether its peers are there: those of its own
host by process id (a killed process is seen at once, whatever the backend makes of it), those of other hosts by
what they left in the store, see notices.py. A wait therefore ends in one of three ways: the result; `WorkerLost` naming
who died or left; `WorkerLost` at the deadline, naming who did not answer. Nothing of this runs on the path of a step
that takes less than a second. Over shared memory the waiting thread may carry the operation out itself: then the
operation calls back between the slices of its own waits, and the same is looked at, once a second.

A worker that waits has its hands free. What others may need of it in the meantime (see `servers`) it does between two
looks at its own operation, in the waiting thread, which is the training's.

Every wait of a worker, and what ends it if what it waits for never comes (the deadline is `join(timeout=...)`):

    messages in host memory, hooks' futures, `Async`, saves   `Peers.wait`: a death, a failure, the deadline
    messages on a GPU                                         the backend's deadline, `group.MARGIN` later; in elastic
                                                              runs a step's report as messages in host memory
    several messages in a row, in a thread                    as they; the thread is waited for by `Peers.wait`
    joining, opening groups and shared memory                 looks at the dead; the deadline
    a save beside the training                                a loss, the deadline
    leaving                                                   threads and the store, 2 s each; see group.py
    watching                                                  never in the training thread
    a launcher, for the others once one failed                5 s, then SIGTERM, and SIGKILL after 5 s more
"""

import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from lockstep.comm.notices import FINISHED, RAISED, Notices, farewell
from lockstep.errors import UsageError, WorkerLost

SLICE = timedelta(seconds=1)
GRACE = timedelta(seconds=4)
"""How long a worker whose connection broke looks for the cause before it says that it found none."""
BRIEF = timedelta(milliseconds=20)
"""How long a wait lasts before this worker looks what others need of it: longer than most waits of a step."""
SERVING = timedelta(milliseconds=2)
"""How long a slice is from then on."""
DEATH_SEEN = timedelta(milliseconds=50)
"""How long a worker waits for its GPU without a look at the others."""
NEWS = timedelta(seconds=0.5)
"""How long it may take until the kernel, or the launcher, shows that a process has ended whose connections broke."""
_PAUSE_S = 0.05
_POLL_S = 0.0001

Doing = str | Callable[[], str]
"""What a worker was doing, in words; a function where making the words costs something."""


def _words(doing: Doing) -> str:
    return doing if isinstance(doing, str) else doing()


class Waitable(Protocol):
    """What torch.distributed returns for an asynchronous operation."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Block until done; raises RuntimeError on failure or when `timeout` is over."""

    def is_completed(self) -> bool:
        """Whether the operation has ended, well or badly."""


class QueuedWork:
    """All that the current stream of a GPU has been given; a death is looked for often, since no connection tells."""

    def __init__(self, device: torch.device) -> None:
        self._end = torch.cuda.current_stream(device).record_event()

    def is_completed(self) -> bool:
        """See Waitable."""
        return bool(self._end.query())

    def wait(self, timeout: timedelta = BRIEF) -> bool:
        """See Waitable; for no longer than DEATH_SEEN."""
        give_up = time.monotonic() + min(timeout, DEATH_SEEN).total_seconds()
        while not self.is_completed():
            if time.monotonic() > give_up:
                raise RuntimeError("timed out")
            time.sleep(_POLL_S)
        return True


class Server(Protocol):
    """Does what others may need of a worker that waits for something else."""

    def serve(self) -> bool:
        """Do what others need now; returns whether there may be more to do before the wait is over."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One worker's process."""

    rank: int
    host: str
    """Name of the host and of its namespaces: equal means that process ids can be compared and memory be shared."""
    pid: int
    started: int
    """Start time in clock ticks, so that a reused process id is not taken for the worker."""
    address: str = ""
    """The address of its interface that leads to where the workers met; empty if that is not known."""

    @classmethod
    def me(cls, rank: int, address: str = "") -> "Peer":
        """This process."""
        host = f"{socket.gethostname()}/{_namespace('pid')}/{_namespace('net')}"
        return cls(rank, host, os.getpid(), _start_time(os.getpid()) or 0, address)

    @classmethod
    def parse(cls, text: str) -> "Peer":
        """The peer that `text` was made from by `format`."""
        rank, pid, started, address, host = text.split(" ", 4)
        return cls(int(rank), host, int(pid), int(started), address)

    def format(self) -> str:
        """One line that tells others which process this is."""
        return f"{self.rank} {self.pid} {self.started} {self.address} {self.host}"

    def is_dead(self) -> bool:
        """Whether the process has ended; only meaningful on the peer's own host."""
        return _start_time(self.pid) != self.started

    def process_state(self) -> str:
        """The kernel's letter for what the process does (T: stopped), X if it has ended, empty if it cannot be told."""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            letter = ""
        return "X" if self.is_dead() else letter

    def is_stopped(self) -> bool:
        """Whether the process is stopped, as by SIGSTOP; only meaningful on the peer's own host."""
        return self.process_state() in ("T", "t")

    def __str__(self) -> str:
        return f"worker {self.rank} (pid {self.pid} on {self.host.partition('/')[0]})"


def advice(how: Sequence[str]) -> str:
    """What to do about workers that are gone in these ways."""
    if any("came to its end" in text for text in how):
        return (
            "Every worker must make the same calls, equally often: look for a condition that depends on the rank, or "
            "for a worker with fewer batches (lockstep.shard and model.join() allow for those)."
        )
    if any("is stopped" in text for text in how):
        return "`kill -CONT PID` lets a stopped process go on."
    if any("timed out" in text for text in how):
        return "The stack of a worker that is somewhere else is in its own output. join(timeout=...) sets the deadline."
    if all(text == "ended" for text in how):
        return "Its own output says why; a process that was killed without a word often ran out of memory."
    return "Its own output says more."


def _namespace(kind: str) -> int:
    """Which namespace of this kind the process is in: two network namespaces are two hosts to everybody in them."""
    try:
        return Path(f"/proc/self/ns/{kind}").stat().st_ino
    except OSError:
        return 0


def _start_time(pid: int) -> int | None:
    """When process `pid` started, 0 where that cannot be told, None when it has ended (or is a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass
        return 0
    except ProcessLookupError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


class Peers:
    """The processes of one world, as seen from this one."""

    def __init__(
        self,
        me: Peer,
        peers: tuple[Peer, ...],
        store: dist.Store | None,
        timeout: timedelta,
        secret: bytes | None = None,
        servers: "weakref.WeakSet[Server] | None" = None,
    ) -> None:
        self.me = me
        self.all = peers
        self.timeout = timeout
        self.secret = secret
        """What the workers of this run know and others do not; None where the launcher gave none."""
        self._notices = Notices(store, me.rank)
        self._local = tuple(p for p in peers if p.host == me.host and p.rank != me.rank)
        self._culprit: int | None = None
        """The worker by which this world was broken, as far as this one knows."""
        self.broken = False
        """Set once a peer was found missing: the groups of this world cannot be relied on any more."""
        self.waits: tuple[Doing, float] | None = None
        """What this worker waits in now, and since when (monotonic clock): for whoever watches from another thread."""
        self.servers: weakref.WeakSet[Server] = weakref.WeakSet() if servers is None else servers
        """What others may need of this worker while it waits, for whatever; the thread that waits asks them."""
        self.witness: Callable[[], str] | None = None
        """Tells what is known of those who are missing, where this worker is watched; added to the error."""

    @property
    def store(self) -> dist.Store | None:
        """The part of the store that is this world's; None in a world of one."""
        return self._notices.store

    @property
    def are_on_one_host(self) -> bool:
        """Whether all workers can share memory."""
        return len(self._local) == len(self.all) - 1

    def has_lost(self) -> bool:
        """Whether a worker was found missing, or has ended on this host."""
        return self.broken or bool(self._dead())

    def listen(self) -> None:
        """From now on, tell those who call where this worker is, whatever it does."""
        if len(self.all) > 1:
            self._notices.listen(lambda: self.waits is not None)

    def leave(self) -> None:
        """Tell those who may still wait that this worker has left, and how."""
        text = farewell()
        if text.startswith(RAISED) and not self.broken:
            self._culprit = self.me.rank
        self._notices.leave(text, self._culprit)

    def retire(self) -> None:
        """This world has ended, and this worker goes on in another one: listen no more."""
        self.broken = True
        self._notices.retire()

    # Waiting

    def wait(self, work: Waitable, doing: Doing) -> None:
        """Return when `work` is done; raise WorkerLost, saying what this worker was `doing`, if it never will be."""
        begun = time.monotonic()
        outer, self.waits = self.waits, (doing, begun)
        try:
            self._wait(work, doing, begun + self.timeout.total_seconds())
        finally:
            self.waits = outer

    def _wait(self, work: Waitable, doing: Doing, deadline: float) -> None:
        help_out = getattr(work, "help", None)
        if help_out is not None:
            self._help(help_out, doing, deadline)
        slice_, looked = BRIEF if self.servers else SLICE, time.monotonic()
        while True:
            try:
                work.wait(slice_)
                return
            except UsageError:
                raise
            except RuntimeError as error:
                if work.is_completed():
                    self._settle(work, _words(doing), error)
                    return
            slice_ = SERVING if self.serve() else SLICE
            if slice_ is SLICE or time.monotonic() > min(looked + SLICE.total_seconds(), deadline):
                self._look(doing, deadline)
                looked = time.monotonic()

    def serve(self) -> bool:
        """Do what others need of this worker now; called where it waits. Returns whether there may be more to do."""
        have_served = [server.serve() for server in self.servers]
        return any(have_served)

    def _help(self, help_out: Callable[[Callable[[], None]], None], doing: Doing, deadline: float) -> None:
        """Have it carried out in this thread, which has nothing else to do, if no other thread has begun.

        What is done between the slices of a wait is done all the same, and an error of that is raised as it is.
        """
        last, raised = time.monotonic(), []

        def between() -> None:
            nonlocal last
            now = time.monotonic()
            if now - last > SLICE.total_seconds() or now > deadline:
                try:
                    self._look(doing, deadline)
                except RuntimeError as error:
                    raised.append(error)
                    raise
                last = time.monotonic()

        help_out(between)
        if raised:
            raise raised[0]

    def _look(self, doing: Doing, deadline: float) -> None:
        """Between two slices of a wait: raise if it need not go on, and answer those who call."""
        text = _words(doing)
        if dead := self._dead():
            raise self._lost(text, dead, "ended")
        failed = self._notices.get("failed")
        if culprits := tuple(p for p in self._others() if str(p.rank) == failed):
            raise self._lost(text, culprits, "failed")
        if time.monotonic() > deadline:
            raise self._unanswered(text)
        try:
            self._notices.answer(text)
        except RuntimeError as error:
            raise self._explain(text, error) from error

    def _settle(self, work: Waitable, doing: str, error: RuntimeError) -> None:
        try:
            work.wait()  # It had ended just after the slice did: the result, or the true error.
        except RuntimeError as failure:
            if isinstance(failure, UsageError):
                raise
            raise self._explain(doing, failure) from error

    # Finding out who is missing

    def _others(self) -> tuple[Peer, ...]:
        return tuple(p for p in self.all if p.rank != self.me.rank)

    def _dead(self) -> tuple[Peer, ...]:
        return tuple(p for p in self._local if p.is_dead())

    def _explain(self, doing: str, failure: RuntimeError) -> WorkerLost:
        """A connection broke. Look for the dead for a while, then ask who is there."""
        if isinstance(failure, WorkerLost) and failure.ranks:  # A backend that knows by itself.
            return self._named_by(doing, failure)
        if "timed out" in str(failure).lower():
            return self._unanswered(doing)
        give_up = time.monotonic() + GRACE.total_seconds()
        while time.monotonic() < give_up:
            if dead := self._dead():
                return self._lost(doing, dead, "ended")
            if left := tuple(p for p in self._others() if self._notices.farewell(p.rank)):
                return self._lost(doing, left, "left")
            time.sleep(_PAUSE_S)
        if self._notices.are_unheard:
            return self._unanswered(doing)
        if not self._notices.is_store_there():
            self.broken = True
            return WorkerLost(
                f"worker {self.me.rank}: the place where the workers met is gone while this worker was {doing}. The "
                "worker or launcher that served it has ended: its own output says why."
            )
        self._notices.call(doing)
        if absent := self._absent():
            return self._lost(doing, absent, "does not answer")
        self.broken = True
        return WorkerLost(f"worker {self.me.rank}: the connection broke while {doing}: {failure}")

    def _named_by(self, doing: str, failure: WorkerLost) -> WorkerLost:
        """The backend has named who is lost: what is known of these here."""
        if self.me.rank in failure.ranks:
            self.broken = True
            return WorkerLost(
                f"worker {self.me.rank}: the others have given up waiting for this worker, which came too late to "
                f"{doing}: {failure}",
                tuple(rank for rank in failure.ranks if rank != self.me.rank),
            )
        named = tuple(p for p in self.all if p.rank in failure.ranks)
        # The kernel closes the connections of a process that is killed before it shows the process as ended.
        give_up = time.monotonic() + NEWS.total_seconds()
        while not (is_gone := self._are_gone(named)) and time.monotonic() < give_up:
            time.sleep(_PAUSE_S)
        return self._lost(doing, named, "is gone") if is_gone else self._unanswered(doing)

    def _are_gone(self, named: Sequence[Peer]) -> bool:
        """Whether one of `named` has ended, or has said that it leaves."""
        is_dead = any(p in self._local and p.is_dead() for p in named)
        return is_dead or any(self._notices.farewell(p.rank) for p in named)

    def _unanswered(self, doing: str) -> WorkerLost:
        """The deadline has passed: ask who is there, and where the others are."""
        self._notices.call(doing)
        called = time.monotonic()
        while (absent := self._absent()) and (waited := time.monotonic() - called) < GRACE.total_seconds():
            if self._notices.are_unheard:
                break
            # Who waits answers after a slice: those who have only said where they are by then are elsewhere.
            if waited > 2 * SLICE.total_seconds() and all(self._notices.get(f"at/{p.rank}") for p in absent):
                break
            time.sleep(_PAUSE_S)
        if self._notices.are_unheard:
            return self._unheard(doing)
        how = f"did not answer within {self.timeout} (timed out)"
        if absent:
            return self._lost(doing, absent, how)
        self.broken = True
        others = [f"worker {p.rank} was {self._notices.get(f'here/{p.rank}')}" for p in self._others()]
        return WorkerLost(
            f"worker {self.me.rank}: timed out after {self.timeout} while this worker was {doing}. All workers answer: "
            f"{'; '.join(others[:8])}. Where these differ, the workers wait for each other in different calls: look "
            f"for a condition that depends on the rank.{self._witnessed()}"
        )

    def _absent(self) -> tuple[Peer, ...]:
        """Those who have not answered the call."""
        return tuple(p for p in self._others() if not self._notices.get(f"here/{p.rank}"))

    # The error

    def _unheard(self, doing: str) -> WorkerLost:
        """The store does not answer, so nobody can be asked; those of this host who are stopped can be seen."""
        self.broken = True
        stopped = tuple(p for p in self._local if p.is_stopped())
        names = f" {', '.join(map(str, stopped))} is stopped." if stopped else ""
        return WorkerLost(
            f"worker {self.me.rank}: what it waits for did not come within {self.timeout} (timed out), and the place "
            f"where the workers met does not answer either, while this worker was {doing}.{names} Look at worker 0 or "
            f"the launcher, whichever serves it.{self._witnessed()}",
            tuple(p.rank for p in stopped),
        )

    def _lost(self, doing: str, peers: tuple[Peer, ...], how: str) -> WorkerLost:
        """The error for the loss of `peers`, with what is known of each, else `how`."""
        self.broken = True
        accounts = {peer: self._account(peer, how) for peer in peers}
        # Who left because of another loss is not the one to look at.
        causes = {peer: text for peer, text in accounts.items() if not text.startswith("raised WorkerLost")} or accounts
        self._culprit = min((peer.rank for peer in causes), default=None)
        names = ", ".join(f"{peer} {text}" for peer, text in causes.items())
        return WorkerLost(
            f"worker {self.me.rank}: {names} while this worker was {doing}. {advice(list(causes.values()))}"
            f"{self._witnessed()}",
            tuple(p.rank for p in peers),
        )

    def _account(self, peer: Peer, how: str) -> str:
        """What is known of a missing worker: its own last word, the launcher's, the kernel's, its listener's."""
        is_dead = peer in self._local and peer.is_dead()
        give_up = time.monotonic() + NEWS.total_seconds()
        while (text := self._notices.farewell(peer.rank)) in ("", FINISHED) and (is_dead or text):
            if time.monotonic() > give_up:
                break
            time.sleep(_PAUSE_S)  # The launcher may know more.
        if text or is_dead:
            return text or "ended"
        if peer in self._local and peer.is_stopped():
            return f"{how}: it is stopped (process state T)"
        place = self._notices.get(f"at/{peer.rank}")
        return f"{how}: it is at {place}" if place else how

    def _witnessed(self) -> str:
        """What is known besides, to be added to an error."""
        known = self.witness() if self.witness is not None else ""
        return f" {known}" if known else ""
