"""The process group that torch gets for `shm`.

torch takes a Python subclass of ProcessGroup for the group itself, so the methods here have torch's names and are
called by `dist.*` directly, and by C++ (DDP's reducer, functional collectives) through torch's own bridge. They
flatten what they are given and have it carried out by `Collectives` or `Mail`: in this thread if the caller waits
anyway and nothing is before it, else in the group's own. CUDA tensors go to an NCCL backend, opened at the first one.
"""

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lockstep.comm.segment import Segment, open_segment
from lockstep.comm.shard_tree import ShardTree
from lockstep.comm.shm import reduction as reductions
from lockstep.comm.shm.board import PAGE_BYTES, Board
from lockstep.comm.shm.collectives import Collectives, as_bytes
from lockstep.comm.shm.mail import ANYBODY, RING_BYTES, Mail
from lockstep.comm.shm.meeting import meet, watch_peers
from lockstep.comm.shm.reduction import RedOpType, Reduction, arithmetic
from lockstep.comm.shm.window import HALF_BYTES, Window
from lockstep.comm.shm.work import Queue, ShmWork, await_all
from lockstep.errors import UsageError, WorkerLost

NAME = "shm"
PREMUL_SUM = RedOpType.PREMUL_SUM.value

TorchGroup: Any = dist.ProcessGroup
"""Untyped, since torch's stubs give every method several overloads of which it calls only one."""


