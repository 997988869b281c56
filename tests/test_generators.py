"""Common random numbers, and that nobody else notices them."""

import random

import numpy
import pytest
import torch

from lockstep import seeds
from lockstep.data.generators import Generators


def draw() -> tuple[float, ...]:
    # One normal number, so that numpy's generator is left with the second of a pair in hand.
    return torch.rand(()).item(), torch.randn(3)[0].item(), numpy.random.randn(), random.gauss(0, 1)


def test_the_same_seed_draws_the_same_whatever_the_worker_drew() -> None:
    drawn = []
    for own in (1, 2):
        seeds.seed_everything(own)
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
    seeds.seed_everything(3)
    undisturbed = [draw() for _ in range(3)]
    seeds.seed_everything(3)
    common, disturbed = Generators(5), []
    for _ in range(3):
        disturbed.append(draw())
        with common:
            draw()
    assert disturbed == undisturbed


def test_an_error_inside_gives_the_workers_own_stream_back() -> None:
    seeds.seed_everything(3)
    expected = draw()
    seeds.seed_everything(3)
    with pytest.raises(KeyError), Generators(5):
        draw()
        raise KeyError
    assert draw() == expected


def test_torch_only_leaves_the_others_alone() -> None:
    seeds.seed_everything(3)
    expected = numpy.random.rand(), random.random()
    seeds.seed_everything(3)
    with Generators(5, torch_only=True):
        drawn = torch.rand(())
        assert (numpy.random.rand(), random.random()) == expected
    with Generators(5):
        assert torch.rand(()) == drawn
