"""The arithmetic of parts, over everything hypothesis can think of."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import LoaderPlace, Part, cut

totals = st.integers(0, 10_000)
sizes = st.integers(1, 300)


def parts(total: int, size: int) -> list[Part]:
    return [cut(total, size, rank) for rank in range(size)]


@given(totals, sizes)
def test_parts_one_after_another_are_the_batch(total: int, size: int) -> None:
    samples = range(total)
    assert [sample for part in parts(total, size) for sample in part.of(samples)] == list(samples)


@given(totals, sizes)
def test_parts_differ_by_one_sample_at_most_and_the_larger_come_first(total: int, size: int) -> None:
    counts = [part.size for part in parts(total, size)]
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(totals, sizes)
def test_a_part_knows_the_whole(total: int, size: int) -> None:
    assert all(part.total == total and part.size == len(part.of(range(total))) for part in parts(total, size))


def test_fewer_samples_than_workers_leave_the_last_ones_empty() -> None:
    assert [part.size for part in parts(2, 4)] == [1, 1, 0, 0]


def test_a_place_takes_its_part() -> None:
    assert LoaderPlace(rank=1, size=3, seed=0).part(7) == Part(3, 5, 7)
