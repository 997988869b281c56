"""Process groups of ours, as torch sees them: `shm` (shm/group.py) and `hosts` (hosts/group.py).

torch takes a Python subclass of ProcessGroup for the group itself, so the methods here have torch's names and are
called by `dist.*` directly, and by C++ (DDP's reducer, functional collectives) through torch's own bridge. They
flatten what they are given and have it carried out by the group's own reductions and copies: in this thread if the
caller waits anyway and nothing is before it, else as shm/queue.py says. CUDA tensors go to an NCCL backend, opened when
the first one comes.
"""

import atexit
import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm.host import Host
from lockstep.comm.shm.queue import Operation, Queue, ShmWork, await_all
from lockstep.comm.shm.reductions import Reduction, arithmetic, find_reduction
from lockstep.errors import UsageError, WorkerLost

if TYPE_CHECKING:
    from lockstep.comm.tree import ShardTree

TorchGroup: Any = dist.ProcessGroup
"""Untyped, since torch's stubs give every method several overloads of which it calls only one."""

_DEFAULTS = dist.ReduceOptions()
"""What torch's options say where a caller gives none: a sum, to or from rank 0, not waited for."""


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place in a group."""

    rank: int
    size: int


def by_nccl(name: str) -> Callable[[Any], Any]:
    """Have CUDA tensors carried by this method of NCCL's backend instead."""

    def wrap(method: Any) -> Any:
        @functools.wraps(method)
        def choose(self: "FlatGroup", *args: Any, **kwargs: Any) -> Any:
            if _are_on_gpu(args):
                return getattr(self._cuda(), name)(*args, **kwargs)
            return method(self, *args, **kwargs)

        return choose

    return wrap


def _are_on_gpu(args: Sequence[Any]) -> bool:
    for each in args:
        while isinstance(each, list) and each:
            each = each[0]
        if isinstance(each, Tensor):
            return each.is_cuda
    return False


class FlatReductions(Protocol):
    """The reductions of a group: see shm/reductions.py for what each does. One thread at a time."""

    def barrier(self) -> None:
        """Return when every worker has called this."""

    def all_reduce(self, flat: Tensor, reduce: Reduction) -> None:
        """Replace every worker's `flat` by the reduction of all."""

    def reduce(self, flat: Tensor, root: int, reduce: Reduction) -> None:
        """Replace `flat` on `root` by the reduction of all."""

    def reduce_scatter(self, out: Tensor, pieces: Sequence[Tensor], reduce: Reduction) -> None:
        """Set `out` to the reduction of what every worker has as piece number `rank`."""


class FlatCopies(Protocol):
    """What a group only copies: see shm/copies.py for what each does. One thread at a time."""

    def broadcast(self, flat: Tensor, root: int) -> None:
        """Replace every worker's `flat` by that of `root`."""

    def all_gather(self, outs: Sequence[Tensor], flat: Tensor) -> None:
        """Set `outs[r]` to what worker r has as `flat`."""

    def gather(self, outs: Sequence[Tensor], flat: Tensor, root: int) -> None:
        """Set `outs[r]` on `root` to what worker r has as `flat`."""

    def scatter(self, out: Tensor, pieces: Sequence[Tensor], root: int) -> None:
        """Set `out` on worker r to piece r of `root`."""

    def all_to_all(self, outs: Sequence[Tensor], pieces: Sequence[Tensor]) -> None:
        """Set `outs[s]` to what worker s has as piece number `rank`."""


Cuts = Sequence[tuple[int, int]]
"""First and last-but-one element of the part that each worker adds."""
Spans = Sequence[tuple[int, int]]
"""First and last-but-one element of what each worker owns of a flat tensor."""
AddAlong = Callable[[Tensor, Cuts, Tensor | None], None]
"""Adds what all workers have in their lanes along a tree, each over its cut: into the tensor given, or all last lanes.
"""


