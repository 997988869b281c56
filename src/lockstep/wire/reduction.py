"""How encoded buckets are reduced: one exchange a bucket, which keeps what its wire remembers (errors, warm starts).

When buckets are laid out anew, that moves over, by the names of parameters. What is not gradients travels plainly.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.group import moves_parts
from lockstep.comm.tree import carrier_of
from lockstep.weight import Factor
from lockstep.wire.error_feedback import ErrorFeedback, all_errors, save_errors
from lockstep.wire.exchange import Exchange, SumWire
from lockstep.wire.protocol import BucketShape, Wire
from lockstep.world import World

ERROR = "error."
"""In the names of errors, the owners' own included."""
OWNER = "owner_"
"""Begins the names of what is known of the owners' own."""


class WireReduction:
    """Sums of all workers' buckets, each encoded by its wire while it travels."""

    def __init__(self, wire: Wire, world: World, group: dist.ProcessGroup, device: torch.device) -> None:
        # Of its own on the CPU, since the thread that uses it is not the one that gathers parameters.
        self._group = world.own_groups.take(group, device, world.timeout, world.gather_json)
        world.own_groups.free_after(self, self._group)
        self._carrier = carrier_of(device, "wire")
        self._wire = wire
        self._exchanges: dict[int, Exchange] = {}
        """By the bucket's place in the launch order."""
        self._unsent: dict[int, ErrorFeedback] = {}
        """Errors of earlier wires, by place, of buckets whose present wire remembers none: to be sent next."""
        self._unit: Factor = 1.0
        """What the present unit of gradients is worth in the first one: with weights of the user's own, workers send
        gradients in units of the total weight that they expect, and errors wait in the same."""

    def adopt(self, shapes: Mapping[int, BucketShape]) -> None:
        """These are the buckets with gradients from now on, by their place in the launch order, and in that order."""
        remembered = self._remembered()
        self._exchanges = {place: Exchange(self._wire, shape, self._group) for place, shape in shapes.items()}
        self._carry_over(remembered)

    def all_reduce(self, place: int, flat: Tensor) -> Any:
        """Start adding the bucket `flat` over the wire; returns what to wait for. What has no shape is not encoded."""
        exchange = self._exchanges.get(place)
        self._add_unsent(place, flat)
        if isinstance(self._wire, SumWire):  # One message, which is launched and waited for like any other bucket.
            if exchange is None:
                return dist.all_reduce(flat, group=self._group, async_op=True)
            return _Decoding(exchange.launch(flat), partial(exchange.finish_sum, flat))
        if exchange is None:
            return self._carrier.carry_out(lambda: dist.all_reduce(flat, group=self._group))
        return self._carrier.carry_out(lambda: exchange.run(flat))

    def reduce_scatter(self, place: int, flat: Tensor, part: slice, out: Tensor) -> Any:
        """Start setting `out` to `part` of the sum, where `part` is this worker's of as many equal ones."""
        exchange = self._exchanges[place]
        self._add_unsent(place, flat)
        if isinstance(self._wire, SumWire):
            if moves_parts(self._group):
                return _Decoding(exchange.launch_scattered(flat), partial(exchange.finish, out))
            return _Decoding(exchange.launch(flat), lambda: out.copy_(exchange.finish_sum(flat)[part]))
        return self._carrier.carry_out(lambda: exchange.run_scattered(flat, part, out))

    def _add_unsent(self, place: int, flat: Tensor) -> None:
        if self._unsent and (unsent := self._unsent.pop(place, None)) is not None:
            flat[: unsent.values.numel()].add_(unsent.values)

    @property
    def part_grain(self) -> int:
        """Where a bucket falls into equal parts, each is a multiple of so many values."""
        return lcm(*(getattr(each, "grain", 1) for each in self._wires()))

    def _wires(self) -> Sequence[Wire]:
        """All that may encode a bucket."""
        return [self._wire, getattr(self._wire, "wire", self._wire)]

    @property
    def group(self) -> dist.ProcessGroup:
        """What carries the buckets: those in memory of this group travel without a copy."""
        return self._group

    @property
    def num_bytes(self) -> int:
        """What this worker has sent of gradients in the last step."""
        return sum(exchange.num_bytes for exchange in self._exchanges.values())

    def report(self) -> str:
        """How gradients travel, in words."""
        return f"gradients travel by {self._wire}: {self.num_bytes} bytes sent by this worker in the last step."

    def rescale(self, divisor: Factor) -> None:
        """Gradients will come divided by `divisor` from now on, as against before: what waits is in the old unit."""
        self._unit = self._unit * divisor
        for remembering in [*(exchange.passage for exchange in self._exchanges.values()), *self._unsent.values()]:
            remembering.rescale(1.0 / divisor)  # type: ignore[attr-defined]  # A number, or one on the device.

    def state_dict(self) -> dict[str, Tensor]:
        """What this worker's wires remember, by the names of parameters; errors in the first unit of gradients."""
        return {name: value * self._unit if ERROR in name else value for name, value in self._remembered().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave on this worker, in a world of the same size."""
        self._carry_over({name: value / self._unit if ERROR in name else value for name, value in state.items()})

    def _remembered(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for place, exchange in self._exchanges.items():
            found |= exchange.passage.state_dict()
            if place in self._unsent:
                found |= save_errors(self._unsent[place], None)
        return found

    def _carry_over(self, remembered: Mapping[str, Tensor]) -> None:
        """Let the exchanges go on from what others, perhaps of other wires, remembered; no error is lost."""
        self._unsent.clear()
        for place, exchange in self._exchanges.items() if remembered else ():
            fresh = exchange.passage.state_dict()
            waiting = all_errors(remembered, exchange.bucket)
            if not any(name.startswith(ERROR) for name in fresh):
                if waiting is not None:
                    self._unsent[place] = waiting
                continue
            fitting = {n: v for n, v in remembered.items() if n in fresh and v.shape == fresh[n].shape}
            errors = {n: v for n, v in remembered.items() if ERROR in n or n.startswith(OWNER)}
            anew = {n: v for n, v in fresh.items() if not n.startswith(OWNER)}
            exchange.passage.load_state_dict(anew | fitting | errors)

    def release(self) -> None:
        """Let go of the group."""
        self._carrier.close()
        self._exchanges.clear()
        del self._group


class _Decoding:
    """A sum on its way, which is decoded when it is waited for."""

    def __init__(self, work: Any, decode: Callable[[], object]) -> None:
        self._work, self._decode = work, decode
        self._is_decoded = False

    def wait(self, *timeout: timedelta) -> bool:
        """Return when the sum is in the bucket; on a GPU the current stream waits, and decodes."""
        if self._work is not None:
            self._work.wait(*timeout)
        if not self._is_decoded:
            self._is_decoded = True
            self._decode()
        return True

    def is_completed(self) -> bool:
        """Whether the message has ended, well or badly."""
        return self._work is None or bool(self._work.is_completed())
