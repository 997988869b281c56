"""From parameters to buckets: which gradient lies where in which flat buffer. Pure; needs no process.

Buckets are filled in the order in which gradients are expected, one open bucket per device and dtype: the first of
each kind small, so that the first message leaves early, and the last ones too, so that little is left to wait for.
Every tensor starts on a 128-byte boundary. The last bucket to be launched closes the step: it also carries a tail of
numbers about the step itself.

Who owns what of a buffer that is split over the workers: it is cut into one span per worker, whatever tensors lie in
it. All spans are equally long, and a tensor may lie in several: that is right for an optimizer that works element by
element. For one that looks at whole tensors, spans end where tensors end, as near to equal as that allows. A tensor's
elements within a span are a fragment.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.replica.granularity import USUAL, Granularity, fill

ALIGNMENT_BYTES = 128
"""Two of the widest vectors: torch's loops take two at a time, and what is left over goes another way."""

EXACT_COUNTERS = (torch.float32, torch.float64)
"""Dtypes in which sums of marks and weights over the workers lose nothing that matters."""


@dataclass(frozen=True, slots=True)
class LayoutRules:
    """What a placement asks of the layout."""

    device: torch.device
    """Where parameters are put that are nowhere yet."""
    parts: int = 1
    """Into how many equal parts a bucket must fall."""
    part_grain: int = 1
    """Each of them is a multiple of so many elements."""
    is_fixed: bool = False
    """Whether parameters keep the places they were first given."""
    grads_dtype: torch.dtype | None = None
    """In which real gradients travel; None for that of their parameters."""
    tail_cap_bytes: int = sys.maxsize
    """Most bytes of a bucket that carries the notes besides its gradients."""
    blocks: Sequence[int] = ()
    """For each parameter the block whose bucket it must be in, -1 for none; empty if there are no blocks."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the layout needs to know of one parameter."""

    index: int
    numel: int
    """Real numbers in it: a complex one counts twice."""
    dtype: torch.dtype
    """Real dtype of its gradient."""
    device: torch.device
    block: int = -1
    """The block whose parameters must lie in a bucket of their own; -1 for none."""
    strides: tuple[int, ...] = ()
    """As it is to lie in its slot, which they cover without gaps."""
    rounds_from: torch.dtype | None = None
    """Real dtype of the parameter, where its gradient has another one there."""

    @property
    def num_bytes(self) -> int:
        """What it takes in a bucket, without padding."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a bucket, in elements."""

    index: int
    offset: int
    numel: int
    strides: tuple[int, ...] = ()
    """Of the parameter there: dense ones keep their memory format, whatever it is."""


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One flat buffer."""

    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    tail_offset: int
    """End of the gradients, aligned; what follows is the tail."""
    tail_numel: int = 0
    is_last: bool = False
    """Whether no bucket with gradients follows."""
    rounds_from: torch.dtype | None = None
    """Real dtype of its parameters, where that is another one."""

    @property
    def params_dtype(self) -> torch.dtype:
        """Real dtype of its parameters."""
        return self.rounds_from or self.dtype

    @property
    def numel(self) -> int:
        """Length of the flat buffer."""
        return self.tail_offset + self.tail_numel


def aligned(numel: int, dtype: torch.dtype, grain: int = 1) -> int:
    """`numel` rounded up so that what follows starts on a 128-byte boundary, and is a multiple of `grain`."""
    step = math.lcm(max(1, ALIGNMENT_BYTES // dtype.itemsize), grain)
    return -(-numel // step) * step


def plan(
    specs: Sequence[ParamSpec],
    *,
    tail_numel: int,
    tail_alone: bool = False,
    tail_cap_bytes: int = sys.maxsize,
    grain: Granularity = USUAL,
    parts: int = 1,
    part_grain: int = 1,
) -> tuple[BucketPlan, ...]:
    """Buckets in launch order, for gradients expected in the order of `specs`.

    The last bucket carries a tail of `tail_numel` elements; it is one without gradients where `tail_alone` asks for it,
    where the last one with gradients has more than `tail_cap_bytes` or is some block's, or where its dtype cannot count
    exactly. Gradients end where `parts` equal parts of them begin on 128-byte boundaries and at multiples of
    `part_grain`.
    """
    groups = _fill(specs, grain)
    last_arrival = {spec.index: place for place, spec in enumerate(specs)}
    groups.sort(key=lambda group: max(last_arrival[spec.index] for spec in group))
    buckets = [_lay_out(group, parts, part_grain) for group in groups]
    if buckets:
        buckets[-1] = replace(buckets[-1], is_last=True)
    if tail_alone or not buckets or not _can_carry_tail(groups[-1], tail_cap_bytes):
        device = buckets[-1].device if buckets else torch.device("cpu")
        dtypes = {bucket.dtype for bucket in buckets}  # Weights are to be as exact as what they weigh.
        buckets.append(BucketPlan(torch.float64 if torch.float64 in dtypes else torch.float32, device, (), 0))
    closing = buckets[-1]
    buckets[-1] = replace(closing, tail_numel=aligned(tail_numel, closing.dtype))
    return tuple(buckets)


def _can_carry_tail(group: Sequence[ParamSpec], cap_bytes: int) -> bool:
    return (
        group[0].dtype in EXACT_COUNTERS and group[0].block < 0 and sum(spec.num_bytes for spec in group) <= cap_bytes
    )


def _fill(specs: Sequence[ParamSpec], grain: Granularity) -> list[list[ParamSpec]]:
    """Group the parameters of each device and dtype, in order, closing a group when it reaches its cap."""
    kinds: dict[tuple[Any, ...], list[ParamSpec]] = {}
    blocks: dict[tuple[Any, ...], list[ParamSpec]] = {}
    for spec in specs:
        kind = (spec.device, spec.dtype, spec.rounds_from)
        if spec.block >= 0:
            blocks.setdefault((spec.block, *kind), []).append(spec)
        else:
            kinds.setdefault(kind, []).append(spec)
    free = [group for kind in kinds.values() for group in _fill_kind(kind, grain)]
    return [*blocks.values(), *free]


def _fill_kind(specs: Sequence[ParamSpec], grain: Granularity) -> Iterator[list[ParamSpec]]:
    """Groups as `granularity.fill` cuts them."""
    begin = 0
    for end in fill([spec.num_bytes for spec in specs], grain):
        yield list(specs[begin:end])
        begin = end


def _lay_out(group: Sequence[ParamSpec], parts: int, part_grain: int) -> BucketPlan:
    slots = []
    offset = 0
    for spec in group:
        slots.append(Slot(spec.index, offset, spec.numel, spec.strides))
        offset += aligned(spec.numel, spec.dtype)
    first = group[0]
    part = aligned(-(-offset // parts), first.dtype, part_grain)
    return BucketPlan(first.dtype, first.device, tuple(slots), part * parts, rounds_from=first.rounds_from)


UNIT_NUMEL = 65536
"""Elements in a unit of a tensor, the last one aside: torch's multi-tensor kernels take as many at a time."""