class FlatGroup(TorchGroup):  # type: ignore[misc]  # Any, see above
    """A process group in Python, whose CPU tensors may lie in memory that the workers of one host share.

    Made by torch; collective to make, as every group is. Subclasses say how flat tensors are reduced and copied, and
    send and receive.
    """

    supports_splitting = False
    supports_coalescing = False
    backend_name: str

    def __init__(
        self, store: dist.Store, place: Place, host: Host, reductions: FlatReductions, copies: FlatCopies, queue: Queue
    ) -> None:
        super().__init__(place.rank, place.size)
        self._store, self._place = store, place
        self._group_name = self._group_desc = ""
        self._host, self._reductions, self._copies, self._queue = host, reductions, copies, queue
        self._coalescing: list[Any] | None = None
        self._nccl: Any = None
        self._open_in: int | None = os.getpid()
        """The process that may leave the group; None once it has. A forked child must not in its parent's name."""
        atexit.register(_close, weakref.ref(self))

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the function of this name."""
        return self._opened(lambda: self._host.heap.allocate(numel, dtype))

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the function of this name."""
        return self._opened(lambda: self._host.heap.allocate_common(numel, dtype))

    def _opened(self, allocate: Callable[[], Tensor]) -> Tensor:
        found: list[Tensor] = []
        self._queue.run("allocate", lambda: found.append(allocate()), [])
        return found[0]

    def release(self, tensor: Tensor) -> None:
        """Give back the memory that `allocate` gave for `tensor`, once no tensor over it is left."""
        self._host.heap.release(tensor)

    def adder(self, tree: "ShardTree") -> AddAlong | None:
        """What adds lanes in memory of this group along `tree`; None if the group cannot."""
        raise NotImplementedError

    def share(self, flats: Sequence[tuple[Tensor, Spans]]) -> ShmWork:
        """Start making all workers see what each has changed in its span of `flats`, which are from `allocate_common`.

        Over with it, all workers of this host have called this, whether there are any or not; returns what to wait for.
        """
        raise NotImplementedError

    @property
    def writes_for(self) -> tuple[int, ...]:
        """The ranks whose spans of memory from `allocate_common` this worker writes: its own; over several hosts also
        those of which its host has only a copy, each of which one worker of the host writes."""
        raise NotImplementedError

    def submit(self, name: str, operation: Operation, outputs: Sequence[Tensor]) -> ShmWork:
        """Have an operation on memory of this group carried out in its turn; returns what to wait for."""
        return self._queue.submit(name, operation, outputs)

    # What torch asks a group

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """This worker's rank in the group."""
        return self._place.rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """How many workers the group has."""
        return self._place.size

    rank, size = getRank, getSize

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name of the backend."""
        return self.backend_name

    name = getBackendName

    # torch's own group keeps its names in its backends, of which this group has none. C++ asks by the long names.

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Keep the name under which torch finds this group."""
        self._group_name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """The name under which torch finds this group."""
        return self._group_name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802 - torch's name
        """Keep what the user calls this group."""
        self._group_desc = text

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """What the user calls this group."""
        return self._group_desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])

    def _get_backend(self, device: torch.device) -> "FlatGroup":
        return self if torch.device(device).type == "cpu" else self._cuda()

    def backend_in_use(self, kind: str) -> Any:
        """What carries tensors on devices of this kind; None where it has not been opened, and is not by asking."""
        return self if kind == "cpu" else self._nccl

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: the group counts by itself."""

    def _get_sequence_number_for_group(self) -> int:
        raise NotImplementedError

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of every wait."""
        self._host.barrier.timeout = timeout

    def shutdown(self) -> None:
        """Leave the group; peers that still wait for this worker are told."""
        if self._open_in != os.getpid():
            return
        self._open_in = None
        self._queue.close()
        self._close()
        self._host.barrier.leave()
        if self._nccl is not None:
            self._nccl.shutdown()

    def abort(self) -> None:
        """Break the group: whoever waits in it is told at once."""
        self._queue.fail(WorkerLost(f"{self._host.barrier.name} aborted the group.", ()))
        if self._nccl is not None:
            self._nccl.abort()

    def _close(self) -> None:
        """The group is left: let threads end."""

    # Carrying out

    def _do(self, name: str, operation: Operation, outputs: Any, options: Any) -> Any:
        """Carry out now if the caller waits anyway, else when its turn comes."""
        if self._coalescing is None and not options.asyncOp:
            return self._queue.run(name, operation, outputs)
        return self._collect(self._queue.submit(name, operation, outputs))

    def _collect(self, work: Any) -> Any:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type != "cpu":
            self._cuda()._start_coalescing()
        else:
            self._coalescing = []

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self._cuda()._end_coalescing()
        works, self._coalescing = self._coalescing or [], None
        return self._queue.submit("coalesced", lambda: await_all(works), [])

    def _cuda(self) -> Any:
        """The NCCL backend that carries CUDA tensors of this group, opened when the first one comes."""
        if self._nccl is None:
            nccl = getattr(dist, "ProcessGroupNCCL", None)
            if nccl is None or not torch.cuda.is_available():
                raise UsageError(
                    f"backend {self.backend_name} carries tensors in host memory; NCCL, for CUDA tensors, is not there."
                )
            options = nccl.Options()
            options._timeout = self._host.barrier.timeout
            self._nccl = nccl(dist.PrefixStore("nccl", self._store), self.getRank(), self.getSize(), options)
        return self._nccl

    # Collectives, under torch's names

    def allreduce(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Reduce each of `tensors` over all workers, in place."""
        if tensors[0].is_cuda:  # Not by the decorator: this is the hot path.
            return self._cuda().allreduce(tensors, *([] if opts is _DEFAULTS else [opts]))
        if tensors[0].is_sparse:
            return self._do("all_reduce", functools.partial(self._add_sparse, tensors, opts), tensors, opts)
        size = self._place.size
        reductions = [find_reduction(opts.reduceOp, tensor.dtype, size) for tensor in tensors]

        def operate() -> None:
            for tensor, (reduce, factor) in zip(tensors, reductions, strict=True):
                flat = flatten(tensor)
                if factor is not None:
                    flat.mul_(factor)
                self._reductions.all_reduce(arithmetic(flat), reduce)
                write_back(flat, tensor)

        return self._do("all_reduce", operate, tensors, opts)

    @by_nccl("allreduce_coalesced")
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """The same."""
        return self.allreduce(tensors, opts)

    def _add_sparse(self, tensors: list[Tensor], opts: Any) -> None:
        """Add sparse tensors up, in place: what each worker has travels padded to the longest."""
        size = self._place.size
        for tensor in tensors:
            if opts.reduceOp != dist.ReduceOp.SUM and opts.reduceOp != dist.ReduceOp.AVG:
                raise UsageError(
                    f"backend {self.backend_name} adds and averages sparse tensors, and does nothing else with them."
                )
            own = tensor.coalesce()
            counts = torch.zeros(size, dtype=torch.int64)
            counts[self._place.rank] = own._nnz()
            self._reductions.all_reduce(counts, find_reduction(dist.ReduceOp.SUM, counts.dtype, size)[0])
            rows, values = own.indices().T, own.values()
            gathered = [self._gather_rows(part, counts.tolist()) for part in (rows, values)]
            indices, added = (torch.cat(parts) for parts in gathered)
            total = torch.sparse_coo_tensor(indices.T, added, tensor.shape, check_invariants=False).coalesce()
            tensor.copy_(total / size if opts.reduceOp == dist.ReduceOp.AVG else total)

    def _gather_rows(self, own: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """Every worker's rows, of which worker i has `counts[i]`."""
        padded = own.new_zeros(max(counts), *own.shape[1:])
        padded[: len(own)] = own
        flats = [torch.empty_like(padded).reshape(-1) for _ in counts]
        if padded.numel():
            self._copies.all_gather(flats, padded.reshape(-1))
        return [flat.view(padded.shape)[:count] for flat, count in zip(flats, counts, strict=True)]

    @by_nccl("reduce")
    def reduce(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Reduce `tensors` over all workers into those of the root."""
        reduce, factor = find_reduction(opts.reduceOp, tensors[0].dtype, self.getSize())

        def operate() -> None:
            for tensor in tensors:
                flat = flatten(tensor) if factor is None else flatten(tensor) * factor
                self._reductions.reduce(arithmetic(flat), opts.rootRank, reduce)
                if opts.rootRank == self.getRank():
                    write_back(flat, tensor)

        return self._do("reduce", operate, tensors, opts)

    @by_nccl("broadcast")
    def broadcast(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Replace the tensors of all workers by those of the root."""

        def operate() -> None:
            for tensor in tensors:
                flat = flatten(tensor)
                self._copies.broadcast(flat, opts.rootRank)
                if opts.rootRank != self.getRank():
                    write_back(flat, tensor)

        return self._do("broadcast", operate, tensors, opts)

    def barrier(self, opts: Any = _DEFAULTS) -> Any:
        """Return when every worker has called this."""
        return self._do("barrier", self._reductions.barrier, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As `barrier`, which names who is missing anyway."""
        self._queue.run("barrier", self._reductions.barrier, [])

    @by_nccl("allgather")
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Set each output list to what every worker has as the input of the same number."""

        def operate() -> None:
            for outs, tensor in zip(outputs, inputs, strict=True):
                with _flattened(outs) as flats:
                    self._copies.all_gather(flats, flatten(tensor))

        return self._do("all_gather", operate, outputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], *opts: Any) -> Any:
        """As `allgather`, but `outputs` is by worker first, then by input."""
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, *opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, *opts: Any) -> Any:
        """Set `output` to every worker's `tensor`, one behind the other."""
        return self.all_gather_single_coalesced([output], [tensor], *opts)

    _allgather_base = all_gather_single

    @by_nccl("allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """As `all_gather_single`, for several tensors."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_row("all_gather_into_tensor", output, tensor)

        def operate() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = flatten(output)
                self._copies.all_gather(flat.chunk(self.getSize()), flatten(tensor))
                write_back(flat, output)

        return self._do("all_gather_into_tensor", operate, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @by_nccl("reduce_scatter")
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _DEFAULTS) -> Any:
        """Set each output to the reduction of every worker's input for this worker."""
        reduce, factor = find_reduction(opts.reduceOp, outputs[0].dtype, self.getSize())

        def operate() -> None:
            for output, tensors in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, [flatten(tensor) for tensor in tensors], reduce, factor)

        return self._do("reduce_scatter", operate, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, *opts: Any) -> Any:
        """Set `output` to this worker's part of the reduction of every worker's `tensor`."""
        return self.reduce_scatter_single_coalesced([output], [tensor], *opts)

    _reduce_scatter_base = reduce_scatter_single

    @by_nccl("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _DEFAULTS
    ) -> Any:
        """As `reduce_scatter_single`, for several tensors."""
        reduce, factor = find_reduction(opts.reduceOp, outputs[0].dtype, self.getSize())
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_row("reduce_scatter_tensor", tensor, output)

        def operate() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, flatten(tensor).chunk(self.getSize()), reduce, factor)

        return self._do("reduce_scatter_tensor", operate, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], reduce: Reduction, factor: Any) -> None:
        if factor is not None:
            pieces = [piece * factor for piece in pieces]
        flat = flatten(output)
        pieces = [arithmetic(piece) for piece in pieces] or [arithmetic(flat)] * self.getSize()
        self._reductions.reduce_scatter(arithmetic(flat), pieces, reduce)
        write_back(flat, output)

    @by_nccl("gather")
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Set the root's outputs to what every worker has as input."""

        def operate() -> None:
            with _flattened(outputs[0] if opts.rootRank == self.getRank() else []) as flats:
                self._copies.gather(flats, flatten(inputs[0]), opts.rootRank)

        return self._do("gather", operate, outputs, opts)

    @by_nccl("scatter")
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _DEFAULTS) -> Any:
        """Set every worker's output to the root's input for it."""

        def operate() -> None:
            pieces = inputs[0] if opts.rootRank == self.getRank() else []
            with _flattened(outputs) as flats:
                self._copies.scatter(flats[0], [flatten(piece) for piece in pieces], opts.rootRank)

        return self._do("scatter", operate, outputs, opts)

    @by_nccl("alltoall")
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Set output s to what worker s has as the input for this one."""

        def operate() -> None:
            with _flattened(outputs) as flats:
                self._copies.all_to_all(flats, [flatten(tensor) for tensor in inputs])

        return self._do("all_to_all", operate, outputs, opts)

    @by_nccl("alltoall_base")
    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = _DEFAULTS
    ) -> Any:
        """As `alltoall`, with all outputs and all inputs in one tensor each, cut along the first dimension."""
        out_rows = self._rows("output", output, output_splits)
        in_rows = self._rows("input", tensor, input_splits)

        def operate() -> None:
            with _flattened([output]) as (flat,):
                self._copies.all_to_all(flat.split(out_rows), flatten(tensor).split(in_rows))

        return self._do("all_to_all_single", operate, [output], opts)

    alltoall_base = all_to_all_single

    def _check_row(self, name: str, whole: Tensor, part: Tensor) -> None:
        size = self.getSize()
        if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
            raise UsageError(
                f"{name}: the tensor of {whole.numel()} x {whole.dtype} must have {size} times the elements of "
                f"the one of {part.numel()} x {part.dtype}, one part per worker, and the same dtype."
            )

    def _rows(self, which: str, tensor: Tensor, splits: list[int]) -> list[int]:
        """Elements for each worker."""
        size, rows = self.getSize(), tensor.size(0) if tensor.dim() else tensor.numel()
        counts = list(splits) or [rows // size] * size
        if len(counts) != size or sum(counts) != rows:
            raise UsageError(
                f"all_to_all_single: {which} has {rows} rows, which the splits {counts} for {size} workers do "
                "not add up to."
            )
        width = tensor.numel() // rows if rows else 0
        return [count * width for count in counts]


def flatten(tensor: Tensor) -> Tensor:
    """`tensor` as a flat contiguous one: a view where it can be."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dim() == 1 and tensor.stride(0) == 1:
        return tensor
    # torch calls a single element contiguous whatever its stride, and then refuses to see its bytes.
    return tensor.view(-1) if tensor.numel() > 1 else tensor.as_strided((tensor.numel(),), (1,))


def write_back(flat: Tensor, tensor: Tensor) -> None:
    """Put `flat` into the tensor it was made from, where it is a copy of it."""
    if flat is not tensor and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


@contextlib.contextmanager
def _flattened(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """`tensors` as flat ones to write to inside `with`; what they hold then is in `tensors` after it."""
    flats = [flatten(tensor) for tensor in tensors]
    yield flats
    for flat, tensor in zip(flats, tensors, strict=True):
        write_back(flat, tensor)


def _close(group: "weakref.ref[FlatGroup]") -> None:
    """Let the threads of a group that was never destroyed end before the interpreter does."""
    alive = group()
    if alive is not None:
        with contextlib.suppress(Exception):
            alive.shutdown()
