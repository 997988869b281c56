"""Buckets that are encoded while they travel: a reduction by one of the wires.

Every bucket has an exchange of its own, which keeps what its wire remembers (errors, warm starts). When buckets are
laid out anew, that moves over, by the names of parameters. What is not gradients (the notes) travels plainly.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.backend import new_group
from lockstep.comm.carrier import carrier_of
from lockstep.errors import UsageError
from lockstep.replica.bucket import Bucket, Factor
from lockstep.replica.layout import BucketPlan
from lockstep.replica.split import Span, unit_spans
from lockstep.wire import Auto, BucketShape, Exchange, Piece, SumWire, Wire
from lockstep.wire.error_feedback import ErrorFeedback, all_errors, save_errors

AUTO = "auto"
ERROR = "error."
"""In the names of errors, the owners' own included."""
OWNER = "owner_"
"""Begins the names of what is known of the owners' own."""


class Coded:
    """Encoded sums of all workers."""

    num_lanes = 1
    sends_tail_apart = True

    def __init__(self, wire: Wire, group: dist.ProcessGroup, device: torch.device, names: Sequence[str]) -> None:
        self._names = names
        # Of its own on the CPU, since the thread that uses it is not the one that gathers parameters.
        self._group = group if device.type == "cuda" else new_group(group, dist.get_backend(group))
        self._carrier = carrier_of(device, "wire")
        self._wires: Sequence[Wire] = (wire,)
        """For each bucket with gradients; the last one also for those beyond."""
        self.num_parts = group.size()
        self._exchanges: dict[int, Exchange] = {}
        """By the bucket's place in the launch order."""
        self._is_one_message = False
        """Whether a bucket can be launched and waited for like any other: what is encoded is added as it is. Not where
        only some can: on the CPU messages of two threads would come in any order."""
        self._unsent: dict[int, ErrorFeedback] = {}
        """Errors of earlier wires, by place, of buckets whose present wire remembers none: to be sent next."""
        self._unit: Factor = 1.0
        """What the present unit of gradients is worth in the first one: with weights of the user's own, workers send
        gradients in units of the total weight that they expect, and errors wait in the same."""

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """These are the buckets from now on."""
        remembered = self._remembered()
        self._exchanges = {
            bucket.place: Exchange(self._wires[min(number, len(self._wires) - 1)], self.shape(bucket), self._group)
            for number, bucket in enumerate(bucket for bucket in buckets if bucket.plan.slots)
        }
        self._is_one_message = all(isinstance(each.wire, SumWire) for each in self._exchanges.values())
        self._carry_over(remembered)

    def shape(self, bucket: Bucket) -> BucketShape:
        """What a wire needs to know of a bucket."""
        pieces = []
        for slot, param in zip(bucket.plan.slots, bucket.params, strict=True):
            # Sizes in the order of memory, so that matrices are seen as such; complex numbers have two reals each.
            order = sorted(range(param.dim()), key=param.stride, reverse=True)
            shape = tuple(param.shape[dim] for dim in order) + ((2,) if param.is_complex() else ())
            pieces.append(Piece(self._names[slot.index], slot.offset, shape))
        plan = bucket.plan
        return BucketShape(plan.tail_offset, tuple(pieces), plan.dtype, plan.device)

    def cut(self, plan: BucketPlan, size: int) -> list[Span]:
        """Of whole units, as `Trainer` counts norms by."""
        return unit_spans(plan, size)

    def scatters(self, spans: Sequence[Span]) -> bool:
        """Never: what comes back is decoded whole."""
        return False

    def all_reduce(self, bucket: Bucket) -> Any:
        """Start adding over the wire; returns what to wait for."""
        exchange = self._exchanges.get(bucket.place)
        if self._unsent and (unsent := self._unsent.pop(bucket.place, None)) is not None:
            bucket.flat_grads[: unsent.values.numel()].add_(unsent.values)
        if self._is_one_message:
            if exchange is None:
                return dist.all_reduce(bucket.flat, group=self._group, async_op=True)
            return _launched(exchange, bucket.flat_grads)
        if exchange is None:
            return self._carrier.carry_out(lambda: dist.all_reduce(bucket.flat, group=self._group))
        return self._carrier.carry_out(lambda: exchange.run(bucket.flat_grads))

    def reduce_scatter(self, bucket: Bucket, spans: Sequence[Span], out: Tensor) -> Any:
        """Not to be had."""
        raise AssertionError("a coded reduction does not scatter")

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
        return f"gradients travel by {self._wires[0]}: {self.num_bytes} bytes sent by this worker in the last step."

    def rescale(self, divisor: Factor) -> None:
        """See BucketReduction."""
        self._unit = self._unit * divisor
        for remembering in [*(exchange.passage for exchange in self._exchanges.values()), *self._unsent.values()]:
            remembering.rescale(1.0 / divisor)  # type: ignore[attr-defined]  # A number, or one on the device.

    def begin(self) -> None:
        """Nothing: all passes are alike."""

    def end(self) -> None:
        """Nothing: all passes are alike."""

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


def _launched(exchange: Exchange, flat: Tensor) -> "_Decoding":
    exchange.encode(flat)
    return _Decoding(exchange, exchange.launch(), flat)


class _Decoding:
    """A sum on its way, which is decoded when it is waited for."""

    def __init__(self, exchange: Exchange, work: Any, flat: Tensor) -> None:
        self._exchange, self._work, self._flat = exchange, work, flat
        self._is_decoded = False

    def wait(self, *timeout: timedelta) -> bool:
        """Return when the sum is in the bucket; on a GPU the current stream waits, and decodes."""
        if self._work is not None:
            self._work.wait(*timeout)
        if not self._is_decoded:
            self._is_decoded = True
            self._exchange.combine()
            self._exchange.decode(self._flat)
        return True

    def is_completed(self) -> bool:
        """Whether the message has ended, well or badly."""
        return self._work is None or bool(self._work.is_completed())


def require_wire(wire: object) -> None:
    """Raise UsageError unless `wire` can carry gradients."""
    if wire is None or wire == AUTO or isinstance(wire, Auto):
        return
    if not all(callable(getattr(wire, name, None)) for name in ("open", "bytes_promised")):
        raise UsageError(
            f"wire={wire!r}: use one of lockstep.wire, as lockstep.wire.Half('bf16'), \"auto\", or an object of that "
            "protocol (see lockstep.wire.protocol)."
        )
