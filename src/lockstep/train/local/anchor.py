"""What all workers have in common: the weights of the last exchange, and how the next ones come of them.

Each worker trains away from the common weights. In an exchange they go on by the mean of the workers' changes, and
every worker's own follow:

    send      the change since the common weights, and go on training
    receive   the mean of the changes: the common weights advance, the own ones come along

If nothing happens between the two, the own weights are the common ones then. Else what the worker has learned in
between stays: own weights += common weights - own weights when they were sent.

Changes travel in flat buckets, each one message, in memory that the backend can send as it is. Between two exchanges
nothing of that is there: on a GPU the buckets take the memory that gradients had before. What a wire remembers stays.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.comm.memory import Memory, Request, memory_of
from lockstep.replica import layout
from lockstep.replica.bucket import Bucket
from lockstep.replica.granularity import ALL_OF_REST, Granularity
from lockstep.replica.reduction import shape_of
from lockstep.wire import Full, Wire
from lockstep.wire.reduction import WireReduction
from lockstep.world import World

Advance = Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None]
"""Moves common weights by the mean change, in place, alike on all workers; may overwrite the mean."""


def follow(common: Sequence[nn.Parameter], mean: Sequence[Tensor]) -> None:
    """Advance by the mean change itself, so that the common weights become the mean of the workers'."""
    torch_private.foreach_("add", list(common), list(mean))


def copy_of(tensors: Sequence[Tensor]) -> list[nn.Parameter]:
    """Common values to begin with: those that all workers have now."""
    return [nn.Parameter(tensor.detach().clone()) for tensor in tensors]


class Anchor:
    """Some tensors of a replica and their common values; every worker makes one, and calls it alike.

    Memory: the common values, and with `keeps` those that were sent.
    """

    def __init__(
        self,
        world: World,
        names: Sequence[str],
        tensors: Callable[[], list[Tensor]],
        wire: Wire | None,
        cap_bytes: int,
        common: list[nn.Parameter],
        advance: Advance = follow,
    ) -> None:
        self._world, self.names = world, names
        self._tensors = tensors
        """This worker's own, as they are now: a module may have put others into their places."""
        self.common = common
        """The values of the last exchange; the same on all workers."""
        self._advance = advance
        self._sent: list[Tensor] | None = None
        grain = Granularity(cap_bytes, ALL_OF_REST, first_cap_bytes=cap_bytes)
        self._plans = layout.plan_for(common, grain)
        self._memory: Memory = Memory()
        self._wire: WireReduction | None = None
        if world.size > 1 and self.common:
            assert world.group is not None
            device = self.common[0].device
            self._wire = WireReduction(wire or Full(), world, world.group, device)
            self._memory = memory_of(self._wire.group, device)
            self._adopt(self._wire)
        self._buckets: list[Bucket] = []
        """The changes, while they are under way."""
        self._works: list[Any] = []

    @torch.no_grad()
    def send(self, *, keeps: bool) -> None:
        """Start the exchange of changes; `keeps` if the tensors will change before it is received."""
        own = self._tensors()
        self._buckets = self._lay_out()
        changes = self._changes()
        torch_private.foreach_("copy", changes, own)
        torch_private.foreach_("sub", changes, list(self.common))
        torch_private.foreach_("mul", changes, 1.0 / self._world.size)
        self._sent = [tensor.detach().clone() for tensor in own] if keeps else None
        if self._wire is not None:
            self._works = [self._wire.all_reduce(bucket.place, bucket.flat) for bucket in self._buckets]

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for the mean change, which has the same bits on every worker, and apply it."""
        self._wait()
        self._advance(self.common, self._changes())
        self._buckets = []
        if self._sent is None:
            self.go_back()
            return
        torch_private.foreach_("neg", self._sent)
        torch_private.foreach_("add", self._sent, list(self.common))
        torch_private.foreach_("add", self._tensors(), self._sent)
        self._sent = None

    def give_up(self) -> None:
        """Wait for what was sent, and forget it."""
        self._wait()
        self._buckets, self._sent = [], None

    @torch.no_grad()
    def go_back(self) -> None:
        """Set the own tensors to the common ones."""
        torch_private.foreach_("copy", self._tensors(), list(self.common))

    @torch.no_grad()
    def settle(self) -> None:
        """The own tensors have been set to something that all workers have: that is the common one now."""
        torch_private.foreach_("copy", list(self.common), self._tensors())

    def _adopt(self, wire: WireReduction) -> None:
        wire.adopt({bucket.place: shape_of(bucket, self.names) for bucket in self._lay_out()})

    def _lay_out(self) -> list[Bucket]:
        requests = [Request(plan.numel, plan.dtype, plan.device) for plan in self._plans]
        flats = self._memory.lay_out(requests) if requests else []
        pairs = zip(self._plans, flats, strict=True)
        return [Bucket(place, plan, self.common, flat) for place, (plan, flat) in enumerate(pairs)]

    def _changes(self) -> list[Tensor]:
        """Views of the buckets, like the tensors, in order."""
        found: dict[int, Tensor] = {}
        for bucket in self._buckets:
            found |= zip(bucket.indices, bucket.views, strict=True)
        return [found[index] for index in range(len(found))]

    def _wait(self) -> None:
        for work in self._works:
            self._world.await_on_device(work, "exchanging the changes of a round")
        self._works = []

    @property
    def num_bytes(self) -> int:
        """What this worker has sent in the last exchange; an all-reduce counts as a ring."""
        return self._wire.num_bytes if self._wire is not None else 0

    def wire_state(self) -> dict[str, Tensor]:
        """What this worker's wire remembers, by the names of tensors."""
        return self._wire.state_dict() if self._wire is not None else {}

    def load_wire_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `wire_state` gave; from nothing, if that is empty."""
        if self._wire is None:
            return
        if state:
            self._wire.load_state_dict(state)
        else:
            self._wire.adopt({})
            self._adopt(self._wire)

    def release(self) -> None:
        """Let go of the group."""
        if self._wire is not None:
            self._wire.release()
        self._wire = None
        self._buckets, self._works = [], []
