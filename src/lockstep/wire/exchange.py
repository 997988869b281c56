"""How an encoded bucket is reduced: its parcels carried between workers, and the two ways to combine them.

`Exchange` goes through the phases of one bucket's exchange; in between a reducer does other work. Launches must come in
the same order on all workers, as all collectives. Gradients come multiplied by this worker's share of the total weight,
so that the sum is the mean.

    launch    encode this worker's bucket, and send the parcel out
    relay     combine what arrived, and send the parcel back, where there is one
    finish    decode what arrived into the bucket: the sum over all workers

`SumWire`: what is encoded can be added. One all-reduce of it, and nothing is kept from step to step.

`ChunkWire`: it cannot. With N workers, the bucket is cut into N equal chunks, the last padded with zeros; worker r owns
chunk r.

    encode    each worker encodes its N chunks and sends chunk r to worker r (all-to-all)
    combine   each owner decodes the N that arrived, adds them in fp32 in the order of the ranks, encodes the sum
    decode    every worker decodes the N encoded sums (all-gather): from the same bytes, so to the same bits

Where gradients are split (zero=1 to 3) an owner keeps the sum of its chunk, and there is no way back: half the bytes.

Otherwise every value is encoded twice on its way. Both times the loss is kept as error: by the worker that encoded its
gradient, and by the owner that encoded the sum.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.group import all_gather, reduce_scatter
from lockstep.wire.error_feedback import ErrorFeedback, clear, load_errors, padding_of, save_errors
from lockstep.wire.protocol import BucketShape, Parcel, Passage, Route, Wire, as_bucket


class Exchange:
    """One bucket's exchanges over a wire, step after step. Every worker of the group makes one and calls it alike."""

    def __init__(self, wire: Wire, bucket: BucketShape, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._size = 1 if group is None else group.size()
        self.wire, self.bucket = wire, bucket
        self.passage: Passage = wire.open(bucket, 0 if group is None else group.rank(), self._size)
        self.num_bytes = 0
        """What this worker has sent in the present exchange, or the last one; an all-reduce counts as a ring."""
        self._sent: Tensor | None = None
        """What is on its way: not every backend holds on to it."""
        self._arrived: Tensor | None = None

    @property
    def bytes_promised(self) -> int:
        """What the wire says that each worker sends."""
        return self.wire.bytes_promised(self.bucket, self._size)

    def run(self, flat: Tensor) -> Tensor:
        """Set `flat` to its sum over all workers, and return it; what it has beyond the bucket stays as it is."""
        _wait(self.launch(flat))
        _wait(self.relay())
        self.finish(flat)
        return flat

    def run_scattered(self, flat: Tensor, part: slice, out: Tensor) -> None:
        """Set `out` to `part` of the sum over all workers, where `part` is this worker's of as many equal ones."""
        _wait(self.launch(flat))
        assert self._arrived is not None
        own = self.passage.own_sum(self._arrived)
        if own is None:
            _wait(self.relay())
            self.finish(flat)
            own = flat[part]
        out.copy_(own)
        self._sent = self._arrived = None

    def launch(self, flat: Tensor) -> Any:
        """Encode and send out; returns what to wait for before `relay`, None if nothing."""
        self.num_bytes = 0
        return self._send(self.passage.encode(flat))

    def relay(self) -> Any:
        """Combine and send back; returns what to wait for before `finish`, None if nothing."""
        assert self._arrived is not None, "relay comes after launch"
        back = self.passage.combine(self._arrived)
        return None if back is None else self._send(back)

    def finish(self, flat: Tensor) -> None:
        """Write the sum over all workers to `flat`."""
        assert self._arrived is not None, "finish comes after relay"
        self.passage.decode(self._arrived, flat)
        self._sent = self._arrived = None

    def finish_sum(self, flat: Tensor) -> Tensor:
        """The same of a SumWire, which has nothing to send back; returns `flat`."""
        self.relay()
        self.finish(flat)
        return flat

    def launch_scattered(self, flat: Tensor) -> Any:
        """As `launch`, of a SumWire; `finish` then gets this worker's part of as many equal ones."""
        self.num_bytes = 0
        return self._send(replace(self.passage.encode(flat), route=Route.SCATTER))

    def _send(self, parcel: Parcel) -> Any:
        """Start what the parcel needs; what arrives of it is in `_arrived` when that is over."""
        tensor, route = parcel.tensor, parcel.route
        self.num_bytes += route.num_bytes(tensor.numel() * tensor.element_size(), self._size)
        self._sent, self._arrived = tensor, _place_for(tensor, route, self._size)
        if self._group is None or self._size == 1 or not tensor.numel():
            return None
        if route is Route.SUM:
            return dist.all_reduce(tensor, group=self._group, async_op=True)
        if route is Route.SCATTER:
            return reduce_scatter(self._arrived, tensor, self._group)
        if route is Route.SWAP:
            return dist.all_to_all_single(self._arrived, tensor, group=self._group, async_op=True)
        return all_gather(self._arrived.view(-1), tensor.view(-1), self._group)


def _place_for(tensor: Tensor, route: Route, size: int) -> Tensor:
    """Where a parcel arrives: sums in place, as does everything in a world of one."""
    if route is Route.SUM or (size == 1 and route is not Route.GATHER):
        return tensor
    if route is Route.SCATTER:
        return tensor.new_empty(tensor.numel() // size)
    if size == 1:
        return tensor.view(1, -1)
    return torch.empty_like(tensor) if route is Route.SWAP else tensor.new_empty(size, tensor.numel())


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()


class SumWire(ABC):
    """Base of wires whose encoded buckets are all-reduced."""

    __slots__ = ()
    bucket_mb: float = 100

    @abstractmethod
    def encoded_bytes(self, bucket: BucketShape) -> int:
        """Bytes of an encoded bucket."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """A contiguous tensor whose sum over the workers can be decoded; `values` itself will do."""

    def decode(self, summed: Tensor, out: Tensor) -> None:
        """Write the sum to `out`, which has the memory that was encoded."""
        if summed.data_ptr() != out.data_ptr():
            out.copy_(summed)

    def pack(self, values: Tensor) -> Tensor:
        """The same for parameters, which nothing is added to."""
        return self.encode(values)

    def unpack(self, packed: Tensor, out: Tensor, size: int) -> None:
        """Write what `size` workers have packed, one behind the other, to `out`."""
        self.decode(packed, out)

    def bytes_promised(self, bucket: BucketShape | int, size: int) -> int:
        """2(N-1)/N of the encoded bucket, as a ring sends."""
        return Route.SUM.num_bytes(self.encoded_bytes(as_bucket(bucket)), size)

    def open(self, bucket: BucketShape, rank: int, size: int) -> "SumPassage":
        """The state of one bucket: none."""
        return SumPassage(self, bucket)


class SumPassage(Passage):
    """One bucket in one all-reduce."""

    def __init__(self, wire: SumWire, bucket: BucketShape) -> None:
        self._wire = wire
        self._numel = bucket.numel

    def encode(self, flat: Tensor) -> Parcel:
        """Encode this worker's bucket."""
        return Parcel(self._wire.encode(flat[: self._numel]), Route.SUM)

    def decode(self, arrived: Tensor, flat: Tensor) -> None:
        """Decode the sum."""
        self._wire.decode(arrived, flat[: self._numel])


class ChunkWire(ABC):
    """Base of wires that exchange encoded chunks; `encode` and `decode` must depend on their arguments alone."""

    __slots__ = ()
    bucket_mb: float = 25

    @property
    def grain(self) -> int:
        """A chunk is a multiple of so many values."""
        return 8

    @property
    def feedback(self) -> float:
        """How much of the error is added to the next gradient."""
        return 1.0

    @abstractmethod
    def chunk_bytes(self, numel: int) -> int:
        """Bytes of an encoded chunk of `numel` values."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encode fp32 chunks (the rows) to rows of bytes."""

    @abstractmethod
    def decode(self, encoded: Tensor, numel: int) -> Tensor:
        """Decode rows of bytes to fp32 chunks of `numel` values."""

    def take(self, values: Tensor) -> Tensor:
        """Encode `values` and leave in them what was lost, or zero where that is not finite."""
        encoded = self.encode(values)
        values.sub_(self.decode(encoded, values.shape[1])).nan_to_num_(0.0, 0.0, 0.0)
        return encoded

    def put(self, encoded: Tensor, out: Tensor, *, adds: bool) -> None:
        """Decode to `out`, or on top of what it holds."""
        decoded = self.decode(encoded, out.shape[1])
        if adds:
            out.add_(decoded)
        else:
            out.copy_(decoded)

    def pack(self, values: Tensor) -> Tensor:
        """A part of the parameters, whole blocks of them, as flat bytes; the values stay as they are."""
        return self.encode(values.float().view(1, -1)).view(-1)

    def unpack(self, packed: Tensor, out: Tensor, size: int) -> None:
        """Write what `size` workers have packed, one behind the other, to `out`."""
        if out.numel():
            self.put(packed.view(size, -1), out.view(size, -1), adds=False)

    def chunk_numel(self, numel: int, size: int) -> int:
        """Values of one of `size` chunks of a bucket of `numel`."""
        return -(-numel // (size * self.grain)) * self.grain

    def bytes_promised(self, bucket: BucketShape | int, size: int) -> int:
        """N-1 encoded chunks out and N-1 back."""
        chunk = self.chunk_numel(as_bucket(bucket).numel, size)
        return 2 * (size - 1) * self.chunk_bytes(chunk) if chunk else 0

    def open(self, bucket: BucketShape, rank: int, size: int) -> "ChunkPassage":
        """The state of one bucket on worker `rank` of `size`. Takes 1 + 1/N times the bucket in fp32 as memory."""
        return ChunkPassage(self, bucket, rank, size)


class InPlaceChunkWire(ChunkWire):
    """Base of wires that are written by `take` and `put` instead of `encode` and `decode`, with fewer copies."""

    __slots__ = ()

    def encode(self, values: Tensor) -> Tensor:
        """The same as `take`, and leave the values as they are."""
        return self.take(values.clone())

    def decode(self, encoded: Tensor, numel: int) -> Tensor:
        """The same as `put`, into memory of its own."""
        out = torch.empty(len(encoded), numel, device=encoded.device)
        self.put(encoded, out, adds=False)
        return out


class ChunkPassage(Passage):
    """One bucket in chunks, with the error of this worker's gradients and of the sums that it owns."""

    def __init__(self, wire: ChunkWire, bucket: BucketShape, rank: int, size: int) -> None:
        self._wire = wire
        self._bucket = bucket
        self._rank, self._size = rank, size
        self._chunk = chunk = wire.chunk_numel(bucket.numel, size)
        self._error = ErrorFeedback(bucket, 0, size * chunk, wire.feedback)
        self._owner_error = ErrorFeedback(bucket, rank * chunk, chunk, wire.feedback)
        self._padding = padding_of(bucket, 0, bucket.numel)

    def encode(self, flat: Tensor) -> Parcel:
        """Encode this worker's chunks."""
        values = self._error.add(flat)
        encoded = self._take(values.view(self._size, self._chunk), 0)
        self._error.settle()
        return Parcel(encoded, Route.SWAP)

    def _take(self, values: Tensor, first: int) -> Tensor:
        return self.take(values, first) if self._chunk else values.view(torch.uint8)

    def take(self, values: Tensor, first: int) -> Tensor:
        """Encode chunks, counted from `first` and not empty, and leave what was lost.

        For wires that need to know which chunks these are.
        """
        return self._wire.take(values)

    def combine(self, arrived: Tensor) -> Parcel:
        """Add everybody's version of the owned chunk, and encode the sum."""
        self._owner_error.fade()
        total = self._add_to_owner_error(arrived)
        encoded = self._take(total, self._rank)
        self._owner_error.settle()
        return Parcel(encoded, Route.GATHER)

    def _add_to_owner_error(self, arrived: Tensor) -> Tensor:
        total = self._owner_error.values.view(1, self._chunk)
        for row in arrived.split(1) if self._chunk else ():
            self._wire.put(row, total, adds=True)
        self._owner_error.settle()  # Others may have decoded something to the padding.
        return total

    def own_sum(self, arrived: Tensor) -> Tensor | None:
        """Add everybody's version of the owned chunk, where chunks are the equal parts of the bucket."""
        if self._chunk * self._size != self._bucket.numel:
            return None
        self._add_to_owner_error(arrived)  # Nothing is in it but what was left by exchanges that did go back.
        own = self._owner_error.values.clone()
        self._owner_error.values.zero_()
        return own

    def decode(self, arrived: Tensor, flat: Tensor) -> None:
        """Decode all sums: whole chunks in place, the last by way of a copy where it reaches beyond the bucket."""
        numel, chunk = self._bucket.numel, self._chunk
        in_place = numel // chunk if chunk and flat.dtype == torch.float32 else 0
        if in_place:
            self._wire.put(arrived[:in_place], flat[: in_place * chunk].view(in_place, chunk), adds=False)
        used = -(-numel // chunk) if chunk else 0
        if used > in_place:
            rest = self._wire.decode(arrived[in_place:used], chunk)
            flat[in_place * chunk : numel].copy_(rest.view(-1)[: numel - in_place * chunk])
        clear(flat, self._padding)

    def state_dict(self) -> dict[str, Tensor]:
        """Both errors, by the names of pieces."""
        return save_errors(self._error, self._owner_error)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from saved errors."""
        load_errors(state, self._bucket, self._error, self._owner_error)

    def rescale(self, factor: float) -> None:
        """Multiply both errors."""
        self._error.rescale(factor)
        self._owner_error.rescale(factor)
