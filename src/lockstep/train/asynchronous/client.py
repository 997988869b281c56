"""A worker's copy of the parameters, and its round trips to their owners.

    FlatCopy          parameters and gradients as flat memory that is cut by owner
    ParameterClient   reads the newest parameters, pushes gradients, waits until these are applied

Why no round trip waits for ever is said in `lockstep.train.asynchronous`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.replica import layout
from lockstep.replica.granularity import UNCUT
from lockstep.replica.layout import BucketPlan, equal_spans, view_of
from lockstep.replica.params import BucketPart
from lockstep.train.asynchronous.connection import Connection, Transfer, Until, bytes_of
from lockstep.train.asynchronous.owner import Owner, PushedGradient
from lockstep.train.asynchronous.server import STALENESS, Request
from lockstep.world import World


class FlatCopy:
    """The flat memory of one worker: one bucket for each dtype, cut into equal spans, one for each worker.

    The module's parameters are views of it, so on the CPU what is read from the owners is received straight into them.
    On a GPU all goes by way of pinned host memory.
    """

    def __init__(self, params: Sequence[nn.Parameter], size: int) -> None:
        self._params = params
        plans = layout.plan_for(params, UNCUT, size)
        self._flats = [_Flat(plan, [params[slot.index] for slot in plan.slots], size) for plan in plans]
        self.used = bytearray(len(params))
        """By parameter, whether the gradients have one for it."""

    def part(self, rank: int) -> list[BucketPart]:
        """What worker `rank` owns, bucket by bucket, in memory of its own: updates must not be seen in mid-pass."""
        return [BucketPart(flat.plan, flat.spans, rank, flat.cut(flat.params, rank).clone()) for flat in self._flats]

    def params_of(self, rank: int) -> list[Tensor]:
        """In host memory, for each bucket this worker's copy of what worker `rank` owns."""
        return [flat.cut(flat.host_params, rank) for flat in self._flats]

    def grads_of(self, rank: int) -> list[Tensor]:
        """In host memory, for each bucket the gradients of what worker `rank` owns."""
        return [flat.cut(flat.host_grads, rank) for flat in self._flats]

    def make_buffers(self) -> list[Tensor]:
        """Host memory for one worker's part."""
        is_pinned = any(flat.params is not flat.host_params for flat in self._flats)
        return [torch.empty_like(each, pin_memory=is_pinned) for each in self.params_of(0)]

    def publish(self) -> None:
        """The copy in host memory is new: let the model have it. Afterwards it may be overwritten."""
        for flat in self._flats:
            if flat.params is not flat.host_params:
                flat.params.copy_(flat.host_params)

    def collect(self) -> None:
        """Take the gradients from the parameters, and have them in host memory."""
        for index, param in enumerate(self._params):
            self.used[index] = param.grad is not None
        for flat in self._flats:
            flat.collect()
        for param in self._params:
            param.grad = None
        if any(flat.grads is not flat.host_grads for flat in self._flats):
            torch.cuda.current_stream(self._flats[0].grads.device).synchronize()


class _Flat:
    """One bucket."""

    def __init__(self, plan: BucketPlan, params: Sequence[nn.Parameter], size: int) -> None:
        self.plan, self._members = plan, params
        self.spans = equal_spans(plan, size)
        self.params = torch.zeros(plan.tail_offset, dtype=plan.dtype, device=plan.device)
        self.grads = torch.zeros_like(self.params)
        with torch.no_grad():
            for slot, param in zip(plan.slots, params, strict=True):
                view_of(self.params, slot, param).copy_(param)
                param.data = view_of(self.params, slot, param)
        self._views = [view_of(self.grads, slot, param) for slot, param in zip(plan.slots, params, strict=True)]
        self.host_params, self.host_grads = _on_host(self.params), _on_host(self.grads)

    def cut(self, flat: Tensor, rank: int) -> Tensor:
        """What worker `rank` owns of `flat`."""
        return flat[self.spans[rank].begin : self.spans[rank].end]

    @torch.no_grad()
    def collect(self) -> None:
        """Copy the gradients that there are."""
        found = [(view, param.grad) for view, param in zip(self._views, self._members, strict=True)]
        pairs = [(view, grad) for view, grad in found if grad is not None]
        if pairs:
            torch_private.foreach_("copy", [view for view, _ in pairs], [grad for _, grad in pairs])
        if self.host_grads is not self.grads:
            self.host_grads.copy_(self.grads, non_blocking=True)