@dataclass(frozen=True, slots=True)
class FlatSpan:
    """Elements `begin` to `end` of a flat buffer."""

    begin: int
    end: int

    @property
    def numel(self) -> int:
        """How many there are."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Fragment:
    """What one span holds of one parameter."""

    index: int
    span: FlatSpan
    offset: int
    """Its first element's number among the parameter's own, as they lie in memory."""
    strides: tuple[int, ...] = ()


def equal_spans(plan: BucketPlan, size: int) -> list[FlatSpan]:
    """Spans of one length; the plan was made for `size` parts."""
    length = plan.tail_offset // size
    assert length * size == plan.tail_offset
    return [FlatSpan(rank * length, (rank + 1) * length) for rank in range(size)]


def whole_tensor_spans(plan: BucketPlan, size: int) -> list[FlatSpan]:
    """Spans that end where tensors end."""
    return _spans_between([slot.offset for slot in plan.slots], plan, size)


def unit_spans(plan: BucketPlan, size: int) -> list[FlatSpan]:
    """Spans that hold whole units of tensors: what one holds of a tensor begins at a multiple of UNIT_NUMEL of it.

    So whatever is computed unit by unit comes out the same for any number of workers and any layout.
    """
    borders = [
        offset for slot in plan.slots for offset in range(slot.offset, slot.offset + max(slot.numel, 1), UNIT_NUMEL)
    ]
    return _spans_between(borders, plan, size)


def _spans_between(borders: Sequence[int], plan: BucketPlan, size: int) -> list[FlatSpan]:
    """Spans that begin at `borders`: each cut is the border that is nearest to the equal one."""
    borders = [*borders, plan.tail_offset]
    cuts = [0]
    for rank in range(1, size):
        wanted = plan.tail_offset * rank // size
        cuts.append(max(cuts[-1], min(borders, key=lambda border: (abs(border - wanted), border))))
    cuts.append(plan.tail_offset)
    return [FlatSpan(begin, end) for begin, end in itertools.pairwise(cuts)]


def fragments(plan: BucketPlan, span: FlatSpan) -> list[Fragment]:
    """What `span` holds, tensor by tensor."""
    found = []
    for slot in plan.slots:
        begin, end = max(slot.offset, span.begin), min(slot.offset + slot.numel, span.end)
        if begin < end:
            found.append(Fragment(slot.index, FlatSpan(begin, end), begin - slot.offset, slot.strides))
    return found


def are_equal(spans: Sequence[FlatSpan]) -> bool:
    """Whether all spans have one length."""
    return len({span.numel for span in spans}) == 1


def view_of(flat: Tensor, slot: Slot, param: Tensor) -> Tensor:
    """The slot as a tensor of the shape of `param`.

    With the slot's strides and not those that `param` has now: one that is not there (zero=3) has none that count.
    """
    return _strided(flat[slot.offset : slot.offset + slot.numel], param, slot.strides)


def view_like(flat: Tensor, offset: int, param: Tensor) -> Tensor:
    """What begins at `offset` as a tensor like `param`, with its strides where they cover it densely."""
    return _strided(flat[offset : offset + num_reals(param)], param, strides_of(param))


def _strided(piece: Tensor, param: Tensor, strides: Sequence[int]) -> Tensor:
    if param.is_complex():
        piece = torch.view_as_complex(piece.view(-1, 2))
    return piece.as_strided(param.size(), strides, piece.storage_offset())


def num_reals(param: Tensor) -> int:
    """Real numbers in it: a complex one counts twice."""
    return param.numel() * (2 if param.is_complex() else 1)


def strides_of(param: Tensor) -> tuple[int, ...]:
    """How `param` lies in a slot: as it lies now, row by row where there are gaps."""
    return param.stride() if is_dense(param) else tuple(torch.empty(param.shape, device="meta").stride())


def plan_for(tensors: Sequence[Tensor], grain: Granularity, parts: int = 1) -> list[BucketPlan]:
    """Buckets for tensors like these, in their order and without a tail."""
    specs = [
        ParamSpec(index, num_reals(tensor), tensor.dtype.to_real(), tensor.device, strides=strides_of(tensor))
        for index, tensor in enumerate(tensors)
    ]
    return [each for each in plan(specs, tail_numel=0, grain=grain, parts=parts) if each.slots]


def memory_order(strides: Sequence[int]) -> list[int]:
    """The dimensions of a dense tensor as they lie in memory, that of the largest stride first."""
    return sorted(range(len(strides)), key=strides.__getitem__, reverse=True)


def in_memory_order(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """The elements of `tensor`, flat and real, in the order in which a slot of `strides` has them."""
    permuted = tensor.permute(memory_order(strides))
    return (torch.view_as_real(permuted) if tensor.is_complex() else permuted).reshape(-1)


def is_dense(param: Tensor) -> bool:
    """Whether the strides, in some order of the dimensions, cover the memory without gaps or overlap."""
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def overlaps(param: Tensor) -> bool:
    """Whether several elements may lie in one place."""
    extent = 0
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if stride <= extent:
                return True
            extent += stride * (size - 1)
    return False
