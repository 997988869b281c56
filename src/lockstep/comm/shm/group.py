"""The process group that torch gets for `shm`.

torch takes a Python subclass of ProcessGroup for the group itself, so the methods here have torch's names and are
called by `dist.*` directly, and by C++ (DDP's reducer, functional collectives) through torch's own bridge. They
flatten what they are given and have it carried out by `Reductions`, `Moves` or `Mail`: in this thread if the caller
waits anyway and nothing is before it, else as queue.py says. CUDA tensors go to an NCCL backend, opened at the first.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d as c10d

from lockstep.comm.shm.base import GroupBase
from lockstep.comm.shm.mail import ANYBODY
from lockstep.comm.shm.places import as_bytes
from lockstep.comm.shm.reduction import Reduction, arithmetic
from lockstep.comm.shm.work import ShmWork
from lockstep.errors import UsageError


class ShmGroup(GroupBase):
    """A process group in shared memory. Made by torch; collective to make, as every group is."""

    # Collectives, under torch's names

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce each of `tensors` over all workers, in place."""
        if tensors[0].is_cuda:
            return self._cuda().allreduce(tensors, opts)
        opts = opts or c10d.AllreduceOptions()
        reductions = [self._reduction(opts.reduceOp, tensor.dtype) for tensor in tensors]

        def operate() -> None:
            for tensor, (reduce, factor) in zip(tensors, reductions, strict=True):
                flat = _flatten(tensor)
                if factor is not None:
                    flat.mul_(factor)
                self._reducing.all_reduce(arithmetic(flat), reduce)
                _write_back(flat, tensor)

        return self._do("all_reduce", operate, tensors, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Any:
        """Reduce `tensors` over all workers into those of the root."""
        if tensors[0].is_cuda:
            return self._cuda().reduce(tensors, opts)
        reduce, factor = self._reduction(opts.reduceOp, tensors[0].dtype)

        def operate() -> None:
            for tensor in tensors:
                flat = _flatten(tensor) if factor is None else _flatten(tensor) * factor
                self._reducing.reduce(arithmetic(flat), opts.rootRank, reduce)
                if opts.rootRank == self._rank:
                    _write_back(flat, tensor)

        return self._do("reduce", operate, tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Any:
        """Replace everybody's tensors by those of the root."""
        if tensors[0].is_cuda:
            return self._cuda().broadcast(tensors, opts)
        opts = opts or c10d.BroadcastOptions()

        def operate() -> None:
            for tensor in tensors:
                flat = _flatten(tensor)
                self._moving.broadcast(flat, opts.rootRank)
                if opts.rootRank != self._rank:
                    _write_back(flat, tensor)

        return self._do("broadcast", operate, tensors, opts)

    def barrier(self, opts: Any = None) -> Any:
        """Return when everybody has called this."""
        opts = opts or c10d.BarrierOptions()
        return self._do("barrier", lambda: self._reducing.barrier(), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As `barrier`, which names who is missing anyway."""
        self._queue.run("barrier", lambda: self._reducing.barrier(), [])

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        """Set each output list to what everybody has as the input of the same number."""
        if inputs[0].is_cuda:
            return self._cuda().allgather(outputs, inputs, opts)
        opts = opts or c10d.AllgatherOptions()

        def operate() -> None:
            for outs, tensor in zip(outputs, inputs, strict=True):
                flats = [_flatten(out) for out in outs]
                self._moving.all_gather(flats, _flatten(tensor))
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

        def operate() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                flat = _flatten(output)
                self._moving.all_gather(flat.chunk(self._size), _flatten(tensor))
                _write_back(flat, output)

        return self._do("all_gather_into_tensor", operate, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> Any:
        """Set each output to the reduction of everybody's input for this worker."""
        if outputs[0].is_cuda:
            return self._cuda().reduce_scatter(outputs, inputs, opts)
        opts = opts or c10d.ReduceScatterOptions()
        reduce, factor = self._reduction(opts.reduceOp, outputs[0].dtype)

        def operate() -> None:
            for output, tensors in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, [_flatten(tensor) for tensor in tensors], reduce, factor)

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

        def operate() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                self._reduce_scatter(output, _flatten(tensor).chunk(self._size), reduce, factor)

        return self._do("reduce_scatter_tensor", operate, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(self, output: Tensor, pieces: Sequence[Tensor], reduce: Reduction, factor: Any) -> None:
        if factor is not None:
            pieces = [piece * factor for piece in pieces]
        flat = _flatten(output)
        pieces = [arithmetic(piece) for piece in pieces] or [arithmetic(flat)] * self._size
        self._reducing.reduce_scatter(arithmetic(flat), pieces, reduce)
        _write_back(flat, output)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        """Set the root's outputs to what everybody has as input."""
        if inputs[0].is_cuda:
            return self._cuda().gather(outputs, inputs, opts)

        def operate() -> None:
            outs = outputs[0] if opts.rootRank == self._rank else []
            flats = [_flatten(out) for out in outs]
            self._moving.gather(flats, _flatten(inputs[0]), opts.rootRank)
            for flat, out in zip(flats, outs, strict=True):
                _write_back(flat, out)

        return self._do("gather", operate, outputs, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        """Set everybody's output to the root's input for it."""
        if outputs[0].is_cuda:
            return self._cuda().scatter(outputs, inputs, opts)

        def operate() -> None:
            pieces = inputs[0] if opts.rootRank == self._rank else []
            flat = _flatten(outputs[0])
            self._moving.scatter(flat, [_flatten(piece) for piece in pieces], opts.rootRank)
            _write_back(flat, outputs[0])

        return self._do("scatter", operate, outputs, opts)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        """Set output s to what worker s has as the input for this one."""
        if outputs[0].is_cuda:
            return self._cuda().alltoall(outputs, inputs, opts)
        opts = opts or c10d.AllToAllOptions()

        def operate() -> None:
            flats = [_flatten(out) for out in outputs]
            self._moving.all_to_all(flats, [_flatten(tensor) for tensor in inputs])
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

        def operate() -> None:
            flat = _flatten(output)
            outs, pieces = flat.split(out_rows), _flatten(tensor).split(in_rows)
            self._moving.all_to_all(outs, pieces)
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
