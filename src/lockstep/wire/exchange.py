"""Carry the parcels of one bucket between the workers of a process group.

The phases of one exchange, in order:

    encode        this worker's bucket into a parcel
    launch        the parcel out; returns what to wait for
    combine       what arrived into the parcel back
    launch_back   the parcel back; returns what to wait for
    decode        what arrived into the bucket: the sum over all workers

`run` goes through them at once. A reducer calls them one by one, with other work in between: each launch must come in
the same order on all workers, as every collective. Gradients come multiplied by this worker's share of the total
weight, so that the sum is the mean.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.backend import all_gather
from lockstep.wire.protocol import BucketShape, Parcel, Passage, Route, Wire


class Exchange:
    """One bucket's exchanges over a wire, step after step. Every worker of the group makes one and calls it alike."""

    def __init__(self, wire: Wire, bucket: BucketShape, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._rank = 0 if group is None else group.rank()
        self._size = 1 if group is None else group.size()
        self.wire, self.bucket = wire, bucket
        self.passage: Passage = wire.open(bucket, self._rank, self._size)
        self.num_bytes = 0
        """What this worker has sent in the present exchange, or the last one; an all-reduce counts as a ring."""
        self._parcel: Parcel | None = None
        self._arrived: Tensor | None = None

    @property
    def bytes_promised(self) -> int:
        """What the wire says that each worker sends."""
        return self.wire.bytes_promised(self.bucket, self._size)

    def run(self, flat: Tensor) -> Tensor:
        """Set `flat` to its sum over all workers, and return it; what it has beyond the bucket stays as it is."""
        self.encode(flat)
        _wait(self.launch())
        self.combine()
        _wait(self.launch_back())
        self.decode(flat)
        return flat

    def encode(self, flat: Tensor) -> None:
        """Encode this worker's bucket."""
        self.num_bytes = 0
        self._parcel = self.passage.encode(flat)

    def launch(self) -> Any:
        """Send the parcel out; returns what to wait for before `combine`, None if nothing."""
        return self._send()

    def combine(self) -> None:
        """Make the parcel back of what arrived."""
        assert self._arrived is not None, "combine comes after launch"
        self._parcel = self.passage.combine(self._arrived)

    def launch_back(self) -> Any:
        """Send the parcel back; returns what to wait for before `decode`, None if nothing."""
        return self._send()

    def decode(self, flat: Tensor) -> None:
        """Write the sum over all workers to `flat`."""
        assert self._arrived is not None, "decode comes after launch"
        self.passage.decode(self._arrived, flat)
        self._parcel = self._arrived = None

    def _send(self) -> Any:
        """Start what the parcel needs; what arrives of it is in `_arrived` when that is over."""
        if self._parcel is None:
            return None
        tensor, route = self._parcel.tensor, self._parcel.route
        self.num_bytes += route.num_bytes(tensor.numel() * tensor.element_size(), self._size)
        self._arrived = _place_for(tensor, route, self._size)
        if self._group is None or self._size == 1 or not tensor.numel():
            return None
        if route is Route.SUM:
            return dist.all_reduce(tensor, group=self._group, async_op=True)
        if route is Route.SWAP:
            return dist.all_to_all_single(self._arrived, tensor, group=self._group, async_op=True)
        return all_gather(self._arrived.view(-1), tensor.view(-1), self._group)


def _place_for(tensor: Tensor, route: Route, size: int) -> Tensor:
    """Where a parcel arrives: sums in place, as does everything in a world of one."""
    if route is Route.SUM or (route is Route.SWAP and size == 1):
        return tensor
    if size == 1:
        return tensor.view(1, -1)
    return torch.empty_like(tensor) if route is Route.SWAP else tensor.new_empty(size, tensor.numel())


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


def rehearse(wire: Wire, bucket: BucketShape, flat: Tensor, rank: int, size: int) -> Callable[[], None]:
    """What goes through an exchange with nobody when it is called: all that is computed, and no message."""
    passage = wire.open(bucket, rank, size)

    def go_through() -> None:
        out = passage.encode(flat)
        back = passage.combine(out.tensor)
        arrived = back if back is not None else out
        is_gathered = arrived.route is Route.GATHER
        tensor = arrived.tensor.reshape(1, -1).repeat(size, 1) if is_gathered else arrived.tensor
        passage.decode(tensor, flat)

    return go_through
