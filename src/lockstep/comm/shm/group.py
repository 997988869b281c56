"""The process group that torch gets for `shm`.

torch takes a Python subclass of ProcessGroup for the group itself, so the methods here have torch's names and are
called by `dist.*` directly, and by C++ (DDP's reducer, functional collectives) through torch's own bridge. They
flatten what they are given and have it carried out by `Reductions`, `Copies` or `Messages`: in this thread if the
caller waits anyway and nothing is before it, else as queue.py says. CUDA tensors go to an NCCL backend, opened when
the first one comes.
"""

import atexit
import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.shm import NAME
from lockstep.comm.shm.barrier import PAGE_BYTES, Barrier
from lockstep.comm.shm.copies import Copies, Window, half_bytes
from lockstep.comm.shm.p2p import ANYBODY, RING_BYTES, Messages
from lockstep.comm.shm.queue import Operation, Queue, ShmWork, Turn, await_all
from lockstep.comm.shm.reductions import Reduction, Reductions, arithmetic, find_reduction
from lockstep.comm.shm.segment import Heap, as_bytes, meet, open_segment, watch_peers
from lockstep.errors import UsageError, WorkerLost

TorchGroup: Any = dist.ProcessGroup
"""Untyped, since torch's stubs give every method several overloads of which it calls only one."""

_DEFAULTS = dist.ReduceOptions()
"""What torch's options say where a caller gives none: a sum, to or from rank 0, not waited for."""


def _by_nccl(name: str) -> Callable[[Any], Any]:
    """Have CUDA tensors carried by this method of NCCL's backend instead."""

    def wrap(method: Any) -> Any:
        @functools.wraps(method)
        def choose(self: "ShmGroup", *args: Any, **kwargs: Any) -> Any:
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


