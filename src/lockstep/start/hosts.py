"""The launchers of one run that goes over several hosts: how they meet, hear of each other, and end together.

Each host has a launcher, with a number: that of its host. All that they tell each other are keys of the run's store,
which the first one serves (or an etcd cluster keeps, see `comm.etcd`), and nobody uses it who does not know the secret:

    hosts/card/H      by launcher H, when it comes: how many workers it has, where it is, what it was asked for
    hosts/beat/H      by launcher H, every BEAT_S: a number that grows
    hosts/failed/H    by launcher H: one of its workers has failed, or it was asked to end
    hosts/left/H      by launcher H, last of all: how its workers have failed
    hosts/read/H      by launcher H: it has heard how it has ended elsewhere
    hosts/gone/H      by whoever notices: launcher H has been silent for too long, and counts as dead with its workers

An elastic run has more, see `start.elastic`.

**Two halves never both train.** A launcher notes, by its own clock, when the last of its beats *began* that the
store has taken. Once that is ALONE_S ago it kills its workers, whatever else it does: a thread of its own sees to that,
all of whose calls end by then. Others hold a host for dead when they have *seen* no new beat of it for DEAD_S, by their
own clock. They saw its last beat after the store took it, which was after it began; so they decide DEAD_S after that at
the earliest, when the workers have been dead for about DEAD_S - ALONE_S. That difference is what clocks may differ in
rate, and what the thread may be late. No clock is compared with another host's.

Where a whole launcher stands still for longer (SIGSTOP, a suspended virtual machine), its workers may outlive the
decision; in an elastic run they still cannot train apart from members elsewhere: a step needs the votes of all members
of a generation, and the next generation is one key, written once, by the one who decides. Where all members are on the
host that stands still, the others have none to go on with, and start anew from their checkpoint: the old workers may
then compute for nothing until the launcher wakes, whose first act is to kill them.

Who decides under etcd holds a key with a lease, and all that it sets is set only if it still does, in one transaction:
one that was late, or stood still, changes nothing.
"""

import contextlib
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lockstep.comm.etcd import LEASE_S, SCHEME, EtcdClient
from lockstep.comm.key_client import KeyClient, StoreClient
from lockstep.comm.routes import interface_of, is_loopback, route_to
from lockstep.comm.store_server import Op, StoreServer
from lockstep.elastic.coordinator import PREFIX as DECISIONS
from lockstep.errors import LaunchError
from lockstep.start.failure import Failure
from lockstep.start.host import require_file_handles
from lockstep.start.run_keys import CALL_S, PREFIX, Alone, RunKeys

if TYPE_CHECKING:
    from lockstep.start.supervisor import Rendezvous

LEADER = f"{PREFIX}leader"
"""Held by the launcher that decides, with a lease, where etcd keeps the keys."""
BEAT_S = 0.5
ALONE_S = 6.0
"""A launcher that could not tell the store for so long that it is there ends its workers."""
DEAD_S = 10.0
"""A host that was not heard of for so long counts as dead."""
LOOK_S = 0.2
"""How often the other hosts are looked at."""
MEET = timedelta(minutes=10)
NOTICE_S = 10.0
"""A launcher that has waited for so long says for whom."""
FAREWELL_S = 25.0
"""How long launchers wait for each other at the end: workers may have NOTICE and twice GRACE, see `supervisor`."""
_PAUSE_S = 0.1
_BACKLOG = 2048
_STDERR_CHARACTERS = 20_000
"""How much of a worker's last words goes to other hosts."""


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Where this launcher belongs."""

    where: str
    """HOST:PORT, where the first host's launcher serves the store; or an etcd cluster."""
    secret: str
    hosts: int = 1
    """How many hosts the run begins with."""
    rank: int | None = None
    """This host's number; None: it joins a run under way."""
    timeout: timedelta = MEET
    """How long the others are waited for."""


