"""What wire="auto" chooses, from numbers alone."""

import pytest

import lockstep
from lockstep.wire import Auto, Full, Half, Int8, LowRank, Sign, TopK
from lockstep.wire.auto import best_of


def test_the_budget_says_what_may_be_chosen():
    assert Auto(budget=0).wires() == (Full(),)
    assert Auto().wires() == (Full(), Half("bf16"), Int8())
    assert Auto(budget=1).wires() == (Full(), Half("bf16"), Int8(), Sign(), LowRank(4), TopK(0.01))
    assert Auto(candidates=(Full(), Sign())).wires() == (Full(), Sign())


def test_the_less_lossy_of_equals_is_chosen():
    assert best_of([(Full(), 1.0), (Half(), 0.99), (Int8(), 0.98)]) == Full()
    assert best_of([(Full(), 1.0), (Half(), 0.51), (Int8(), 0.5)]) == Half()
    assert best_of([(Full(), 1.0), (Half(), 0.6), (Int8(), 0.5)]) == Int8()


@pytest.mark.parametrize("options", [{"budget": -1}, {"budget": "much"}, {"trial_steps": 0}, {"candidates": ()}])
def test_misuse_is_told(options):
    with pytest.raises(lockstep.UsageError, match="wire Auto got"):
        Auto(**options)
