"""How workers find one another: the store of the launch, who is behind each rank, and the way to them.

**The store** is served by worker 0, or by the launcher. In a run with a secret it is ours (see store.py).

**The roster.** A store outlives a world: torchrun restarts workers over one and the same, a script may leave and join
again. Nothing that a launcher says tells the lives apart (torchrun's restart count differs between hosts: only the host
whose worker failed counts it), and a worker that died before it joined has left no trace to count. So every joining has
a card with random letters on it, and worker 0 decides:

    here/R       by worker R: its card
    roster/N     by worker 0: the cards it found; `latest` is the last N
    ack/N/R      by worker R, if roster N has its card
    settled/N    by worker 0, when all have acknowledged

A card of an earlier life is never acknowledged, and once its rank has come and replaced it, worker 0 writes the next
roster. A worker looks whether the roster it has acknowledged is settled before it acknowledges another: so nobody is in
two worlds, and all who return have the same roster. `lockstep/N` is then the part of the store that is this world's.

**The interface.** gloo takes the address that the host's own name has, which on many hosts is 127.0.0.1: others then
cannot reach it, and wait. Here it is the route that decides: the interface by which this worker reaches the place where
all met. Where that is this host itself, under a name that leads back to it, the interface that leads to a worker of
another host. Where all workers are on one host it is loopback, so that no other machine can connect.
"""

import atexit
import functools
import json
import os
import secrets
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lockstep.comm.peers import Peer
from lockstep.comm.routes import interface_of, is_loopback, route_to
from lockstep.comm.store import SecretStore, launchers_store
from lockstep.comm.store_server import StoreServer
from lockstep.environment import LOOPBACK, Launch
from lockstep.errors import LaunchError

NOTICE_S = 10.0
"""A worker that has waited for so long says for whom."""
_LONGEST_PAUSE_S = 0.05
_ATTEMPT = timedelta(seconds=2)
"""How long a told port is tried before it is asked for again."""
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


# --- The store of the launch ---


def open_store(launch: Launch, timeout: timedelta) -> tuple[dist.Store, str]:
    """The key-value store of the launch, and where it is, in words; worker 0 serves it unless the launcher does."""
    where = f"{launch.address}:{launch.port}"
    waiting = threading.Timer(
        NOTICE_S, _say, (launch.rank, f"has tried for {NOTICE_S:.0f} s to reach {where}, where all meet.", timeout)
    )
    waiting.daemon = True
    waiting.start()
    try:
        return _open_store(launch, timeout), where
    except (RuntimeError, OSError) as error:
        serves = launch.rank == 0 and not launch.store_is_up
        what = "could not serve the meeting point at" if serves else "could not reach worker 0 at"
        raise LaunchError(
            f"worker {launch.rank} {what} {where}: {error}. Check that MASTER_ADDR and MASTER_PORT are the same on "
            "all workers (and LOCKSTEP_SECRET, if it is set), that the port is free, and that all workers were started."
        ) from error
    finally:
        waiting.cancel()


def _open_store(launch: Launch, timeout: timedelta) -> dist.Store:
    if launch.secret is None:
        return _torch_store(launch, timeout)
    if launch.own_store:
        return launchers_store(launch.own_store, launch.secret, timeout)
    if launch.store_is_up:
        return _told_store(launch, launch.secret, timeout)
    if launch.rank == 0:
        _serve(launch.address, launch.port, launch.secret)
    return SecretStore((launch.address, launch.port), launch.secret, timeout)


def _told_store(launch: Launch, secret: bytes, timeout: timedelta) -> dist.Store:
    """Our store where MASTER_PORT is torchrun's, whose own keeps nobody out: it only says on which port ours is."""
    theirs, key = _torch_store(launch, timeout), "lockstep/port"
    if launch.rank == 0:
        theirs.set(key, str(_serve(launch.address, 0, secret)))
    until = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            store = SecretStore((launch.address, int(theirs.get(key))), secret, _ATTEMPT)
        except (OSError, ValueError):  # It may be that of an earlier life of worker 0, before a restart.
            if time.monotonic() > until:
                raise
            continue
        store.set_timeout(timeout)
        return store


def _torch_store(launch: Launch, timeout: timedelta) -> dist.Store:
    serves = launch.rank == 0 and not launch.store_is_up
    listener = _listen(LOOPBACK, launch.port) if serves and _is_this_host(launch.address) else None
    return dist.TCPStore(
        launch.address,
        launch.port,
        launch.size,
        is_master=serves,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach() if listener is not None else None,
    )


@functools.cache
def _serve(address: str, port: int, secret: bytes) -> int:
    """Serve the store of a run with a secret as long as this process lives, which may join again; returns the port."""
    listener = _listen(LOOPBACK if _is_this_host(address) else "", port)
    bound: int = listener.getsockname()[1]
    atexit.register(StoreServer(listener, secret).close)
    return bound


def _is_this_host(address: str) -> bool:
    return address in (LOOPBACK, "localhost")


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, on loopback alone or on every interface; torch's own store would always take every one."""
    if host or not socket.has_dualstack_ipv6():
        return socket.create_server((host, port), backlog=2048)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2048)


# --- The roster ---


