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
from collections.abc import Callable, Hashable, Iterator, Sequence
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

BLOCK = 4096
"""Values that a program of the kernel reads at a time."""
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
        self._losses, self._weights, _, _, _, self._times, self._norms = self._row.split(sizes)
        self._known_part = self._row[shards : 2 * shards + 2 * world.size + 3]
        """Weights, totals, wishes, kinds and times: what the host knows, which is written by one copy."""
        self._known: list[float] = []
        self._weight_tensors: dict[int, Tensor] = {}
        """Weights that a GPU alone knows, by shard."""
        self._total_at = shards + world.rank
        self._kinds_at = shards + world.size + 1
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
        self._weight_tensors.clear()
        self._known = [0.0] * self._known_part.numel()
        self._known[self._total_at] = total
        self._known[self._kinds_at - 1] = self._wants_change()

    def add(self, shard: int, loss: ShardLoss) -> None:
        """What this worker's `shard` gave."""
        self._losses[shard].copy_(loss.value.detach().reshape(()))
        if isinstance(loss.weight, Tensor):
            self._weight_tensors[shard] = loss.weight
        else:
            self._known[shard] = loss.weight
        self._known[self._kinds_at + loss.is_weighted] += 1

    def took(self, seconds: float) -> None:
        """How long the forward pass of a shard takes this worker."""
        self._known[self._kinds_at + 2 + self._world.rank] = seconds

    def write_known(self) -> None:
        """All passes are done: bring what is known of them into the row."""
        values = torch.tensor(self._known, dtype=torch.float64, pin_memory=self._row.is_cuda)
        self._known_part.copy_(values, non_blocking=True)
        for shard, weight in self._weight_tensors.items():
            self._weights[shard].copy_(weight)

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
            if self._world.generations is not None:
                self._world.await_device("reporting on a step")
        if self._row.device.type == "cpu":
            self._look(self._checked)
        loss, weight = mean_loss(self._losses, self._weights)
        return loss, weight, torch.linalg.vector_norm(self._norms)

    def look_later(self) -> None:
        """A step has ended: have what is to be checked of it brought to the host."""
        if self._row.is_cuda and (self._world.size > 1 or self._weight_tensors):  # Else the host knows all of it.
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

    On CUDA one Triton program computes the norm of one unit, whatever the others are. It finds its unit by a table,
    which is made anew when gradients lie otherwise, and by where the gradients begin, which is copied to the device
    when they lie elsewhere than in the last step.
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
        self._table: tuple[Hashable, UnitTable | None] = None, None
        """The last one, and the layout of the gradients that it is for."""
        self._begins: tuple[list[int], Tensor | None] = [], None
        """Where the gradients began in the last step: addresses, and these on the device."""
        self._recorded: list[object] = []
        """What CUDA graphs read, which is kept as long as these."""

    def write(self, parts: Sequence[Owned] | None, row: Tensor) -> None:
        """Write the norm of each unit of this worker into its place of `row`."""
        ranges = self._share if parts is None else self._owned(parts)
        table = self._table_of(ranges, row.device) if row.is_cuda and torch_private.has_triton() else None
        if table is None:
            _write_norms(ranges, row)
            return
        held = [grad if is_there else _flat(grad, tensor) for grad, tensor, is_there in table.sources(ranges)]
        self._launch(table, [each.data_ptr() for each in held], row)

    def _owned(self, parts: Sequence[Owned]) -> list[GradRange]:
        return [
            GradRange(part.own, self._first[id(part.param)] + part.offset // UNIT_NUMEL, 0, _real(part.own).numel())
            for part in parts
        ]

    def _table_of(self, ranges: Sequence[GradRange], device: torch.device) -> "UnitTable | None":
        """None where the kernel knows no such numbers."""
        grads = [each.tensor.grad for each in ranges]
        layout = tuple([None if grad is None else (grad.dtype, grad.stride()) for grad in grads])
        if layout != self._table[0]:
            knows_all = all(_real(grad).dtype in _KERNEL_DTYPES for grad in grads if grad is not None)
            self._table = layout, UnitTable(ranges, device) if knows_all else None
        return self._table[1]

    def _launch(self, table: "UnitTable", begins: list[int], row: Tensor) -> None:
        from lockstep.train import norm_kernel  # Needs Triton.

        if begins != self._begins[0] or self._begins[1] is None:
            on_host = torch.tensor(begins, dtype=torch.int64, pin_memory=True)
            self._begins = begins, on_host.to(row.device, non_blocking=True)
        if torch.cuda.is_current_stream_capturing():
            self._recorded += (table, self._begins)
        for dtype, units in table.by_dtype.items():
            spelled: Any = norm_kernel.DTYPES[str(dtype).removeprefix("torch.")]
            with torch.cuda.device(row.device):
                norm_kernel.unit_norms[(units.shape[1],)](self._begins[1], *units, row, DTYPE=spelled, BLOCK=BLOCK)


class UnitTable:
    """Where the units of some gradients are: for one layout of these, wherever they lie."""

    def __init__(self, ranges: Sequence[GradRange], device: torch.device) -> None:
        present = [each for each in ranges if each.tensor.grad is not None]
        flats = [_flat(grad, each.tensor) for each in present if (grad := each.tensor.grad) is not None]
        self._are_there = [
            flat.data_ptr() == each.tensor.grad.data_ptr()  # type: ignore[union-attr]  # Those that are present.
            for flat, each in zip(flats, present, strict=True)
        ]
        """Of each gradient whether the kernel can read it where it is: else it reads a copy."""
        self.by_dtype: dict[torch.dtype, Tensor] = {}
        """Rows of `unit_table`, on the device."""
        for dtype in dict.fromkeys(flat.dtype for flat in flats):
            numbers = [number for number, flat in enumerate(flats) if flat.dtype == dtype]
            table = unit_table(numbers, [present[number] for number in numbers], dtype.itemsize)
            self.by_dtype[dtype] = torch.from_numpy(table).pin_memory().to(device, non_blocking=True)

    def sources(self, ranges: Sequence[GradRange]) -> Iterator[tuple[Tensor, Tensor, bool]]:
        """Gradient, what has it, and whether it can be read where it is, of those that there are."""
        present = (each.tensor for each in ranges if each.tensor.grad is not None)
        for tensor, is_there in zip(present, self._are_there, strict=True):
            assert tensor.grad is not None
            yield tensor.grad, tensor, is_there


def unit_table(
    numbers: Sequence[int], ranges: Sequence[GradRange], item_bytes: int
) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
    """Of each unit: the number of its gradient, how many bytes it begins behind that, how many elements it has, and its
    place in the row."""
    sizes = numpy.array([each.end - each.begin for each in ranges])
    counts = -(-sizes // UNIT_NUMEL)
    within = numpy.arange(counts.sum()) - numpy.repeat(counts.cumsum() - counts, counts)
    begins = numpy.array([each.begin for each in ranges])
    return numpy.stack(
        [
            numpy.repeat(numpy.array(numbers), counts),
            (numpy.repeat(begins, counts) + within * UNIT_NUMEL) * item_bytes,
            numpy.minimum(UNIT_NUMEL, numpy.repeat(sizes, counts) - within * UNIT_NUMEL),
            numpy.repeat(numpy.array([each.unit for each in ranges]), counts) + within,
        ]
    ).astype(numpy.int64)


def _write_norms(ranges: Sequence[GradRange], row: Tensor) -> None:
    flats = [
        (each.unit, _flat(each.tensor.grad, each.tensor)[each.begin : each.end])
        for each in ranges
        if each.tensor.grad is not None
    ]
    units = [flat.split(UNIT_NUMEL) for _, flat in flats]
    if units:
        norms = torch.stack(torch_private.foreach_norm([unit for each in units for unit in each])).to(row.dtype)
        places = [row[first : first + len(each)] for (first, _), each in zip(flats, units, strict=True)]
        torch_private.foreach_("copy", places, norms.split([len(each) for each in units]))


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
