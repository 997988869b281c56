"""From parameters to buckets: which gradient lies where in which flat buffer. Pure; needs no process.

Buckets are filled in the order in which gradients are expected, one open bucket per device and dtype: the first of
each kind small, so that the first message leaves early, and the last ones too, so that little is left to wait for.
Every tensor starts on a 128-byte boundary. The last bucket to be launched closes the step: it also carries a tail of
numbers about the step itself.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

ALIGNMENT_BYTES = 128
"""Two of the widest vectors: torch's loops take two at a time, and what is left over goes another way."""
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
"""What torch DDP uses too."""

SHARE_OF_REST = 6
"""A bucket takes at most one in so many bytes of what is left, so that a slow link is never without work for long."""
ALL_OF_REST = 1
"""The same within a host, where more messages hide little: through memory they cost time of the same cores."""
LARGE_BUCKET_BYTES = 100 << 20
"""On GPUs, where a message costs their time: what grows to it and shrinks again leaves early and ends soon."""
GROWTH = 4
"""There a bucket is at most so many times as large as the one before it."""
HALF_OF_REST = 2
"""What is left shrinks there by halves, within a host: few messages more, and the last one is small."""

EXACT_COUNTERS = (torch.float32, torch.float64)
"""Dtypes in which sums of marks and weights over the workers lose nothing that matters."""


@dataclass(frozen=True, slots=True)
class Granularity:
    """How finely gradients are cut into buckets."""

    cap_bytes: int = BUCKET_BYTES
    """The size of a bucket."""
    share_of_rest: int = SHARE_OF_REST
    """A bucket takes at most one in so many bytes of what is left."""
    first_cap_bytes: int = FIRST_BUCKET_BYTES
    """The size of the first one."""
    growth: int | None = None
    """How many times as large as the one before it a bucket may be; None for as large as can be."""
    leaves_early: bool = True
    """Whether a bucket leaves when it is full, and not at the end of the pass."""


USUAL = Granularity()
UNCUT = Granularity(cap_bytes=sys.maxsize, share_of_rest=ALL_OF_REST, first_cap_bytes=sys.maxsize, leaves_early=False)
"""One bucket for each dtype and device."""
LATE = Granularity(share_of_rest=ALL_OF_REST, first_cap_bytes=BUCKET_BYTES, leaves_early=False)
"""As few as buckets of the usual size can be, where none of them need leave early."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """What the layout needs to know of one parameter."""

    index: int
    """Its number in registration order."""
    numel: int
    """Real numbers in it: a complex one counts twice."""
    dtype: torch.dtype
    """Real dtype of its gradient."""
    device: torch.device
    block: int = -1
    """The block whose parameters must lie in a bucket of their own; -1 for none."""

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


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One flat buffer."""

    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    tail_offset: int
    """End of the gradients, aligned; what follows is the tail."""
    tail_numel: int = 0

    @property
    def numel(self) -> int:
        """Length of the flat buffer."""
        return self.tail_offset + self.tail_numel


def aligned(numel: int, dtype: torch.dtype) -> int:
    """`numel` rounded up so that what follows starts on a 128-byte boundary."""
    step = max(1, ALIGNMENT_BYTES // dtype.itemsize)
    return -(-numel // step) * step


def plan(
    specs: Sequence[ParamSpec],
    *,
    tail_numel: int,
    tail_alone: bool = False,
    tail_cap_bytes: int = sys.maxsize,
    grain: Granularity = USUAL,
    parts: int = 1,
) -> tuple[BucketPlan, ...]:
    """Buckets in launch order, for gradients expected in the order of `specs`.

    The last bucket carries a tail of `tail_numel` elements; it is one without gradients where `tail_alone` asks for it,
    where the last one with gradients has more than `tail_cap_bytes` or is some block's, or where its dtype cannot count
    exactly. Gradients end where `parts` equal parts of them begin on 128-byte boundaries.
    """
    groups = _fill(specs, grain)
    last_arrival = {spec.index: place for place, spec in enumerate(specs)}
    groups.sort(key=lambda group: max(last_arrival[spec.index] for spec in group))
    buckets = [_lay_out(group, parts) for group in groups]
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
    kinds: dict[tuple[torch.device, torch.dtype], list[ParamSpec]] = {}
    blocks: dict[tuple[int, torch.device, torch.dtype], list[ParamSpec]] = {}
    for spec in specs:
        if spec.block >= 0:
            blocks.setdefault((spec.block, spec.device, spec.dtype), []).append(spec)
        else:
            kinds.setdefault((spec.device, spec.dtype), []).append(spec)
    free = [group for kind in kinds.values() for group in _fill_kind(kind, grain)]
    return [*blocks.values(), *free]


def _fill_kind(specs: Sequence[ParamSpec], grain: Granularity) -> Iterator[list[ParamSpec]]:
    """Groups of about the cap, the first one small; towards the end each takes a share of what is left.

    The last bucket is complete only when the backward pass ends, so nothing hides it: the smaller, the better. For
    the same reason a tensor larger than a bucket, such as an embedding, does not keep smaller ones waiting.
    """
    left = sum(spec.num_bytes for spec in specs)
    first = min(grain.first_cap_bytes, grain.cap_bytes)
    cap, large = first, grain.cap_bytes
    group: list[ParamSpec] = []
    size = 0
    for spec in specs:
        if group and (spec.num_bytes >= large or size >= cap):
            yield group
            left -= size
            grown = grain.cap_bytes if grain.growth is None else min(grain.cap_bytes, size * grain.growth)
            cap = large = min(max(grown, first), max(left // grain.share_of_rest, first))
            group, size = [], 0
        group.append(spec)
        size += spec.num_bytes
    if group:
        yield group


def _lay_out(group: Sequence[ParamSpec], parts: int) -> BucketPlan:
    slots = []
    offset = 0
    for spec in group:
        slots.append(Slot(spec.index, offset, spec.numel))
        offset += aligned(spec.numel, spec.dtype)
    part = aligned(-(-offset // parts), group[0].dtype)
    return BucketPlan(group[0].dtype, group[0].device, tuple(slots), part * parts)
