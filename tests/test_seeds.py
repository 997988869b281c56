import random

import numpy
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.seeds import derive, diverge, seed_everything


@given(st.integers(0, 2**64), st.integers(0, 100), st.integers(0, 100))
def test_streams_are_reproducible_and_differ(seed, a, b):
    assert derive(seed, "x", a) == derive(seed, "x", a)
    assert (derive(seed, "x", a) == derive(seed, "x", b)) == (a == b)
    assert derive(seed, a) != derive(seed, "y", a)
    assert 0 <= derive(seed, a) < 2**63


def draw():
    return torch.rand(1).item(), numpy.random.rand(), random.random()


def test_worker_zero_goes_on_and_others_diverge():
    seen = []
    for rank in (0, 1, 2, 1):
        seed_everything(5)
        diverge(5, rank)
        seen.append(draw())
    seed_everything(5)
    assert seen[0] == draw()
    assert len(set(seen)) == 3 and seen[1] == seen[3]
