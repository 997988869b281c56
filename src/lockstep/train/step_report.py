"""What the workers tell each other of a step, in one small message: the shards' losses and weights, the gradients'
norms, and how many samples each was given.

Every number has one place in a row and one worker that writes it there; the others leave a zero. So the sum over the
workers is exact, whatever their number, and what is computed from the row is computed alike by all.

Norms are those of units: runs of at most UNIT_NUMEL elements of one parameter, which no cut between workers divides. A
worker computes those of its part, or its share of all where every worker has all gradients. So the norm of the whole
has the same bits however gradients are split.

All workers see what cannot be right: weights that are no counts, batches of different lengths. On a CPU that voids
the step. On a GPU the host would have to wait for it: there it is looked at when the next but one begins, and raises.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import torch_private
from lockstep.comm.tree import run
from lockstep.errors import UsageError
from lockstep.replica.layout import UNIT_NUMEL, is_dense
from lockstep.replica.params import Owned
from lockstep.train.strategy import ShardLoss, mean_loss
from lockstep.world import World

GradPiece = tuple[int, Tensor]
"""Number of the first unit, and the gradient's elements from that unit on, flat."""

BLOCK = 4096
"""Values that a program of the kernel reads at a time."""
MOST_TABLES = 8
"""Where gradients lie follows from how the steps before went; some such places are remembered."""
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class StepReport:
    """The row of one step."""

    def __init__(
        self, world: World, shards: int, params: Sequence[nn.Parameter], wants_change: Callable[[], bool]
    ) -> None:
        self._world, self._wants_change = world, wants_change
        self._units = UnitNorms(params, world.rank, world.size)
        sizes = [shards, shards, world.size, 1, 2, world.size, self._units.total]
        self._row = torch.zeros(sum(sizes), dtype=torch.float64, device=world.device)
        parts = self._row.split(sizes)
        self._losses, self._weights, self._totals, self._wishes, self._kinds, self._times, self._norms = parts
        self._checked = self._row[shards : 2 * shards + world.size + 3]
        """Weights, totals, wishes, and of how many shards `loss_fn` gave no weight, and one."""
        self.is_change_due = False
        """Whether a worker has told all that it wants another world, by now or two steps ago on a GPU."""
        self._unread: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        """What is checked of the last steps, on its way to the host."""

    def begin(self, total: int) -> None:
        """A step begins, of a global batch of so many samples."""
        if len(self._unread) > 1:
            arrived, checked = self._unread.popleft()
            arrived.synchronize()
            self._look(checked)
        self._row.zero_()
        self._totals[self._world.rank].fill_(total)
        self._wishes.fill_(float(self._wants_change()))

    def add(self, shard: int, loss: ShardLoss) -> None:
        """What this worker's `shard` gave."""
        self._losses[shard].copy_(loss.value.detach().reshape(()))
        if isinstance(loss.weight, Tensor):
            self._weights[shard].copy_(loss.weight)
        else:
            self._weights[shard].fill_(loss.weight)  # An assignment would have the host wait for the device.
        self._kinds[int(loss.is_weighted)].add_(1)

    def took(self, seconds: float) -> None:
        """How long the forward pass of a shard takes this worker."""
        self._times[self._world.rank] = seconds

    @property
    def times(self) -> list[float]:
        """The same of every worker in the last step, 0 where it is not known; on a GPU nobody waits to know."""
        return [0.0] * self._world.size if self._row.is_cuda else self._times.tolist()

    def write_norms(self, parts: Sequence[Owned] | None) -> None:
        """Write the norms of this worker's gradients: of its `parts`, or of its share where nothing is split."""
        self._units.write(parts, self._norms)

    def end(self, parts: Sequence[Owned] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Loss over all shards, their weight, and the norm of the gradients; every worker calls this."""
        self.write_norms(parts)
        if self._world.size > 1:
            group = self._world.host_group if self._row.device.type == "cpu" else self._world.group
            work = dist.all_reduce(self._row, group=group, async_op=True)
            self._world.await_on_device(work, "reporting on a step")
        if self._row.device.type == "cpu":
            self._look(self._checked)
        loss, weight = mean_loss(self._losses, self._weights)
        return loss, weight, torch.linalg.vector_norm(self._norms)

    def look_later(self) -> None:
        """A step has ended: have what is to be checked of it brought to the host."""
        if self._row.is_cuda:
            arrived = torch.cuda.Event()
            checked = torch.empty_like(self._checked, device="cpu", pin_memory=True)
            checked.copy_(self._checked, non_blocking=True)
            arrived.record()
            self._unread.append((arrived, checked))

    def _look(self, checked: Tensor) -> None:
        """See what the workers wish; raise UsageError, on all alike, if the step cannot have been right."""
        numbers, size = checked.tolist(), self._world.size
        weights, totals = numbers[: -size - 3], numbers[-size - 3 : -3]
        wishes, num_plain, num_weighted = numbers[-3:]
        self.is_change_due = wishes > 0
        for rank, total in enumerate(totals):
            if total != totals[0]:
                raise UsageError(
                    f"worker 0 was given a global batch of {int(totals[0])} samples and worker {rank} one of "
                    f"{int(total)}. trainer.step takes the same global batch on every worker, and cuts it: do not "
                    "give it what a sharded loader hands out. trainer.batches makes such batches."
                )
        if num_plain and num_weighted:
            raise UsageError(
                f"loss_fn returned (loss, weight) for {int(num_weighted)} shards of a step and the loss alone for "
                f"{int(num_plain)}, whose weight is then its number of samples: these cannot be compared. Let it "
                "return the same for every shard."
            )
        for shard, weight in enumerate(weights):
            if not 0 <= weight < math.inf:
                raise UsageError(f"loss_fn: weight={weight} of shard {shard}: a weight is a count, zero or more.")


@dataclass(frozen=True, slots=True)
class GradRange:
    """Elements of a gradient, from the begin of a unit on."""

    tensor: Tensor
    """What has the gradient."""
    unit: int
    """Number of the first unit."""
    begin: int
    end: int


class UnitNorms:
    """The norms of the gradients of all units of a model, numbered in the order of its parameters.

    On CUDA one Triton program computes the norm of one unit, whatever the others are. It finds its unit in a table of
    addresses, which is copied to the device when gradients lie elsewhere than in the last steps.
    """

    def __init__(self, params: Sequence[nn.Parameter], rank: int, size: int) -> None:
        self._first: dict[int, int] = {}
        """Number of the first unit of each parameter."""
        self.total = 0
        for param in params:
            self._first[id(param)] = self.total
            self.total += -(-_real(param).numel() // UNIT_NUMEL)
        low, high = run(self.total, size, rank)
        self._share = []
        """What this worker computes where every worker has all gradients."""
        for param in params:
            first, numel = self._first[id(param)], _real(param).numel()
            begin, end = max(0, low - first) * UNIT_NUMEL, min(numel, (high - first) * UNIT_NUMEL)
            if begin < end:
                self._share.append(GradRange(param, max(low, first), begin, end))
        self._tables: dict[Hashable, list[tuple[torch.dtype, Tensor]]] = {}
        """By where the gradients lie; the one used last is at the end."""
        self._recorded: list[Tensor] = []
        """Tables that CUDA graphs read, which are kept as long as these."""

    def write(self, parts: Sequence[Owned] | None, row: Tensor) -> None:
        """Write the norm of each unit of this worker into its place of `row`."""
        ranges = self._share if parts is None else self._owned(parts)
        if row.is_cuda and torch_private.has_triton():
            places = tuple([_place(each.tensor.grad) for each in ranges])
            tables = self._tables.pop(places, None)
            if tables is None:
                pieces = _pieces(ranges)
                if any(flat.dtype not in _KERNEL_DTYPES for _, flat in pieces):
                    return _write_norms(pieces, row)
                tables = [
                    (dtype, _on_device([piece for piece in pieces if piece[1].dtype == dtype], row.device))
                    for dtype in dict.fromkeys(flat.dtype for _, flat in pieces)
                ]
                if not _lie_in_grads(pieces, ranges):  # Copies are gone by the next step.
                    return self._launch(tables, row)
            self._tables[places] = tables
            if len(self._tables) > MOST_TABLES:
                del self._tables[next(iter(self._tables))]
            return self._launch(tables, row)
        return _write_norms(_pieces(ranges), row)

    def _owned(self, parts: Sequence[Owned]) -> list[GradRange]:
        return [
            GradRange(part.own, self._first[id(part.param)] + part.offset // UNIT_NUMEL, 0, _real(part.own).numel())
            for part in parts
        ]

    def _launch(self, tables: Sequence[tuple[torch.dtype, Tensor]], row: Tensor) -> None:
        from lockstep.train import norm_kernel  # Needs Triton.

        for dtype, table in tables:
            if torch.cuda.is_current_stream_capturing():
                self._recorded.append(table)
            addresses, counts, places = table
            spelled: Any = norm_kernel.DTYPES[str(dtype).removeprefix("torch.")]
            with torch.cuda.device(row.device):
                norm_kernel.unit_norms[(len(addresses),)](addresses, counts, places, row, DTYPE=spelled, BLOCK=BLOCK)


def _place(grad: Tensor | None) -> Hashable:
    """Where a gradient lies, and how."""
    return None if grad is None else (grad.data_ptr(), grad.stride(), grad.dtype)


def _pieces(ranges: Sequence[GradRange]) -> list[GradPiece]:
    return [
        (each.unit, _flat(each.tensor.grad, each.tensor)[each.begin : each.end])
        for each in ranges
        if each.tensor.grad is not None
    ]


def _lie_in_grads(pieces: Sequence[GradPiece], ranges: Sequence[GradRange]) -> bool:
    grads = [each.tensor.grad for each in ranges if each.tensor.grad is not None]
    storages = [(flat.untyped_storage(), grad.untyped_storage()) for (_, flat), grad in zip(pieces, grads, strict=True)]
    return all(mine.data_ptr() == its.data_ptr() for mine, its in storages)


def _write_norms(pieces: Sequence[GradPiece], row: Tensor) -> None:
    units = [flat.split(UNIT_NUMEL) for _, flat in pieces]
    if units:
        norms = torch.stack(torch_private.foreach_norm([unit for each in units for unit in each])).to(row.dtype)
        places = [row[first : first + len(each)] for (first, _), each in zip(pieces, units, strict=True)]
        torch_private.foreach_("copy", places, norms.split([len(each) for each in units]))


def _on_device(pieces: Sequence[GradPiece], device: torch.device) -> Tensor:
    """Their `unit_table`."""
    return torch.from_numpy(unit_table(pieces)).pin_memory().to(device, non_blocking=True)


def unit_table(pieces: Sequence[GradPiece]) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
    """Address, number of elements, and place in the row, of each unit."""
    sizes = numpy.array([flat.numel() for _, flat in pieces])
    counts = -(-sizes // UNIT_NUMEL)
    within = numpy.arange(counts.sum()) - numpy.repeat(counts.cumsum() - counts, counts)
    begins = numpy.array([flat.data_ptr() for _, flat in pieces])
    item_bytes = numpy.array([flat.element_size() for _, flat in pieces])
    firsts = numpy.array([first for first, _ in pieces])
    return numpy.stack(
        [
            numpy.repeat(begins, counts) + within * UNIT_NUMEL * numpy.repeat(item_bytes, counts),
            numpy.minimum(UNIT_NUMEL, numpy.repeat(sizes, counts) - within * UNIT_NUMEL),
            numpy.repeat(firsts, counts) + within,
        ]
    ).astype(numpy.int64)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(grad: Tensor, param: Tensor) -> Tensor:
    """The gradient's elements in the order in which the parameter has them in memory."""
    if not is_dense(param):
        return _real(grad).reshape(-1)
    if grad.stride() != param.stride():
        grad = torch.empty_like(param).copy_(grad)
    grad = _real(grad)
    return grad.view(-1) if grad.is_contiguous() else grad.as_strided((grad.numel(),), (1,), grad.storage_offset())
