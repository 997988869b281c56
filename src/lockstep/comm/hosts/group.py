"""The process group that torch gets for `hosts`: shared memory within a host, gloo between them."""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from lockstep.comm.flat_group import AddAlong, Cuts, FlatGroup, Place, Spans, by_nccl
from lockstep.comm.hosts.links import Links, UserMessage
from lockstep.comm.hosts.operations import AlongTree, HostsOperations
from lockstep.comm.hosts.places import Places
from lockstep.comm.peers import Peer
from lockstep.comm.shm import HOSTS
from lockstep.comm.shm.host import Host
from lockstep.comm.shm.queue import Operation, Queue, ShmWork, Turn
from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.comm.tree import ShardTree


class HostsGroup(FlatGroup):
    """A process group of workers of several hosts."""

    backend_name = HOSTS

    def __init__(self, store: dist.Store, rank: int, peers: tuple[Peer, ...], timeout: timedelta) -> None:
        """`peers`: the worker behind each rank of the group."""
        places = Places.of([peer.host for peer in peers], rank)
        here = tuple(peers[each] for each in places.ranks[places.mine])
        host = Host(dist.PrefixStore(f"host{places.mine}", store), places.local, here, timeout, Turn())
        links = Links(store, rank, peers, timeout, host.barrier.look)
        operations = HostsOperations(places, host, links)

        def fail(error: BaseException) -> LockstepError:
            """Break the group for the workers of this host, and let those of others know."""
            raised = host.barrier.fail(error)
            links.close(host.barrier.error or raised)
            return raised

        super().__init__(store, Place(rank, len(peers)), host, operations, operations, Queue("lockstep-hosts", fail))
        self._places, self._links, self.operations = places, links, operations
        self._num_called = 0

    def adder(self, tree: "ShardTree") -> AddAlong | None:
        """See FlatGroup."""
        if not self._places.is_in_order:
            return None
        adding = AlongTree(self._places, self._host, tree)

        def add(lanes: Tensor, cuts: Cuts, out: Tensor | None) -> None:
            if out is None:
                self.operations.add_all(adding.of(lanes), lanes[-1])
            else:
                self.operations.add_parts(adding.of(lanes), cuts, out)

        return add

    def share(self, flats: Sequence[tuple[Tensor, Spans]]) -> ShmWork:
        """See FlatGroup."""
        return self.submit("share", lambda: self.operations.share(flats), [flat for flat, _ in flats])

    @property
    def writes_for(self) -> tuple[int, ...]:
        """See FlatGroup."""
        return (self._places.rank, *self._places.partners)

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of every wait."""
        super().set_timeout(timeout)
        self._links.timeout = timeout

    def submit(self, name: str, operation: Operation, outputs: Sequence[Tensor]) -> ShmWork:
        """See FlatGroup."""
        self._num_called += 1
        return super().submit(name, operation, outputs)

    def _do(self, name: str, operation: Operation, outputs: Any, options: Any) -> Any:
        self._num_called += 1
        return super()._do(name, operation, outputs, options)

    def _get_sequence_number_for_group(self) -> int:
        return self._num_called

    # From one worker to another: as over gloo.

    @by_nccl("send")
    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        """Send to one worker."""
        return self._user(self._links.gloo.send(tensors, target, tag))

    @by_nccl("recv")
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        """Receive from one worker."""
        return self._user(self._links.gloo.recv(tensors, source, tag))

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive from whichever worker sends first."""
        return self._user(self._links.gloo.recv_anysource(tensors, tag))

    def _user(self, work: Any) -> Any:
        return self._collect(UserMessage(work, self._links.timeout))