class ShmGroup(TorchGroup):  # type: ignore[misc]  # Any, see above
    """A process group in shared memory. Made by torch; collective to make, as every group is."""

    supports_splitting = False
    supports_coalescing = False

    def __init__(self, store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store = store
        self._group_name = self._group_desc = ""
        peers = meet(store, rank, size, ranks, timeout)
        rings_at = PAGE_BYTES + 2 * half_bytes(size)
        slice_bytes = rings_at + size * RING_BYTES
        watch = watch_peers(peers, rank, timeout)
        control = open_segment("control", slice_bytes, store=store, rank=rank, size=size, watch=watch)
        turn = Turn()
        barrier = self._barrier = Barrier(control, rank, peers, timeout, turn)
        self._heap = Heap(store, rank, size, lambda: watch_peers(peers, rank, barrier.timeout, barrier.look))
        window = Window(control, PAGE_BYTES)
        self._reductions = Reductions(barrier, window, self._heap)
        self._copies = Copies(barrier, window, self._heap)
        self._messages = Messages(barrier, control, rings_at)
        self._queue = Queue("lockstep-shm", barrier.fail, turn)
        self._coalescing: list[ShmWork] | None = None
        self._nccl: Any = None
        self._open_in: int | None = os.getpid()
        """The process that may leave the group; None once it has. A forked child must not in its parent's name."""
        atexit.register(_close, weakref.ref(self))

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the function of this name."""
        return self._opened(lambda: self._heap.allocate(numel, dtype))

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the function of this name."""
        return self._opened(lambda: self._heap.allocate_common(numel, dtype))

    def _opened(self, allocate: Callable[[], Tensor]) -> Tensor:
        found: list[Tensor] = []
        self._queue.run("allocate", lambda: found.append(allocate()), [])
        return found[0]

    def release(self, tensor: Tensor) -> None:
        """Give back the memory that `allocate` gave for `tensor`, once no tensor over it is left."""
        self._heap.release(tensor)

    def add_along(
        self,
        lanes: Tensor,
        contributions: Sequence[tuple[int, int]],
        add: Callable[[Sequence[Tensor], Tensor], None],
        cuts: Sequence[tuple[int, int]],
        out: Tensor | None,
    ) -> ShmWork:
        """Start adding the lanes of all workers in an order of the caller's, see `Reductions`; what to wait for."""
        operate = functools.partial(self._reductions.add_along, lanes, contributions, add, cuts, out)
        return self._queue.submit("add_along", operate, [lanes])

    # What torch asks a group

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """This worker's rank in the group."""
        return self._barrier.rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """How many workers the group has."""
        return self._barrier.size

    rank, size = getRank, getSize

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """The name of the backend."""
        return NAME

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

    def _get_backend(self, device: torch.device) -> "ShmGroup":
        return self if torch.device(device).type == "cpu" else self._cuda()

    def backend_in_use(self, kind: str) -> Any:
        """What carries tensors on devices of this kind; None where it has not been opened, and is not by asking."""
        return self if kind == "cpu" else self._nccl

    def _set_sequence_number_for_group(self) -> None:
        """Nothing to do: the barrier counts."""

    def _get_sequence_number_for_group(self) -> int:
        return self._barrier.phase

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of every wait."""
        self._barrier.timeout = timeout

    def shutdown(self) -> None:
        """Leave the group; peers that still wait for this worker are told."""
        if self._open_in != os.getpid():
            return
        self._open_in = None
        self._queue.close()
        self._messages.close()
        self._barrier.leave()
        if self._nccl is not None:
            self._nccl.shutdown()

    def abort(self) -> None:
        """Break the group: whoever waits in it is told at once."""
        self._barrier.fail(WorkerLost(f"{self._barrier.name} aborted the group.", ()))
        if self._nccl is not None:
            self._nccl.abort()

    # Carrying out

    def _do(self, name: str, operation: Operation, outputs: Any, options: Any) -> ShmWork:
        """Carry out now if the caller waits anyway, else when its turn comes."""
        if self._coalescing is None and not options.asyncOp:
            return self._queue.run(name, operation, outputs)
        return self._collect(self._queue.submit(name, operation, outputs))

    def _collect(self, work: ShmWork) -> ShmWork:
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
                raise UsageError("backend shm carries tensors in host memory, and NCCL is not there for CUDA tensors.")
            options = nccl.Options()
            options._timeout = self._barrier.timeout
            self._nccl = nccl(dist.PrefixStore("nccl", self._store), self.getRank(), self.getSize(), options)
        return self._nccl

    # Collectives, under torch's names

    def allreduce(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Reduce each of `tensors` over all workers, in place."""
        if tensors[0].is_cuda:  # Not by the decorator: this is the hot path.
            return self._cuda().allreduce(tensors, *([] if opts is _DEFAULTS else [opts]))
        if tensors[0].is_sparse:
            return self._do("all_reduce", functools.partial(self._add_sparse, tensors, opts), tensors, opts)
        size = self._barrier.size
        reductions = [find_reduction(opts.reduceOp, tensor.dtype, size) for tensor in tensors]

        def operate() -> None:
            for tensor, (reduce, factor) in zip(tensors, reductions, strict=True):
                flat = _flatten(tensor)
                if factor is not None:
                    flat.mul_(factor)
                self._reductions.all_reduce(arithmetic(flat), reduce)
                _write_back(flat, tensor)

        return self._do("all_reduce", operate, tensors, opts)

    allreduce_coalesced = allreduce

    def _add_sparse(self, tensors: list[Tensor], opts: Any) -> None:
        """Add sparse tensors up, in place: what each worker has travels padded to the longest."""
        size, rank = self._barrier.size, self._barrier.rank
        for tensor in tensors:
            if opts.reduceOp != dist.ReduceOp.SUM and opts.reduceOp != dist.ReduceOp.AVG:
                raise UsageError("backend shm adds and averages sparse tensors, and does nothing else with them.")
            own = tensor.coalesce()
            counts = torch.zeros(size, dtype=torch.int64)
            counts[rank] = own._nnz()
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

    @_by_nccl("reduce")
    def reduce(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Reduce `tensors` over all workers into those of the root."""
        reduce, factor = find_reduction(opts.reduceOp, tensors[0].dtype, self.getSize())

        def operate() -> None:
            for tensor in tensors:
                flat = _flatten(tensor) if factor is None else _flatten(tensor) * factor
                self._reductions.reduce(arithmetic(flat), opts.rootRank, reduce)
                if opts.rootRank == self.getRank():
                    _write_back(flat, tensor)

        return self._do("reduce", operate, tensors, opts)

    @_by_nccl("broadcast")
    def broadcast(self, tensors: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Replace the tensors of all workers by those of the root."""

        def operate() -> None:
            for tensor in tensors:
                flat = _flatten(tensor)
                self._copies.broadcast(flat, opts.rootRank)
                if opts.rootRank != self.getRank():
                    _write_back(flat, tensor)

        return self._do("broadcast", operate, tensors, opts)

    def barrier(self, opts: Any = _DEFAULTS) -> Any:
        """Return when every worker has called this."""
        return self._do("barrier", self._reductions.barrier, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As `barrier`, which names who is missing anyway."""
        self._queue.run("barrier", self._reductions.barrier, [])

    @_by_nccl("allgather")
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Set each output list to what every worker has as the input of the same number."""

        def operate() -> None:
            for outs, tensor in zip(outputs, inputs, strict=True):
                with _flattened(outs) as flats:
                    self._copies.all_gather(flats, _flatten(tensor))

        return self._do("all_gather", operate, outputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], *opts: Any) -> Any:
        """As `allgather`, but `outputs` is by worker first, then by input."""
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, *opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, *opts: Any) -> Any:
        """Set `output` to every worker's `tensor`, one behind the other."""
        return self.all_gather_single_coalesced([output], [tensor], *opts)

    _allgather_base = all_gather_single

    @_by_nccl("allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """As `all_gather_single`, for several tensors."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_row("all_gather_into_tensor", output, tensor)

        def operate() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = _flatten(output)
                self._copies.all_gather(flat.chunk(self.getSize()), _flatten(tensor))
                _write_back(flat, output)

        return self._do("all_gather_into_tensor", operate, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_by_nccl("reduce_scatter")
    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _DEFAULTS) -> Any:
        """Set each output to the reduction of every worker's input for this worker."""
        reduce, factor = find_reduction(opts.reduceOp, outputs[0].dtype, self.getSize())

        def operate() -> None:
            for output, tensors in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, [_flatten(tensor) for tensor in tensors], reduce, factor)

        return self._do("reduce_scatter", operate, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, *opts: Any) -> Any:
        """Set `output` to this worker's part of the reduction of every worker's `tensor`."""
        return self.reduce_scatter_single_coalesced([output], [tensor], *opts)

    _reduce_scatter_base = reduce_scatter_single

    @_by_nccl("reduce_scatter_tensor_coalesced")
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _DEFAULTS
    ) -> Any:
        """As `reduce_scatter_single`, for several tensors."""
        reduce, factor = find_reduction(opts.reduceOp, outputs[0].dtype, self.getSize())
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_row("reduce_scatter_tensor", tensor, output)

        def operate() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, _flatten(tensor).chunk(self.getSize()), reduce, factor)

        return self._do("reduce_scatter_tensor", operate, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], reduce: Reduction, factor: Any) -> None:
        if factor is not None:
            pieces = [piece * factor for piece in pieces]
        flat = _flatten(output)
        pieces = [arithmetic(piece) for piece in pieces] or [arithmetic(flat)] * self.getSize()
        self._reductions.reduce_scatter(arithmetic(flat), pieces, reduce)
        _write_back(flat, output)

    @_by_nccl("gather")
    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Set the root's outputs to what every worker has as input."""

        def operate() -> None:
            with _flattened(outputs[0] if opts.rootRank == self.getRank() else []) as flats:
                self._copies.gather(flats, _flatten(inputs[0]), opts.rootRank)

        return self._do("gather", operate, outputs, opts)

    @_by_nccl("scatter")
    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = _DEFAULTS) -> Any:
        """Set every worker's output to the root's input for it."""

        def operate() -> None:
            pieces = inputs[0] if opts.rootRank == self.getRank() else []
            with _flattened(outputs) as flats:
                self._copies.scatter(flats[0], [_flatten(piece) for piece in pieces], opts.rootRank)

        return self._do("scatter", operate, outputs, opts)

    @_by_nccl("alltoall")
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = _DEFAULTS) -> Any:
        """Set output s to what worker s has as the input for this one."""

        def operate() -> None:
            with _flattened(outputs) as flats:
                self._copies.all_to_all(flats, [_flatten(tensor) for tensor in inputs])

        return self._do("all_to_all", operate, outputs, opts)

    @_by_nccl("alltoall_base")
    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = _DEFAULTS
    ) -> Any:
        """As `alltoall`, with all outputs and all inputs in one tensor each, cut along the first dimension."""
        out_rows = self._rows("output", output, output_splits)
        in_rows = self._rows("input", tensor, input_splits)

        def operate() -> None:
            with _flattened([output]) as (flat,):
                self._copies.all_to_all(flat.split(out_rows), _flatten(tensor).split(in_rows))

        return self._do("all_to_all_single", operate, [output], opts)

    alltoall_base = all_to_all_single

    @_by_nccl("send")
    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        """Send to one worker."""
        work = ShmWork("send", tensors)
        self._messages.send(as_bytes(_flatten(tensors[0])), target, tag, work)
        return self._collect(work)

    @_by_nccl("recv")
    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        """Receive from one worker."""
        flat = _flatten(tensors[0])
        work = ShmWork("recv", tensors, before=lambda: _write_back(flat, tensors[0]))
        self._messages.receive(as_bytes(flat), source, tag, work)
        return self._collect(work)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive from whichever worker sends first."""
        return self.recv(tensors, ANYBODY, tag)

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


def _flatten(tensor: Tensor) -> Tensor:
    """`tensor` as a flat contiguous one: a view where it can be."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    if tensor.dim() == 1 and tensor.stride(0) == 1:
        return tensor
    # torch calls a single element contiguous whatever its stride, and then refuses to see its bytes.
    return tensor.view(-1) if tensor.numel() > 1 else tensor.as_strided((tensor.numel(),), (1,))


def _write_back(flat: Tensor, tensor: Tensor) -> None:
    """Put `flat` into the tensor it was made from, where it is a copy of it."""
    if flat is not tensor and flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


@contextlib.contextmanager
def _flattened(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """`tensors` as flat ones to write to inside `with`; what they hold then is in `tensors` after it."""
    flats = [_flatten(tensor) for tensor in tensors]
    yield flats
    for flat, tensor in zip(flats, tensors, strict=True):
        _write_back(flat, tensor)


def _close(group: "weakref.ref[ShmGroup]") -> None:
    """Let the threads of a group that was never destroyed end before the interpreter does."""
    alive = group()
    if alive is not None:
        with contextlib.suppress(Exception):
            alive.shutdown()
