"""What the workers of one host have together: one control segment, the barrier, and what moves bytes between them."""

from datetime import timedelta

import torch.distributed as dist

from lockstep.comm.peers import Peer
from lockstep.comm.shm.barrier import PAGE_BYTES, Barrier
from lockstep.comm.shm.copies import Copies, Window, half_bytes
from lockstep.comm.shm.p2p import RING_BYTES, Messages
from lockstep.comm.shm.queue import Turn
from lockstep.comm.shm.reductions import Reductions
from lockstep.comm.shm.segment import Heap, open_segment, watch_peers


class Host:
    """One worker's side of it; collective to make. One thread at a time uses it."""

    def __init__(self, store: dist.Store, rank: int, peers: tuple[Peer, ...], timeout: timedelta, turn: Turn) -> None:
        """`rank`: this worker's place among `peers`, the workers of this host in the group."""
        size = len(peers)
        rings_at = PAGE_BYTES + 2 * half_bytes(size)
        slice_bytes = rings_at + size * RING_BYTES
        watch = watch_peers(peers, rank, timeout)
        control = open_segment("control", slice_bytes, store=store, rank=rank, size=size, watch=watch)
        barrier = Barrier(control, rank, peers, timeout, turn)
        self.rank, self.size, self.barrier = rank, size, barrier
        self.heap = Heap(store, rank, size, lambda: watch_peers(peers, rank, barrier.timeout, barrier.look))
        window = Window(control, PAGE_BYTES)
        self.reductions = Reductions(barrier, window, self.heap)
        self.copies = Copies(barrier, window, self.heap)
        self.messages = Messages(barrier, control, rings_at)
