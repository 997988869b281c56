"""Who owns what of a flat buffer that is split over the workers. Pure; needs no process.

A buffer is cut into one span per worker, whatever tensors lie in it: all spans are equally long, and a tensor may lie
in several. That is right for an optimizer that works element by element. For one that looks at whole tensors, spans
end where tensors end, as near to equal as that allows. A tensor's elements within a span are a fragment.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.replica.layout import BucketPlan

UNIT_NUMEL = 65536
"""Elements in a unit of a tensor, the last one aside: torch's multi-tensor kernels take as many at a time."""


@dataclass(frozen=True, slots=True)
class Span:
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
    """The parameter's number in registration order."""
    span: Span
    """Where it lies in the flat buffer."""
    offset: int
    """Its first element's number among the parameter's own."""


def equal_spans(plan: BucketPlan, size: int) -> list[Span]:
    """Spans of one length; the plan was made for `size` parts."""
    length = plan.tail_offset // size
    assert length * size == plan.tail_offset
    return [Span(rank * length, (rank + 1) * length) for rank in range(size)]


def whole_tensor_spans(plan: BucketPlan, size: int) -> list[Span]:
    """Spans that end where tensors end."""
    return _spans_between([slot.offset for slot in plan.slots], plan, size)


def unit_spans(plan: BucketPlan, size: int) -> list[Span]:
    """Spans that hold whole units of tensors: what one holds of a tensor begins at a multiple of UNIT_NUMEL of it.

    So whatever is computed unit by unit comes out the same for any number of workers and any layout.
    """
    borders = [
        offset for slot in plan.slots for offset in range(slot.offset, slot.offset + max(slot.numel, 1), UNIT_NUMEL)
    ]
    return _spans_between(borders, plan, size)


def _spans_between(borders: Sequence[int], plan: BucketPlan, size: int) -> list[Span]:
    """Spans that begin at `borders`: each cut is the border that is nearest to the equal one."""
    borders = [*borders, plan.tail_offset]
    cuts = [0]
    for rank in range(1, size):
        wanted = plan.tail_offset * rank // size
        cuts.append(max(cuts[-1], min(borders, key=lambda border: (abs(border - wanted), border))))
    cuts.append(plan.tail_offset)
    return [Span(begin, end) for begin, end in itertools.pairwise(cuts)]


def fragments(plan: BucketPlan, span: Span) -> list[Fragment]:
    """What `span` holds, tensor by tensor."""
    found = []
    for slot in plan.slots:
        begin, end = max(slot.offset, span.begin), min(slot.offset + slot.numel, span.end)
        if begin < end:
            found.append(Fragment(slot.index, Span(begin, end), begin - slot.offset))
    return found


def are_equal(spans: Sequence[Span]) -> bool:
    """Whether all spans have one length."""
    return len({span.numel for span in spans}) == 1