class Launchers:
    """This launcher among those of the other hosts. Phases: meet; `start`; attend, again and again; leave; close."""

    def __init__(
        self, options: HostOptions, num_workers: int, asked: dict[str, Any], go_on: Callable[[], bool]
    ) -> None:
        """Meet the others; LaunchError if they do not come. Alone is raised if `go_on` says that it is given up.

        asked: what all launchers of a run must have been asked for alike.
        """
        self.options = options
        self.has_left = False
        self.lost = ""
        """Why this launcher has ended its workers by itself, if it has."""
        self._go_on = go_on
        self._until = time.monotonic() + options.timeout.total_seconds()
        self._server: StoreServer | None = None
        self._is_over = threading.Event()
        self._heard: dict[int, tuple[str, float]] = {}
        """The last beat of each host that was seen, and when it was seen to change."""
        self._torch_listener: socket.socket | None = None
        self._news_fd: int | None = None
        self._etcd: EtcdClient | None = None
        """Asks for the lease, and keeps it."""
        self._lease = ""
        self._held: tuple[int, float] = (0, 0.0)
        """The revision that made this launcher the one that decides, 0 if it is not; until when that is sure."""
        self._kill: Callable[[], None] = lambda: None
        client = self._open()
        self.keys = RunKeys(client, [PREFIX], lambda: self.lost)
        self.address = route_to(client.host)
        """Of the interface that leads to the others."""
        self.number = self._introduce(num_workers, asked)
        """Of this host."""
        self._await_others(asked)
        if self._server is not None:
            require_file_handles(self.num_workers)

    # Meeting

    def _open(self) -> KeyClient:
        where, secret = self.options.where, self.options.secret.encode()
        if where.startswith(SCHEME):
            return self._open_etcd(where, secret)
        address = resolve(where)
        if self.options.rank == 0:
            self._server = StoreServer(_listen(where, address), secret)
            self._news_fd = self._server.watch(DECISIONS)
        self.own_store = f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
        """What workers are told of where the store is: numbers, since names are asked for in the network."""
        begun, has_said = time.monotonic(), False
        while True:
            try:
                return StoreClient(address, secret, 1.0)
            except (OSError, ValueError) as error:
                waited_s = time.monotonic() - begun
                if time.monotonic() > self._until:
                    raise LaunchError(
                        f"host {self._name()} could not reach the first host's launcher at {where} "
                        f"within {self.options.timeout}: {error}. Check that host 0 was started, that --meet is the "
                        "same everywhere and an address of host 0, that no firewall is between, and that "
                        "LOCKSTEP_SECRET (or --secret-file) is the same."
                    ) from error
                if waited_s > NOTICE_S and not has_said:
                    has_said = True
                    self._say(f"has tried for {NOTICE_S:.0f} s to reach host 0 at {where} ({error}).")
            self._check()
            time.sleep(_PAUSE_S)

    def _open_etcd(self, where: str, secret: bytes) -> KeyClient:
        """The keys of an etcd cluster, without those that an earlier run with this secret has left there."""
        self.own_store = where
        begun, has_said = time.monotonic(), False
        while True:
            try:
                return self._enter_etcd(where, secret)
            except OSError as error:
                if time.monotonic() > self._until:
                    raise LaunchError(
                        f"host {self._name()} could not reach a majority of the etcd cluster at {where} within "
                        f"{self.options.timeout}: {error}. Check that its members run and that this host reaches them."
                    ) from error
                if time.monotonic() - begun > NOTICE_S and not has_said:
                    has_said = True
                    self._say(f"has tried for {NOTICE_S:.0f} s to reach etcd at {where} ({error}).")
            self._check()

    def _enter_etcd(self, where: str, secret: bytes) -> KeyClient:
        self._etcd, client = EtcdClient(where, secret, CALL_S), EtcdClient(where, secret, CALL_S)
        keys = RunKeys(client, [PREFIX])
        keys.refresh()
        while self.options.rank is not None and not _are_fresh(keys):
            epoch = keys.get(f"{PREFIX}epoch")
            if self._etcd.wipe(f"{PREFIX}epoch", secrets.token_hex(8), epoch, time.monotonic() + DEAD_S):
                break
            keys.refresh()
        return client

    def _introduce(self, num_workers: int, asked: dict[str, Any]) -> int:
        """Show that this host is there; returns its number."""
        number = self.options.rank
        if number is None:
            number = self._next_number()
        if number == 0 and not asked["elastic"]:  # torch's own groups do not outlive a worker.
            self._torch_listener = socket.create_server(
                (self.address, 0), family=socket.AF_INET6 if ":" in self.address else socket.AF_INET, backlog=_BACKLOG
            )
        card = {
            "workers": num_workers,
            "name": socket.gethostname(),
            "pid": os.getpid(),
            "token": secrets.token_hex(8),
            "address": self.address,
            "port": self._torch_listener.getsockname()[1] if self._torch_listener is not None else 0,
            "asked": asked,
        }
        text = json.dumps(card)
        while (found := self.keys.call(Op.COMPARE_SET, f"{PREFIX}card/{number}", "", text)[0].decode()) != text:
            self.keys.refresh()
            if self.keys.get(f"{PREFIX}gone/{number}") is None:  # It may be an earlier life of this host's launcher.
                self._rest(f"host rank {number} is taken by {_place(json.loads(found))}", DEAD_S + 5)
                continue
            number = self._next_number()
        self._beats = threading.Thread(target=self._beat, args=(number,), name="lockstep-beat", daemon=True)
        self._beats.start()
        return number

    def _next_number(self) -> int:
        """The number of a host that comes to a run under way."""
        first = self.keys.ask(f"{PREFIX}card/0")
        while first is None:
            self._rest(f"there is no run at {self.options.where}", self.options.timeout.total_seconds())
            first = self.keys.ask(f"{PREFIX}card/0")
        asked = json.loads(first)["asked"]
        if not asked["elastic"]:
            raise LaunchError(f"the run at {self.options.where} takes no more hosts: it was started without --elastic.")
        return int(asked["hosts"]) + int(self.keys.call(Op.ADD, f"{PREFIX}joined", "1")[0]) - 1

    def _await_others(self, asked: dict[str, Any]) -> None:
        """Return when all hosts are there that the run begins with."""
        begun, has_said = time.monotonic(), False
        while True:
            self.keys.refresh()
            cards = self.cards
            for number, card in cards.items():
                if number < self.options.hosts and self.options.rank is not None and card["asked"] != asked:
                    raise LaunchError(
                        f"host {number} ({card['name']}) was started with {_asked(card['asked'])} and this one, host "
                        f"{self.number}, with {_asked(asked)}: give all hosts the same."
                    )
            missing = [number for number in range(self.options.hosts) if number not in cards]
            if not missing or self.options.rank is None or self.number != self.options.rank:
                return
            names = ", ".join(map(str, missing))
            if time.monotonic() > self._until:
                raise LaunchError(
                    f"host {self.number} waited {self.options.timeout} for {self.options.hosts} hosts at "
                    f"{self.options.where}; missing: {names}. Start `lockstep run` on each of them with its own "
                    "--host-rank, the same --meet and the same secret."
                )
            if time.monotonic() - begun > NOTICE_S and not has_said:
                has_said = True
                self._say(f"has waited {NOTICE_S:.0f} s at {self.options.where}; not there yet: host {names}.")
            self._check()
            time.sleep(_PAUSE_S)

    def _rest(self, what: str, most_s: float) -> None:
        """Wait a moment for something that is in the way, until `most_s` after the first call."""
        self._until = min(self._until, time.monotonic() + most_s)
        if time.monotonic() > self._until:
            raise LaunchError(f"{what}. Give each host a rank of its own, from 0 to {self.options.hosts - 1}.")
        self._check()
        time.sleep(_PAUSE_S)

    def _check(self) -> None:
        if not self._go_on():
            raise Alone("it was given up before the hosts had met.")

    def _name(self) -> str:
        return "that joins" if self.options.rank is None else str(self.options.rank)

    def _say(self, what: str) -> None:
        say(f"host {self._name()} {what} It gives up after {self.options.timeout}.")

    # What the workers need to know

    @property
    def first_rank(self) -> int:
        """The number of this host's first worker, where ranks go by host."""
        return sum(card["workers"] for number, card in self.cards.items() if number < self.number)

    @property
    def num_workers(self) -> int:
        """On all hosts, those that came later not among them."""
        return sum(card["workers"] for card in self.cards.values())

    @property
    def interface(self) -> str:
        """The name of the interface that leads to the others; empty if it cannot be told."""
        return interface_of(self.address)

    @property
    def torch_listener(self) -> socket.socket | None:
        """Where torch's own store is to be served, on the first host."""
        return self._torch_listener

    @property
    def term(self) -> int:
        """Which time it is that a launcher decides, if it is this one, in an elastic run; else 0."""
        if self._etcd is None:
            return int(self.number == 0)
        revision, until = self._held
        return revision if time.monotonic() < until else 0

    @contextlib.contextmanager
    def deciding(self, term: int) -> Iterator[None]:
        """A block in which keys are set only as long as this launcher decides; raises Deposed where it does not."""
        client = self.keys.client
        if not isinstance(client, EtcdClient):
            yield
            return
        client.guard = (LEADER, term)
        try:
            yield
        finally:
            client.guard = None

    @property
    def is_replaceable(self) -> bool:
        """Whether another launcher decides once this one has ended."""
        return self._etcd is not None

    @property
    def news_fd(self) -> int | None:
        """Can be read when a worker has said something to the one that decides; None where that cannot be known."""
        return self._news_fd

    @property
    def torch_place(self) -> tuple[str, int]:
        """Where torch's own store is: address and port."""
        card = self.cards[min(self.cards)]
        return card["address"], card["port"]

    def host_of(self, rank: int) -> int | None:
        """The host of a worker, where ranks go by host."""
        for number in sorted(self.cards):
            if rank < self.cards[number]["workers"]:
                return number
            rank -= self.cards[number]["workers"]
        return None

    # Being there

    def start(self, kill: Callable[[], None]) -> None:
        """From now on, `kill` this host's workers, from a thread, once this launcher cannot say that it is there."""
        self._kill = kill

    def _beat(self, host: int) -> None:
        number, last = 0, time.monotonic()
        while not self._is_over.is_set():
            begun = time.monotonic()
            left = last + ALONE_S - begun
            if left > 0:
                number += 1
                with contextlib.suppress(OSError):  # To connect and to ask may each take the time that is given.
                    client = self._etcd or self.keys.client
                    client.call(Op.SET, f"{PREFIX}beat/{host}", str(number), timeout_s=left / 2)
                    last = begun
                    self._stand(host, last + ALONE_S)
            elif not self._is_over.is_set():
                self.lost = (
                    f"host {host} could not reach {self.options.where} for {ALONE_S:.0f} s, so its workers were ended: "
                    "the others go on without it, or have ended. The link, or what serves the store, is down."
                )
                self._kill()
                return
            self._is_over.wait(BEAT_S)

    def _stand(self, host: int, until: float) -> None:
        """Decide if nobody does, and keep that up: in an elastic run whose keys are in etcd."""
        etcd, begun = self._etcd, time.monotonic()
        if etcd is None:
            return
        if not self._lease or not etcd.keep_lease(self._lease, until):
            self._held = (0, 0.0)
            self._lease = etcd.grant_lease(until)
        revision = self._held[0] or etcd.claim(LEADER, str(host), self._lease, until)
        self._held = (revision, begun + LEASE_S)

    def silent(self) -> list[int]:
        """Hosts that count as dead and have not been said to be gone; called after each refresh."""
        now = time.monotonic()
        for text, beat in self.keys.under(f"{PREFIX}beat/").items():
            if self._heard.get(int(text), ("", 0.0))[0] != beat:
                self._heard[int(text)] = (beat, now)
        known = {**self.keys.under(f"{PREFIX}gone/"), **self.keys.under(f"{PREFIX}left/")}
        return [host for host, (_, at) in self._heard.items() if now - at > DEAD_S and str(host) not in known]

    def tell_gone(self, host: int) -> None:
        """A host counts as dead from now on."""
        self.keys.set(f"{PREFIX}gone/{host}", "1")

    # The end

    def leave(self, facts: dict[str, Any], patience_s: float = float("inf")) -> dict[int, dict[str, Any]]:
        """Say how it has ended here, and wait for the others to; returns what each has said.

        They may take as long as they like where all has gone well so far: the store is needed until then.
        """
        self.keys.set(f"{PREFIX}left/{self.number}", json.dumps(facts))
        until = time.monotonic() + patience_s
        while True:
            self.keys.refresh()
            if not self._go_on():
                self.keys.set(f"{PREFIX}failed/{self.number}", "1")
            for host in self.silent():
                self.tell_gone(host)
            left = {int(host): json.loads(text) for host, text in self.keys.under(f"{PREFIX}left/").items()}
            gone = {int(host) for host in self.keys.under(f"{PREFIX}gone/")}
            if gone or self.keys.under(f"{PREFIX}failed/"):
                until = min(until, time.monotonic() + FAREWELL_S)
            if set(self.cards) <= left.keys() | gone or time.monotonic() > until:
                break
            time.sleep(_PAUSE_S)
        if self._server is not None:
            self._linger(time.monotonic() + DEAD_S)
        self._is_over.set()
        self._beats.join(CALL_S)
        if self._etcd is not None:
            self._clear(self._etcd, is_last=set(self.cards) <= left.keys() | gone and self._is_lowest(left))
        elif self._server is None:
            self.keys.set(f"{PREFIX}read/{self.number}", "1")
        return left

    def _is_lowest(self, left: Mapping[int, object]) -> bool:
        """Whether this is the first of the hosts that have not gone home yet."""
        return self.number == min(host for host in left if self.keys.get(f"{PREFIX}read/{host}") is None)

    def _clear(self, etcd: EtcdClient, *, is_last: bool) -> None:
        """Let another launcher decide; `is_last`: have the keys of the run away once all have read them."""
        until = time.monotonic() + DEAD_S
        with contextlib.suppress(OSError):
            if self._lease:
                etcd.revoke_lease(self._lease, until)
            if is_last:
                self._linger(until)
                etcd.clear(until)
            else:
                self.keys.set(f"{PREFIX}read/{self.number}", "1")

    def _linger(self, until: float) -> None:
        """Serve until the others have read what was said last."""
        while time.monotonic() < until:
            self.keys.refresh()
            there = set(map(str, self.cards)) - {str(self.number)}
            if there <= self.keys.under(f"{PREFIX}read/").keys() | self.keys.under(f"{PREFIX}gone/").keys():
                return
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """End the beats, and the store if it is here."""
        self._is_over.set()
        self.keys.client.close()
        if self._torch_listener is not None:
            self._torch_listener.close()
        if self._server is not None:
            self._server.close()

    @property
    def cards(self) -> dict[int, dict[str, Any]]:
        """What the launchers of all hosts have said of themselves, by host."""
        cards = {int(host): json.loads(text) for host, text in self.keys.under(f"{PREFIX}card/").items()}
        return dict(sorted(cards.items()))