class Roster:
    """One worker's part in the agreement; `agree` is called once."""

    def __init__(self, store: dist.Store, me: Peer, size: int, timeout: timedelta, where: str) -> None:
        self._whole = store
        self._store = dist.PrefixStore("lockstep", store)
        self._me, self._size, self._timeout, self._where = me, size, timeout, where
        self._card = f"{secrets.token_hex(8)} {me.format()}"
        self._begun = time.monotonic()
        self._pause_s = 0.001
        self._has_said = False

    def agree(self) -> tuple[dist.Store, tuple[Peer, ...]]:
        """The part of the store that belongs to this world, and who is behind each rank."""
        self._store.set(f"here/{self._me.rank}", self._card)
        number, cards = self._lead() if self._me.rank == 0 else self._follow()
        peers = tuple(Peer.parse(card.partition(" ")[2]) for card in cards)
        return dist.PrefixStore(f"lockstep/{number}", self._whole), peers

    def _lead(self) -> tuple[int, list[str]]:
        """On worker 0: write rosters until one is acknowledged by all."""
        while True:
            while None in (cards := self._cards()):
                self._rest([rank for rank, card in enumerate(cards) if card is None])
            number = self._store.add("rosters", 1)
            self._store.set(f"roster/{number}", json.dumps(cards))
            self._store.set("latest", str(number))
            self._store.set(f"ack/{number}/0", "1")
            while unheard := [rank for rank in range(self._size) if not self._store.check([f"ack/{number}/{rank}"])]:
                if self._cards() != cards:
                    break  # What was there was the card of an earlier life.
                self._rest(unheard)
            else:
                self._store.set(f"settled/{number}", "1")
                return number, [card for card in cards if card is not None]

    def _follow(self) -> tuple[int, list[str]]:
        """On the others: acknowledge what has this worker's card, until it is settled."""
        acknowledged, cards = 0, [""]
        while True:
            if acknowledged and self._store.check([f"settled/{acknowledged}"]):
                return acknowledged, cards
            number = int(self._store.get("latest")) if self._store.check(["latest"]) else 0
            if number > acknowledged and not (acknowledged and self._store.check([f"settled/{acknowledged}"])):
                found: list[str] = json.loads(self._store.get(f"roster/{number}"))
                if self._me.rank < len(found) and found[self._me.rank] == self._card:
                    acknowledged, cards = number, found
                    self._store.set(f"ack/{number}/{self._me.rank}", "1")
                    continue
            self._rest([rank for rank, card in enumerate(self._cards()) if card is None] or [0])

    def _cards(self) -> list[str | None]:
        keys = [f"here/{rank}" for rank in range(self._size)]
        if self._store.check(keys) and self._store.has_extended_api():  # type: ignore[attr-defined]
            return [value.decode() for value in self._store.multi_get(keys)]
        return [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]

    def _rest(self, missing: list[int]) -> None:
        """Wait a moment; say after a while for whom, and give up at the deadline."""
        waited_s = time.monotonic() - self._begun
        ranks = ", ".join(map(str, missing))
        if waited_s > self._timeout.total_seconds():
            raise LaunchError(
                f"worker {self._me.rank}: waited {self._timeout} for {self._size} workers at {self._where} (timed "
                f"out); missing: {ranks}. Start all of them, and give join() a longer timeout if they start slowly."
            )
        if waited_s > NOTICE_S and not self._has_said:
            self._has_said = True
            _say(self._me.rank, f"has waited {NOTICE_S:.0f} s at {self._where}; not there yet: {ranks}.", self._timeout)
        time.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def _say(rank: int, what: str, timeout: timedelta) -> None:
    """Tell a person at the terminal what `join` is waiting for."""
    print(f"lockstep: worker {rank} {what} It gives up after {timeout}.", file=sys.stderr, flush=True)


# --- The interface ---


def address_towards(store: dist.Store) -> str:
    """The address of the interface by which this worker reaches the server of `store`; empty if that is not known."""
    whole: Any = store
    while isinstance(whole, dist.PrefixStore):
        whole = whole.underlying_store
    return route_to(str(getattr(whole, "host", "") or LOOPBACK))


def towards_others(me: Peer, peers: tuple[Peer, ...]) -> str:
    """The address at which workers of other hosts reach this one; loopback where all are on one host."""
    away = [peer.address for peer in peers if peer.host != me.host]
    if not away:
        return LOOPBACK
    if not is_loopback(me.address):
        return me.address
    routes = (route_to(address) for address in away if not is_loopback(address))
    return next((address for address in routes if not is_loopback(address)), "")


def choose_interface(me: Peer, peers: tuple[Peer, ...]) -> None:
    """Have gloo listen on the interface that leads to the others, for the life of this process; a user's choice stands.

    torch reads the variable whenever a group is made, and takes no address by another way.
    """
    if GLOO_INTERFACE not in os.environ and (name := interface_of(towards_others(me, peers))):
        os.environ[GLOO_INTERFACE] = name


def addresses(peers: tuple[Peer, ...]) -> str:
    """Who is where, for an error about connections."""
    places = ", ".join(f"worker {peer.rank} at {peer.address or 'an unknown address'}" for peer in peers[:16])
    return (
        f"The workers reach the place where they met from: {places}; gloo uses interface "
        f"{os.environ.get(GLOO_INTERFACE, 'of the host name')}. If they cannot reach one another by these, set "
        f"{GLOO_INTERFACE} (NCCL_SOCKET_IFNAME for NCCL) on each host to the interface that leads to the others."
    )
