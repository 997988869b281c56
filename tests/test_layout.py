import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.replica.granularity import Granularity
from lockstep.replica.layout import ALIGNMENT_BYTES, EXACT_COUNTERS, ParamSpec, aligned, plan

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
spec_lists = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(DTYPES)), max_size=40).map(
    lambda pairs: [ParamSpec(index, numel, dtype, CPU) for index, (numel, dtype) in enumerate(pairs)]
)


@given(spec_lists, st.integers(1, 5000), st.integers(1, 20000), st.integers(0, 50), st.booleans())
def test_every_parameter_has_one_aligned_place(specs, first_cap, cap, tail, alone):
    buckets = plan(specs, tail_numel=tail, tail_alone=alone, grain=Granularity(cap, first_cap_bytes=first_cap))
    places = [(slot.index, bucket, slot) for bucket in buckets for slot in bucket.slots]
    assert sorted(index for index, _, _ in places) == [spec.index for spec in specs]
    for index, bucket, slot in places:
        assert slot.numel == specs[index].numel
        assert bucket.dtype == specs[index].dtype
        assert slot.offset * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0
    for bucket in buckets:
        ends = [0, *(slot.offset + slot.numel for slot in bucket.slots)]
        starts = [*(slot.offset for slot in bucket.slots), bucket.tail_offset]
        assert all(end <= start for end, start in zip(ends, starts, strict=True))
        assert bucket.numel * bucket.dtype.itemsize % ALIGNMENT_BYTES == 0


@given(spec_lists, st.integers(1, 20000))
def test_a_bucket_is_closed_when_it_reaches_its_cap(specs, cap):
    for bucket in plan(specs, tail_numel=1, grain=Granularity(cap, first_cap_bytes=100)):
        sizes = [slot.numel * bucket.dtype.itemsize for slot in bucket.slots]
        assert sum(sizes[:-1]) < cap


@given(spec_lists, st.integers(1, 50), st.booleans())
def test_the_last_bucket_counts_exactly(specs, tail, alone):
    buckets = plan(specs, tail_numel=tail, tail_alone=alone, grain=Granularity(1000, first_cap_bytes=100))
    assert buckets[-1].dtype in EXACT_COUNTERS
    assert buckets[-1].tail_numel >= tail
    assert not any(bucket.tail_numel for bucket in buckets[:-1])
    assert not (alone and buckets[-1].slots)


@given(spec_lists, st.integers(0, 20000))
def test_only_a_small_bucket_carries_a_tail(specs, cap):
    closing = plan(specs, tail_numel=3, tail_cap_bytes=cap)[-1]
    assert closing.tail_numel >= 3
    assert sum(slot.numel * closing.dtype.itemsize for slot in closing.slots) <= cap


def test_a_tail_does_not_ride_with_a_block():
    spec = ParamSpec(0, 10, torch.float32, CPU, block=2)
    assert [len(bucket.slots) for bucket in plan([spec], tail_numel=3)] == [1, 0]


@given(spec_lists)
def test_buckets_leave_in_the_order_in_which_they_fill(specs):
    buckets = plan(specs, tail_numel=1, grain=Granularity(500))
    last = [max(slot.index for slot in bucket.slots) for bucket in buckets if bucket.slots]
    assert last == sorted(last)


def test_buckets_that_grow_and_shrink_again():
    specs = [ParamSpec(index, 250, torch.float32, CPU) for index in range(100)]
    grain = Granularity(16_000, 2, first_cap_bytes=1000, growth=4)
    sizes = [len(bucket.slots) for bucket in plan(specs, tail_numel=0, grain=grain)]
    assert sizes == [1, 4, 16, 16, 16, 16, 16, 8, 4, 2, 1]


def test_aligned():
    assert [aligned(n, torch.float32) for n in (0, 1, 16, 17)] == [0, 32, 32, 32]
    assert aligned(1, torch.bfloat16) == 64