class Others:
    """The other hosts of a run whose workers stay the same, as a launcher heeds them: one that fails ends all."""

    def __init__(self, launchers: Launchers, rendezvous: "Rendezvous") -> None:
        self._launchers, self._rendezvous = launchers, rendezvous
        self._has_told = self._is_over = False
        self._looked = 0.0
        self._lost = ""

    def attend(self, has_failed: bool) -> bool:
        """Tell the others whether a worker has failed here, and return whether one has anywhere."""
        launchers = self._launchers
        if has_failed and not self._has_told:
            self._has_told = True
            launchers.keys.set(f"{PREFIX}failed/{launchers.number}", "1")
        if time.monotonic() - self._looked > LOOK_S and not launchers.lost:
            self._look()
            self._looked = time.monotonic()
        return has_failed or self._is_over or bool(launchers.lost)

    def _look(self) -> None:
        launchers = self._launchers
        launchers.keys.refresh()
        for host in launchers.silent():
            launchers.tell_gone(host)
            for rank in range(launchers.num_workers):
                if launchers.host_of(rank) == host:
                    self._rendezvous.tell_lost(rank, f"is on host {host}, which does not answer any more")
        for gone in launchers.keys.under(f"{PREFIX}gone/"):
            self._lost = f"host {gone} ({launchers.cards[int(gone)]['name']}) was not heard of for {DEAD_S:.0f} s."
        self._is_over = bool(self._lost) or bool(launchers.keys.under(f"{PREFIX}failed/"))

    def leave(self, failures: Sequence[Failure], signum: int) -> tuple[list[Failure], str]:
        """Exchange how it has ended with the others: all failures, and what else has ended the run."""
        launchers, now = self._launchers, time.time() - time.monotonic()
        here = [replace(each, host=launchers.number) for each in failures]
        if launchers.lost:
            return here, launchers.lost
        told = [asdict(replace(each, time=each.time + now, stderr=shorten(each.stderr))) for each in here]
        try:
            left = launchers.leave({"failures": told, "signal": signum})
        except Alone as alone:
            return here, str(alone)
        away = [
            replace(failure, time=failure.time - now)
            for host, facts in left.items()
            for failure in (Failure(**each) for each in facts["failures"])
            if host != launchers.number
        ]
        for host, facts in left.items():
            if facts["signal"] and host != launchers.number:
                self._lost = f"host {host} was ended by {signal.Signals(facts['signal']).name}."
        return [*here, *away], self._lost


