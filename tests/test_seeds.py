import random

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.seeds import Generators, checked, derive, seed_everything


@given(st.integers(0, 2**64), st.integers(0, 100), st.integers(0, 100))
def test_streams_are_reproducible_and_differ(seed, a, b):
    assert derive(seed, "x", a) == derive(seed, "x", a)
    assert (derive(seed, "x", a) == derive(seed, "x", b)) == (a == b)
    assert derive(seed, a) != derive(seed, "y", a)
    assert 0 <= derive(seed, a) < 2**63


@pytest.mark.parametrize("seed", [2**70, -(2**63) - 1, "abc", True, 1.5])
def test_what_is_no_seed_is_refused_by_name(seed):
    with pytest.raises(lockstep.UsageError, match=r"^seed=.*: a seed is a whole number"):
        lockstep.join(seed=seed)
    with pytest.raises(lockstep.UsageError, match=r"^seed=.*: a seed is a whole number"):
        lockstep.Trainer(*recipe(), lambda model, x: model(x).sum(), shards=1, seed=seed)
    lockstep.join().leave()  # The Trainer's.


def recipe():
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("seed", [0, -1, 2**64 - 1, numpy.int64(3)])
def test_every_seed_of_torch_is_taken(seed):
    seed_everything(checked(seed))


def test_an_empty_data_set_is_named():
    trainer = lockstep.Trainer(*recipe(), lambda model, x: model(x).sum(), shards=1)
    with pytest.raises(lockstep.UsageError, match="the data set is empty"):
        next(iter(trainer.batches([], batch_size=2)))
    trainer.world.leave()


# Common random numbers, and that no other code notices them


def draw() -> tuple[float, ...]:
    # One normal number, so that numpy's generator is left with the second of a pair in hand.
    return torch.rand(()).item(), torch.randn(3)[0].item(), numpy.random.randn(), random.gauss(0, 1)


def test_the_same_seed_draws_the_same_whatever_the_worker_drew() -> None:
    drawn = []
    for own in (1, 2):
        seed_everything(own)
        draw()
        with Generators(5):
            drawn.append([draw(), draw()])
    assert drawn[0] == drawn[1]


def test_different_seeds_draw_different_numbers() -> None:
    with Generators(5):
        five = draw()
    with Generators(6):
        six = draw()
    assert all(a != b for a, b in zip(five, six, strict=True))


def test_the_common_stream_goes_on_where_it_was_left() -> None:
    with Generators(5):
        in_one_go = [draw(), draw(), draw()]
    common, with_breaks = Generators(5), []
    for _ in range(3):
        with common:
            with_breaks.append(draw())
        draw()
    assert with_breaks == in_one_go


def test_the_workers_own_stream_does_not_notice() -> None:
    seed_everything(3)
    undisturbed = [draw() for _ in range(3)]
    seed_everything(3)
    common, disturbed = Generators(5), []
    for _ in range(3):
        disturbed.append(draw())
        with common:
            draw()
    assert disturbed == undisturbed


def test_an_error_inside_gives_the_workers_own_stream_back() -> None:
    seed_everything(3)
    expected = draw()
    seed_everything(3)
    with pytest.raises(KeyError), Generators(5):
        draw()
        raise KeyError
    assert draw() == expected


def test_torch_only_leaves_the_others_alone() -> None:
    seed_everything(3)
    expected = numpy.random.rand(), random.random()
    seed_everything(3)
    with Generators(5, torch_only=True):
        drawn = torch.rand(())
        assert (numpy.random.rand(), random.random()) == expected
    with Generators(5):
        assert torch.rand(()) == drawn