def _on_host(flat: Tensor) -> Tensor:
    """`flat` itself, or pinned memory with the same content."""
    if flat.device.type == "cpu":
        return flat
    return torch.empty_like(flat, device="cpu", pin_memory=True).copy_(flat)


class ParameterClient:
    """The round trips of one worker; its own part it has at hand, those of others behind connections.

    begin      wait until the gradient of the step before is applied everywhere, then read the newest parameters
    push       send the gradient, cut by owner
    withdraw   the step has failed: say that no gradient will come
    settle     wait until what was pushed is applied everywhere
    fetch      the parameters as they are, for no step
    """

    def __init__(
        self,
        world: World,
        copy: FlatCopy,
        owner: Owner,
        connections: Mapping[int, Connection],
        check: Callable[[], None],
        *,
        takes_turns: bool,
    ) -> None:
        """`takes_turns`: whether the bound on staleness may make a reading wait."""
        self._world, self._copy, self._owner = world, copy, owner
        self._connections, self._check, self._takes_turns = connections, check, takes_turns
        self._under_way: list[int] | None = None
        """What was pushed is not known to be applied yet; its staleness at each owner goes there."""
        self._params = {rank: [bytes_of(flat) for flat in copy.params_of(rank)] for rank in connections}
        self._grads = {rank: [bytes_of(flat) for flat in copy.grads_of(rank)] for rank in connections}

    def begin(self) -> None:
        """Read the newest parameters of all owners, for a step."""
        self.settle()
        ranks = sorted([self._world.rank, *self._connections])
        # All at once; but where a reading may have to wait, one after the other, or workers could wait in a circle.
        for some in [[rank] for rank in ranks] if self._takes_turns else [ranks]:
            self._read(Request.READ, some)
        self._copy.publish()

    def push(self) -> Callable[[], int]:
        """Send the gradients that have been collected; what is returned waits until they are applied, and says how
        stale they were then, at most."""
        me, used = self._world.rank, self._copy.used
        transfer = Transfer(self._check)
        for rank, connection in self._connections.items():
            transfer.send(connection, Request.PUSH + used, *self._grads[rank])
        self._wait(transfer, "sending gradients to their owners")
        self._owner.submit(me, PushedGradient(used, self._copy.grads_of(me)))
        self._under_way = found = list[int]()

        def staleness() -> int:
            if not found:
                self.settle()
            return max(found)

        return staleness

    def withdraw(self) -> None:
        """Let the owners not wait for the gradient of the step that was begun."""
        transfer = Transfer(self._check)
        for connection in self._connections.values():
            transfer.send(connection, Request.WITHDRAW)
        self._wait(transfer, "withdrawing a step that has failed")
        self._owner.withdraw(self._world.rank)
        self._under_way = []

    def settle(self) -> None:
        """Return when the gradients that were pushed are applied everywhere."""
        found = self._under_way
        if found is None:
            return
        transfer, answers = Transfer(self._check), []
        for connection in self._connections.values():
            answers.append(bytearray(STALENESS.size))
            transfer.receive(connection, answers[-1])
        self._wait(transfer, "waiting for its gradients to be applied")
        others = [STALENESS.unpack(answer)[0] for answer in answers]

        def is_applied(timeout_s: float) -> bool:
            own = self._owner.wait_applied(self._world.rank, timeout_s)
            if own is not None:
                found.extend([own, *others])
            return own is not None

        self._world.wait(Until(is_applied, self._check), "waiting for older gradients than its own")
        self._under_way = None

    def fetch(self) -> None:
        """Read the parameters as they are; all updates must have been applied, and none come meanwhile."""
        self._read(Request.LOOK, [self._world.rank, *self._connections])
        self._copy.publish()

    def _read(self, request: Request, ranks: Sequence[int]) -> None:
        """What these workers own."""
        doing, me = "reading parameters from their owners", self._world.rank
        others = [rank for rank in ranks if rank != me]
        transfer = Transfer(self._check)
        for rank in others:
            transfer.send(self._connections[rank], request)
        for rank in others:
            transfer.receive(self._connections[rank], *self._params[rank])
        self._wait(transfer, doing)
        if me not in ranks:
            return
        own = self._copy.params_of(me)
        if request is Request.READ:
            self._world.wait(Until(lambda timeout_s: self._owner.read(me, own, timeout_s), self._check), doing)
        else:
            self._owner.look(own)

    def _wait(self, transfer: Transfer, doing: str) -> None:
        self._world.wait(Until(transfer.move, self._check), doing)