def _are_fresh(keys: RunKeys) -> bool:
    """Whether the keys are of a run that is there, or there are none; else they are what another run has left."""
    if not keys.under(PREFIX):
        return True
    until, beats = time.monotonic() + 4 * BEAT_S + 1, keys.under(f"{PREFIX}beat/")
    while time.monotonic() < until:
        time.sleep(_PAUSE_S)
        keys.refresh()
        if keys.under(f"{PREFIX}beat/") != beats:
            return True
    return False


def say(text: str) -> None:
    """Tell a person at the terminal."""
    print(f"lockstep: {text}", file=sys.stderr, flush=True)


def shorten(text: str) -> str:
    """What of a worker's last words is told to other hosts: the end."""
    return text[-_STDERR_CHARACTERS:]


def resolve(where: str) -> tuple[str, int]:
    """The address and port of HOST:PORT in numbers; LaunchError if there are none."""
    host, colon, port = where.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(
            f"--meet {where}: give HOST:PORT, an address of host 0 and a free port there, as node0:29400."
        )
    try:
        return str(socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][4][0]), int(port)
    except OSError as error:
        raise LaunchError(f"--meet {where}: this host does not know {host!r}: {error}.") from error


def _listen(where: str, address: tuple[str, int]) -> socket.socket:
    """The socket of the store, on the one interface that the others were told."""
    host = where.rpartition(":")[0].strip("[]")
    if is_loopback(address[0]) and not is_loopback(host) and host != "localhost":
        raise LaunchError(
            f"--meet {where}: here {host!r} is {address[0]}, where no other host can reach it (see /etc/hosts). "
            "Give the address that other hosts have for this one."
        )
    try:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        raise LaunchError(
            f"host 0 cannot serve the store at {where}: {error}. --meet must be an address of host 0 itself, and "
            "the port must be free there."
        ) from error


def _place(card: dict[str, Any]) -> str:
    return f"{card['name']} (pid {card['pid']} at {card['address']})"


def _asked(asked: dict[str, Any]) -> str:
    given = {name.replace("_", "-"): value for name, value in asked.items() if value not in (None, False)}
    return " ".join(f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items())
