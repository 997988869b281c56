"""How the workers of a group meet before they share memory: who is there, and are they all on this host?"""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from lockstep.comm.peers import Peer
from lockstep.comm.segment import Watch, await_keys
from lockstep.comm.shm.board import Board
from lockstep.errors import LaunchError, WorkerLost


def meet(store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta) -> tuple[Peer, ...]:
    """Who is behind each rank; raises LaunchError if they are not all on this host."""
    me = Peer.me(ranks[rank])
    store.set(f"peer/{rank}", me.format())
    deadline = time.monotonic() + timeout.total_seconds()

    def watch(doing: str) -> None:
        if time.monotonic() > deadline:
            missing = [str(ranks[other]) for other in range(size) if not store.check([f"peer/{other}"])]
            raise LaunchError(
                f"worker {me.rank}: waited {timeout} for the workers of a group; missing: {', '.join(missing)}. All of "
                "them must make the group."
            )

    values = await_keys(store, [f"peer/{other}" for other in range(size)], watch, "meeting")
    peers = tuple(Peer.parse(value.decode()) for value in values)
    elsewhere = [peer for peer in peers if peer.host != me.host]
    if elsewhere:
        raise LaunchError(
            f"worker {me.rank}: backend shm needs all workers on one host (and in one container), and "
            f"{', '.join(map(str, elsewhere))} run elsewhere. Use gloo."
        )
    return peers


def watch_peers(peers: tuple[Peer, ...], rank: int, timeout: timedelta, board: Board | None = None) -> Watch:
    """What a wait while memory is handed over looks at: the dead, and the deadline."""
    deadline = time.monotonic() + timeout.total_seconds()

    def watch(doing: str) -> None:
        if board is not None:
            board.look(doing.encode())
        dead = [peer for peer in peers if peer.rank != peers[rank].rank and peer.is_dead()]
        if dead:
            names = ", ".join(map(str, dead))
            raise WorkerLost(
                f"worker {peers[rank].rank}: {names} ended while this worker was {doing}. Its own output says why.",
                tuple(peer.rank for peer in dead),
            )
        if time.monotonic() > deadline:
            raise WorkerLost(
                f"worker {peers[rank].rank}: {doing} took longer than {timeout}. All workers of the group must make "
                "the same groups and allocations in the same order."
            )

    return watch
