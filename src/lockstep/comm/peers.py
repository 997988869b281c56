"""Who else is in this world, and how to wait for them without waiting for ever.

A wait is cut into slices of a second. Between slices a worker looks whether its peers are there: those of its own
host by process id (a killed process is seen at once, whatever the backend makes of it), those of other hosts by
what they left in the store. A wait therefore ends in one of three ways: the result; `WorkerLost` naming who died
or left; `WorkerLost` at the deadline, naming who did not answer. Nothing of this runs on the path of a step that
takes less than a second. Over shared memory the waiting thread may carry the operation out itself: then the operation
calls back between the slices of its own waits, and the same is looked at, once a second.

What the store holds, one writer per key: `left/R` is written by worker R when it leaves; `call` is set by anybody
whose connection broke or whose deadline has passed; `here/R` is worker R's answer to the call, given between two
slices of its own wait or when its own wait fails. A worker that is neither waiting nor gone does not answer within
the grace time: it is named as not answering, not as dead. A store whose server is stopped answers nobody, ever: it is
asked from a thread, so that the wait still ends.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from lockstep.errors import UsageError, WorkerLost

SLICE = timedelta(seconds=1)
GRACE = timedelta(seconds=4)
"""How long a worker whose connection broke looks for the cause before it says that it found none."""
ANSWER = timedelta(seconds=2)
"""How long the store may take for an answer."""


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


@dataclass(frozen=True, slots=True)
class Peer:
    """One worker's process."""

    rank: int
    host: str
    """Name of the host and of its namespaces: equal means that process ids can be compared and memory be shared."""
    pid: int
    started: int
    """Start time in clock ticks, so that a reused process id is not taken for the worker."""

    @classmethod
    def me(cls, rank: int) -> "Peer":
        """This process."""
        host = f"{socket.gethostname()}/{_namespace('pid')}/{_namespace('net')}"
        return cls(rank, host, os.getpid(), _start_time(os.getpid()) or 0)

    @classmethod
    def parse(cls, text: str) -> "Peer":
        """The peer that `text` was made from by `format`."""
        rank, pid, started, host = text.split(" ", 3)
        return cls(int(rank), host, int(pid), int(started))

    def format(self) -> str:
        """One line that tells others which process this is."""
        return f"{self.rank} {self.pid} {self.started} {self.host}"

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

    def __str__(self) -> str:
        return f"worker {self.rank} (pid {self.pid} on {self.host.partition('/')[0]})"


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

    def __init__(self, me: Peer, peers: tuple[Peer, ...], store: dist.Store | None, timeout: timedelta) -> None:
        self.me = me
        self.all = peers
        self.timeout = timeout
        self.store = store
        self._asking: threading.Thread | None = None
        """Who asks the store; alive while it does not answer."""
        self._local = tuple(p for p in peers if p.host == me.host and p.rank != me.rank)
        self.broken = False
        """Set once a peer was found missing: the groups of this world cannot be relied on any more."""
        self.waits: tuple[Doing, float] | None = None
        """What this worker waits in now, and since when (monotonic clock): for whoever watches from another thread."""
        self.witness: Callable[[], str] | None = None
        """Tells what is known of those who are missing, where somebody watches; added to the error."""

    @property
    def are_on_one_host(self) -> bool:
        """Whether all workers can share memory."""
        return len(self._local) == len(self.all) - 1

    def has_lost(self) -> bool:
        """Whether a worker was found missing, or has ended on this host."""
        return self.broken or any(p.is_dead() for p in self._local)

    def wait(self, work: Waitable, doing: Doing) -> None:
        """Return when `work` is done; raise WorkerLost, saying what this worker was `doing`, if it never will be."""
        begun = time.monotonic()
        self.waits = (doing, begun)
        try:
            self._wait(work, doing, begun + self.timeout.total_seconds())
        finally:
            self.waits = None

    def _wait(self, work: Waitable, doing: Doing, deadline: float) -> None:
        help_out = getattr(work, "help", None)
        if help_out is not None:
            self._help(help_out, doing, deadline)
        while True:
            try:
                work.wait(SLICE)
                return
            except UsageError:
                raise
            except RuntimeError as error:
                if work.is_completed():
                    self._settle(work, _words(doing), error)
                    return
            self._look(doing, deadline)

    def _help(self, help_out: Callable[[Callable[[], None]], None], doing: Doing, deadline: float) -> None:
        """Have it carried out in this thread, which has nothing else to do, if nobody else has begun.

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
        dead = tuple(p for p in self._local if p.is_dead())
        if dead:
            raise self._lost(text, dead, "ended")
        if time.monotonic() > deadline:
            raise self._unanswered(text)
        self._answer_call(text)

    def leave(self) -> None:
        """Tell those who may still wait that this worker has left."""
        if self.store is not None and not self.broken:
            # Where the store's host is gone too, there is nobody left to tell.
            with contextlib.suppress(RuntimeError):
                self.store.set(f"left/{self.me.rank}", "1")

    def _settle(self, work: Waitable, doing: str, error: RuntimeError) -> None:
        try:
            work.wait()  # It had ended just after the slice did: the result, or the true error.
        except RuntimeError as failure:
            if isinstance(failure, UsageError):
                raise
            raise self._explain(doing, failure) from error

    def _explain(self, doing: str, failure: RuntimeError) -> WorkerLost:
        """A connection broke. Look for the dead for a while, then ask who is there."""
        if isinstance(failure, WorkerLost) and failure.ranks:  # A backend that knows by itself.
            return self._lost(doing, tuple(p for p in self.all if p.rank in failure.ranks), "is gone")
        give_up = time.monotonic() + GRACE.total_seconds()
        while time.monotonic() < give_up:
            dead = tuple(p for p in self._local if p.is_dead())
            if dead:
                return self._lost(doing, dead, "ended")
            if left := self._those_who_left():
                return self._lost(doing, left, "left")
            time.sleep(0.05)
        if self._is_unheard():
            return self._unanswered(doing)
        if not self._store_is_there():
            self.broken = True
            return WorkerLost(
                f"worker {self.me.rank}: the place where the workers met is gone while this worker was {doing}. The "
                "worker or launcher that served it has ended: its own output says why."
            )
        if "Timed out" in str(failure):
            return self._unanswered(doing)
        absent = self._absent()
        if absent:
            return self._lost(doing, absent, "does not answer")
        self.broken = True
        return WorkerLost(f"worker {self.me.rank}: the connection broke while {doing}: {failure}")

    def _unanswered(self, doing: str) -> WorkerLost:
        self._call()
        give_up = time.monotonic() + GRACE.total_seconds()
        while self._absent() and time.monotonic() < give_up:
            time.sleep(0.05)
        if self._is_unheard():
            return self._unheard(doing)
        return self._lost(doing, self._absent(), f"did not answer within {self.timeout}")

    def _unheard(self, doing: str) -> WorkerLost:
        """Nobody can be asked; those of this host who are stopped can be seen."""
        self.broken = True
        stopped = tuple(p for p in self._local if p.process_state() in ("T", "t"))
        names = f" {', '.join(map(str, stopped))} is stopped." if stopped else ""
        return WorkerLost(
            f"worker {self.me.rank}: what it waits for did not come within {self.timeout}, and the place where "
            f"the workers met does not answer either, while this worker was {doing}.{names} Look at worker 0 or the "
            f"launcher, whichever serves it.{self._witnessed()}",
            tuple(p.rank for p in stopped),
        )

    def _ask(self, question: Callable[[], Any]) -> Any:
        """What the store answers; RuntimeError if it fails, or does not answer in time."""
        answers: list[Any] = []

        def ask() -> None:
            try:
                answers.append(question())
            except RuntimeError as error:
                answers.append(error)

        if not self._is_unheard():
            self._asking = threading.Thread(target=ask, name="lockstep-asking", daemon=True)
            self._asking.start()
            self._asking.join(ANSWER.total_seconds())
        if not answers:
            raise _Unheard("the store does not answer")
        if isinstance(answers[0], RuntimeError):
            raise answers[0]
        return answers[0]

    def _is_unheard(self) -> bool:
        """Whether the store owes an answer."""
        return self._asking is not None and self._asking.is_alive()

    def _call(self) -> None:
        if self.store is not None:
            with contextlib.suppress(RuntimeError):
                self._set("call")
                self._set(f"here/{self.me.rank}")

    def _answer_call(self, doing: str) -> None:
        if self.store is None:
            return
        try:
            if self._check("call"):
                self._set(f"here/{self.me.rank}")
        except _Unheard:
            pass  # Its server is stopped; this wait ends at its deadline.
        except RuntimeError as error:
            raise self._explain(doing, error) from error

    def _set(self, key: str) -> None:
        store = self.store
        assert store is not None
        self._ask(lambda: store.set(key, "1"))

    def _check(self, key: str) -> bool:
        store = self.store
        assert store is not None
        return bool(self._ask(lambda: store.check([key])))

    def _store_is_there(self) -> bool:
        try:
            return self.store is None or self._check("call") in (True, False)
        except RuntimeError:
            return False

    def _absent(self) -> tuple[Peer, ...]:
        self._call()
        return tuple(p for p in self.all if p.rank != self.me.rank and not self._has(f"here/{p.rank}"))

    def _those_who_left(self) -> tuple[Peer, ...]:
        return tuple(p for p in self.all if p.rank != self.me.rank and self._has(f"left/{p.rank}"))

    def _has(self, key: str) -> bool:
        try:
            return self.store is not None and self._check(key)
        except RuntimeError:
            return False

    def _lost(self, doing: str, peers: tuple[Peer, ...], how: str) -> WorkerLost:
        self.broken = True
        names = ", ".join(str(p) for p in peers) or "a worker"
        return WorkerLost(
            f"worker {self.me.rank}: {names} {how} while this worker was {doing}. "
            "Its own output says why; a process that was killed without a word often ran out of memory."
            f"{self._witnessed()}",
            tuple(p.rank for p in peers),
        )

    def _witnessed(self) -> str:
        """What is known besides, to be added to an error."""
        known = self.witness() if self.witness is not None else ""
        return f" {known}" if known else ""


class _Unheard(RuntimeError):
    """The store does not answer, as one whose server is stopped."""
