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
from lockstep.replica.split import Span, equal_spans
from lockstep.wire import BucketShape, Exchange, Piece, SumWire, Wire

ERROR = "error."
"""In the names of errors, the owners' own included."""


class Coded:
    """Encoded sums of all workers."""

    num_lanes = 1
    sends_tail_apart = True

    def __init__(self, wire: Wire, group: dist.ProcessGroup, device: torch.device, names: Sequence[str]) -> None:
        self._wire, self._names = wire, names
        # Of its own on the CPU, since the thread that uses it is not the one that gathers parameters.
        self._group = group if device.type == "cuda" else new_group(group, dist.get_backend(group))
        self._carrier = carrier_of(device, "wire")
        self._is_one_message = isinstance(wire, SumWire)
        """Whether a bucket can be launched and waited for like any other: what is encoded is added as it is."""
        self.num_parts = group.size()
        self._exchanges: dict[int, Exchange] = {}
        """By the bucket's place in the launch order."""
        self._unit: Factor = 1.0
        """What the present unit of gradients is worth in the first one: with weights of the user's own, workers send
        gradients in units of the total weight that they expect, and errors wait in the same."""

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """These are the buckets from now on."""
        remembered = self.state_dict()
        self._exchanges = {
            bucket.place: Exchange(self._wire, self._shape(bucket), self._group)
            for bucket in buckets
            if bucket.plan.slots
        }
        if remembered:
            self.load_state_dict(remembered)

    def _shape(self, bucket: Bucket) -> BucketShape:
        pieces = []
        for slot, param in zip(bucket.plan.slots, bucket.params, strict=True):
            # Sizes in the order of memory, so that matrices are seen as such; complex numbers have two reals each.
            order = sorted(range(param.dim()), key=param.stride, reverse=True)
            shape = tuple(param.shape[dim] for dim in order) + ((2,) if param.is_complex() else ())
            pieces.append(Piece(self._names[slot.index], slot.offset, shape))
        plan = bucket.plan
        return BucketShape(plan.tail_offset, tuple(pieces), plan.dtype, plan.device)

    def cut(self, plan: BucketPlan, size: int) -> list[Span]:
        """Equal ones."""
        return equal_spans(plan, size)

    def scatters(self, spans: Sequence[Span]) -> bool:
        """Never: what comes back is decoded whole."""
        return False

    def all_reduce(self, bucket: Bucket) -> Any:
        """Start adding over the wire; returns what to wait for."""
        exchange = self._exchanges.get(bucket.place)
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

    def rescale(self, divisor: Factor) -> None:
        """See BucketReduction."""
        self._unit = self._unit * divisor
        for exchange in self._exchanges.values():
            exchange.passage.rescale(1.0 / divisor)  # type: ignore[arg-type]  # A number, or one on the device.

    def state_dict(self) -> dict[str, Tensor]:
        """What this worker's wires remember, by the names of parameters; errors in the first unit of gradients."""
        found: dict[str, Tensor] = {}
        for exchange in self._exchanges.values():
            found |= exchange.passage.state_dict()
        return {name: value * self._unit if ERROR in name else value for name, value in found.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave on this worker, in a world of the same size."""
        here = {name: value / self._unit if ERROR in name else value for name, value in state.items()}
        for exchange in self._exchanges.values():
            exchange.passage.load_state_dict(here)

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


def require_wire(wire: object, zero: int) -> None:
    """Raise UsageError unless `wire` can carry the gradients of such a replica."""
    if wire is None:
        return
    if not all(callable(getattr(wire, name, None)) for name in ("open", "bytes_promised")):
        raise UsageError(
            f"wire={wire!r}: use one of lockstep.wire, as lockstep.wire.Half('bf16'), or an object of that protocol "
            "(see lockstep.wire.protocol)."
        )
    if zero > 1:
        raise UsageError(
            f"wire with zero={zero}: what a lossy wire remembers is as large as the gradients, which zero={zero} does "
            "not keep. Use zero=0 or 1."
        )
