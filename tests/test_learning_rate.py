import pytest
import torch

import lockstep


def rates(steps, **kwargs):
    groups = [
        {"params": [torch.zeros(1, requires_grad=True)], "lr": 0.1},
        {"params": [torch.zeros(1, requires_grad=True)], "lr": 0.4},
    ]
    optimizer = torch.optim.SGD(groups)
    schedule = lockstep.scale_lr(optimizer, base_batch=256, **kwargs)
    seen = []
    for _ in range(steps):
        seen.append(tuple(group["lr"] for group in optimizer.param_groups))
        optimizer.step()
        schedule.step()
    return seen, schedule, optimizer


def test_linear_with_warm_up():
    seen, _, _ = rates(6, batch=1024, warmup_steps=4)
    first = [rate for rate, _ in seen]
    assert first == pytest.approx([0.1, 0.175, 0.25, 0.325, 0.4, 0.4])
    assert [rate for _, rate in seen] == pytest.approx([4 * rate for rate in first])


def test_square_root_without_warm_up():
    seen, _, _ = rates(2, batch=1024, rule="sqrt")
    assert seen == [pytest.approx((0.2, 0.8))] * 2


def test_resumes_from_its_state():
    whole, _, _ = rates(6, batch=1024, warmup_steps=4)
    _, half, optimizer = rates(3, batch=1024, warmup_steps=4)
    _, fresh, other = rates(0, batch=1024, warmup_steps=4)
    fresh.load_state_dict(half.state_dict())
    other.load_state_dict(optimizer.state_dict())
    fresh.step()
    assert tuple(group["lr"] for group in other.param_groups) == pytest.approx(whole[4])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch": 0}, "batch=0"),
        ({"batch": 8, "rule": "cube"}, "'cube'"),
        ({"batch": 8, "warmup_steps": -1}, "warmup_steps=-1"),
    ],
)
def test_nonsense_is_refused(change, named):
    with pytest.raises(lockstep.UsageError, match=named):
        rates(1, **change)
    with pytest.raises(lockstep.UsageError, match="optimizer"):
        lockstep.scale_lr("adam", 1, 1)
