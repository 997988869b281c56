"""How large buckets are, and which gradients share one. Pure, and without torch: `lockstep plan` uses it too."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Granularity:
    """How finely gradients are cut into buckets."""

    cap_bytes: int = BUCKET_BYTES
    share_of_rest: int = SHARE_OF_REST
    first_cap_bytes: int = FIRST_BUCKET_BYTES
    growth: int | None = None
    """How many times as large as the one before it a bucket may be; None for as large as can be."""
    leaves_early: bool = True
    """Whether a bucket leaves when it is full, and not at the end of the pass."""


USUAL = Granularity()
UNCUT = Granularity(cap_bytes=sys.maxsize, share_of_rest=ALL_OF_REST, first_cap_bytes=sys.maxsize, leaves_early=False)
LATE = Granularity(share_of_rest=ALL_OF_REST, first_cap_bytes=BUCKET_BYTES, leaves_early=False)
"""As few as buckets of the usual size can be, where none of them need leave early."""


def usual_granularity(
    *, is_on_one_host: bool, is_on_gpu: bool, cap_mb: float | None = None, is_coded: bool = False, zero: int = 0
) -> Granularity:
    """How finely gradients are cut, by the way that they travel; the user's cap counts if given.

    is_coded: whether a wire encodes them, on a GPU.
    """
    # Within a host a message costs more than what a smaller one would hide.
    share = ALL_OF_REST if is_on_one_host or is_coded else SHARE_OF_REST
    if cap_mb is not None:
        return Granularity(int(cap_mb * (1 << 20)), share)
    if is_on_gpu and not is_coded and not zero:
        return Granularity(LARGE_BUCKET_BYTES, max(share, HALF_OF_REST), growth=GROWTH)
    return Granularity(share_of_rest=share)


def fill(num_bytes: Sequence[int], grain: Granularity) -> Iterator[int]:
    """Where buckets end, for gradients of so many bytes in the order in which they are expected.

    Buckets of about the cap, the first one small; towards the end each takes a share of what is left. The last one is
    complete only when the backward pass ends, so nothing hides it: the smaller, the better. For the same reason a
    tensor larger than a bucket, such as an embedding, does not keep smaller ones waiting.
    """
    left = sum(num_bytes)
    first = min(grain.first_cap_bytes, grain.cap_bytes)
    cap, large = first, grain.cap_bytes
    begin = size = 0
    for place, each in enumerate(num_bytes):
        if place > begin and (each >= large or size >= cap):
            yield place
            left -= size
            grown = grain.cap_bytes if grain.growth is None else min(grain.cap_bytes, size * grain.growth)
            cap = large = min(max(grown, first), max(left // grain.share_of_rest, first))
            begin, size = place, 0
        size += each
    if len(num_bytes) > begin:
        yield len(num_bytes)