class ShmGroup(TorchGroup):  # type: ignore[misc]  # Any, see above
    """A process group in shared memory. Made by torch; collective to make, as every group is."""

    supports_splitting = False
    supports_coalescing = False

    def __init__(self, store: dist.Store, rank: int, size: int, ranks: Sequence[int], timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store = rank, size, store
        self._group_name = self._group_desc = ""
        self._peers = meet(store, rank, size, ranks, timeout)
        self._segments: dict[int, Segment] = {}
        self._num_allocated = 0
        watch = watch_peers(self._peers, rank, timeout)
        rings_at = PAGE_BYTES + 2 * HALF_BYTES
        slice_bytes = rings_at + size * RING_BYTES
        control = open_segment("control", slice_bytes, store=store, rank=rank, size=size, watch=watch)
        self._board = Board(control, rank, self._peers, timeout)
        window = Window(control, PAGE_BYTES)
        self._collectives = Collectives(self._board, window, self._segments)
        self._mail = Mail(self._board, control, rings_at)
        self._queue = Queue("lockstep-shm", self._board.fail)
        self._reductions: dict[tuple[int, torch.dtype], Reduction] = {}
        self._coalescing: list[ShmWork] | None = None
        self._nccl: Any = None
        self._process, self._is_open = os.getpid(), True
        atexit.register(_close, weakref.ref(self))

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the function of this name."""
        number = self._num_allocated
        segment = self._open(numel, dtype, self._size)
        self._segments[number] = segment
        return segment.slice(self._rank)[: numel * dtype.itemsize].view(dtype)

    def allocate_common(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See the function of this name."""
        return self._open(numel, dtype, 1).bytes[: numel * dtype.itemsize].view(dtype)

    def _open(self, numel: int, dtype: torch.dtype, slices: int) -> Segment:
        key = f"segment/{self._num_allocated}"
        self._num_allocated += 1
        watch = watch_peers(self._peers, self._rank, self._board.timeout, self._board)
        num_bytes = max(numel, 1) * dtype.itemsize
        opened: list[Segment] = []

        def open_next(_: bool) -> None:
            opened.append(
                open_segment(
                    key, num_bytes, store=self._store, rank=self._rank, size=self._size, watch=watch, slices=slices
                )
            )

        self._queue.run("allocate", open_next, [])
        return opened[0]

    def release(self, tensor: Tensor) -> None:
        """Give back the memory that `allocate` gave for `tensor`, once no tensor over it is left."""
        number, _ = self._collectives.locate(tensor)
        self._collectives.forget_plans()
        self._segments.pop(number, None)

    def add_along(self, tree: ShardTree, lanes: Tensor, cuts: Sequence[tuple[int, int]], out: Tensor | None) -> ShmWork:
        """Start adding everybody's lanes along `tree`, see comm/ordered.py; returns what to wait for."""

        def operate(spin: bool) -> None:
            self._collectives.add_along(lanes, tree.contributions, tree.sums, cuts, out, spin=spin)

        return self._queue.submit("add_along", operate, [lanes])

    # What torch asks a group

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """This worker's rank in the group."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """How many workers the group has."""
        return self._size

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

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: the board counts."""

    def _get_sequence_number_for_group(self) -> int:
        return self._board.phase

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the deadline of every wait."""
        self._board.timeout = timeout

    def shutdown(self) -> None:
        """Leave the group; peers that still wait for this worker are told."""
        if not self._is_open or self._process != os.getpid():  # A forked child must not leave in its parent's name.
            return
        self._is_open = False
        self._queue.close()
        self._mail.close()
        self._board.leave()
        if self._nccl is not None:
            self._nccl.shutdown()

    def abort(self) -> None:
        """Break the group: whoever waits in it is told at once."""
        self._board.fail(WorkerLost(f"worker {self._peers[self._rank].rank} aborted the group.", ()))
        if self._nccl is not None:
            self._nccl.abort()

    # Carrying out

    def _do(self, name: str, operation: Callable[[bool], None], outputs: Any, options: Any) -> ShmWork:
        """Carry out now if the caller waits anyway, else in the group's thread."""
        if self._coalescing is None and not options.asyncOp:
            return self._queue.run(name, operation, outputs)
        work = self._queue.submit(name, operation, outputs)
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
        return self._queue.submit("coalesced", lambda _: await_all(works), [])

    # Collectives, under torch's names

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce each of `tensors` over all workers, in place."""
        if tensors[0].is_cuda:
            return self._cuda().allreduce(tensors, opts)
        opts = opts or c10d.AllreduceOptions()
        reductions = [self._reduction(opts.reduceOp, tensor.dtype) for tensor in tensors]

        def operate(spin: bool) -> None:
            for tensor, (reduce, factor) in zip(tensors, reductions, strict=True):
                flat = _flatten(tensor)
                if factor is not None:
                    flat.mul_(factor)
                self._collectives.all_reduce(arithmetic(flat), reduce, spin=spin)
                _write_back(flat, tensor)

        return self._do("all_reduce", operate, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce `tensors` over all workers into those of the root."""
        if tensors[0].is_cuda:
            return self._cuda().reduce(tensors, opts)
        reduce, factor = self._reduction(opts.reduceOp, tensors[0].dtype)

        def operate(spin: bool) -> None:
            for tensor in tensors:
                flat = _flatten(tensor) if factor is None else _flatten(tensor) * factor
                self._collectives.reduce(arithmetic(flat), opts.rootRank, reduce, spin=spin)
                if opts.rootRank == self._rank:
                    _write_back(flat, tensor)

        return self._do("reduce", operate, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Replace everybody's tensors by those of the root."""
        if tensors[0].is_cuda:
            return self._cuda().broadcast(tensors, opts)
        opts = opts or c10d.BroadcastOptions()

        def operate(spin: bool) -> None:
            for tensor in tensors:
                flat = _flatten(tensor)
                self._collectives.broadcast(flat, opts.rootRank, spin=spin)
                if opts.rootRank != self._rank:
                    _write_back(flat, tensor)

        return self._do("broadcast", operate, tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        """Return when everybody has called this."""
        opts = opts or c10d.BarrierOptions()
        return self._do("barrier", lambda spin: self._collectives.barrier(spin=spin), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As `barrier`, which names who is missing anyway."""
        self._queue.run("barrier", lambda spin: self._collectives.barrier(spin=spin), [])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Set each output list to what everybody has as the input of the same number."""
        if inputs[0].is_cuda:
            return self._cuda().allgather(outputs, inputs, opts)
        opts = opts or c10d.AllgatherOptions()

        def operate(spin: bool) -> None:
            for outs, tensor in zip(outputs, inputs, strict=True):
                flats = [_flatten(out) for out in outs]
                self._collectives.all_gather(flats, _flatten(tensor), spin=spin)
                for flat, out in zip(flats, outs, strict=True):
                    _write_back(flat, out)

        return self._do("all_gather", operate, outputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """As `allgather`, but `outputs` is by worker first, then by input."""
        return self.allgather([list(outs) for outs in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Set `output` to everybody's `tensor`, one behind the other."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """The same for several tensors."""
        if inputs[0].is_cuda:
            return self._cuda().allgather_into_tensor_coalesced(outputs, inputs, opts)
        opts = opts or c10d.AllgatherOptions()
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_row("all_gather_into_tensor", output, tensor)

        def operate(spin: bool) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = _flatten(output)
                self._collectives.all_gather(flat.chunk(self._size), _flatten(tensor), spin=spin)
                _write_back(flat, output)

        return self._do("all_gather_into_tensor", operate, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Set each output to the reduction of everybody's input for this worker."""
        if outputs[0].is_cuda:
            return self._cuda().reduce_scatter(outputs, inputs, opts)
        opts = opts or c10d.ReduceScatterOptions()
        reduce, factor = self._reduction(opts.reduceOp, outputs[0].dtype)

        def operate(spin: bool) -> None:
            for output, tensors in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, [_flatten(tensor) for tensor in tensors], reduce, factor, spin)

        return self._do("reduce_scatter", operate, outputs, opts)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        """Set `output` to this worker's part of the reduction of everybody's `tensor`."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """The same for several tensors."""
        if outputs[0].is_cuda:
            return self._cuda().reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        opts = opts or c10d.ReduceScatterOptions()
        reduce, factor = self._reduction(opts.reduceOp, outputs[0].dtype)
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_row("reduce_scatter_tensor", tensor, output)

        def operate(spin: bool) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, _flatten(tensor).chunk(self._size), reduce, factor, spin)

        return self._do("reduce_scatter_tensor", operate, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, output: Tensor, pieces: Sequence[Tensor], reduce: Reduction, factor: Any, spin: bool
    ) -> None:
        if factor is not None:
            pieces = [piece * factor for piece in pieces]
        flat = _flatten(output)
        pieces = [arithmetic(piece) for piece in pieces] or [arithmetic(flat)] * self._size
        self._collectives.reduce_scatter(arithmetic(flat), pieces, reduce, spin=spin)
        _write_back(flat, output)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """Set the root's outputs to what everybody has as input."""
        if inputs[0].is_cuda:
            return self._cuda().gather(outputs, inputs, opts)

        def operate(spin: bool) -> None:
            outs = outputs[0] if opts.rootRank == self._rank else []
            flats = [_flatten(out) for out in outs]
            self._collectives.gather(flats, _flatten(inputs[0]), opts.rootRank, spin=spin)
            for flat, out in zip(flats, outs, strict=True):
                _write_back(flat, out)

        return self._do("gather", operate, outputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Set everybody's output to the root's input for it."""
        if outputs[0].is_cuda:
            return self._cuda().scatter(outputs, inputs, opts)

        def operate(spin: bool) -> None:
            pieces = inputs[0] if opts.rootRank == self._rank else []
            flat = _flatten(outputs[0])
            self._collectives.scatter(flat, [_flatten(piece) for piece in pieces], opts.rootRank, spin=spin)
            _write_back(flat, outputs[0])

        return self._do("scatter", operate, outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Set output s to what worker s has as the input for this one."""
        if outputs[0].is_cuda:
            return self._cuda().alltoall(outputs, inputs, opts)
        opts = opts or c10d.AllToAllOptions()

        def operate(spin: bool) -> None:
            flats = [_flatten(out) for out in outputs]
            self._collectives.all_to_all(flats, [_flatten(tensor) for tensor in inputs], spin=spin)
            for flat, out in zip(flats, outputs, strict=True):
                _write_back(flat, out)

        return self._do("all_to_all", operate, outputs, opts)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> Any:
        """The same with all outputs and all inputs in one tensor each, cut along the first dimension."""
        if output.is_cuda:
            return self._cuda().alltoall_base(output, tensor, output_splits, input_splits, opts)
        opts = opts or c10d.AllToAllOptions()
        out_rows = self._rows("output", output, output_splits)
        in_rows = self._rows("input", tensor, input_splits)

        def operate(spin: bool) -> None:
            flat = _flatten(output)
            outs, pieces = flat.split(out_rows), _flatten(tensor).split(in_rows)
            self._collectives.all_to_all(outs, pieces, spin=spin)
            _write_back(flat, output)

        return self._do("all_to_all_single", operate, [output], opts)

    alltoall_base = all_to_all_single

    # Messages

    def send(self, tensors: list[Tensor], target: int, tag: int = 0) -> Any:
        """Send to one worker."""
        if tensors[0].is_cuda:
            return self._cuda().send(tensors, target, tag)
        work = ShmWork("send", tensors)
        self._mail.send(as_bytes(_flatten(tensors[0])), target, tag, work)
        return self._collect(work)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Any:
        """Receive from one worker."""
        if tensors[0].is_cuda:
            return self._cuda().recv(tensors, source, tag)
        flat = _flatten(tensors[0])
        work = ShmWork("recv", tensors, before=lambda: _write_back(flat, tensors[0]))
        self._mail.receive(as_bytes(flat), source, tag, work)
        return self._collect(work)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive from whoever sends first."""
        return self.recv(tensors, ANYBODY, tag)

    def _collect(self, work: ShmWork) -> ShmWork:
        if self._coalescing is not None:
            self._coalescing.append(work)
        return work

    # Devices and arguments

    def _check_row(self, name: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self._size or whole.dtype != part.dtype:
            raise UsageError(
                f"{name}: the tensor of {whole.numel()} x {whole.dtype} must have {self._size} times the elements of "
                f"the one of {part.numel()} x {part.dtype}, one part per worker, and the same dtype."
            )

    def _rows(self, which: str, tensor: Tensor, splits: list[int]) -> list[int]:
        """Elements for each worker."""
        rows = tensor.size(0) if tensor.dim() else tensor.numel()
        counts = list(splits) or [rows // self._size] * self._size
        if len(counts) != self._size or sum(counts) != rows:
            raise UsageError(
                f"all_to_all_single: {which} has {rows} rows, which the splits {counts} for {self._size} workers do "
                "not add up to."
            )
        width = tensor.numel() // rows if rows else 0
        return [count * width for count in counts]

    def _cuda(self) -> Any:
        """The NCCL backend that carries CUDA tensors of this group, opened when the first one comes."""
        if self._nccl is None:
            nccl = getattr(dist, "ProcessGroupNCCL", None)
            if nccl is None or not torch.cuda.is_available():
                raise UsageError("backend shm carries tensors in host memory, and NCCL is not there for CUDA tensors.")
            options = nccl.Options()
            options._timeout = self._board.timeout
            self._nccl = nccl(dist.PrefixStore("nccl", self._store), self._rank, self._size, options)
        return self._nccl

    def _reduction(self, op: Any, dtype: torch.dtype) -> tuple[Reduction, Any]:
        """The reduction that torch calls `op`, and the factor of a premultiplied sum."""
        kind = getattr(op, "op", op)
        key = (kind.value, dtype)
        found = self._reductions.get(key)
        if found is None:
            found = self._reductions[key] = reductions.reduction(kind, dtype, self._size)
        return found, op.__getstate__()[1] if kind.value == PREMUL_SUM else None


def _close(group: "weakref.ref[ShmGroup]") -> None:
    """Let the threads of a group that was never destroyed end before the interpreter does."""
    alive = group()
    if alive is not None:
        with contextlib.suppress(Exception):
            alive.shutdown()


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
