"""What recorded steps depend on, as far as it needs no GPU: kinds of shards, copies of gradients, rates in tensors."""

import numpy
import pytest
import torch
from torch import nn

from lockstep.replica.layout import UNIT_NUMEL
from lockstep.replica.params import Owned
from lockstep.train.cuda_graph import DeviceRates, can_be_recorded, cloned, copies, shard_kind
from lockstep.train.step_report import GradRange, UnitNorms, unit_table


def test_kinds_of_shards():
    shard = {"x": torch.zeros(2, 3), "scale": 0.5, "names": ["a", "b"]}
    assert shard_kind(shard) == shard_kind({"x": torch.ones(2, 3), "scale": 0.5, "names": ["a", "b"]})
    for other in (
        {**shard, "x": torch.zeros(3, 3)},
        {**shard, "x": torch.zeros(2, 3, dtype=torch.float64)},
        {**shard, "scale": 0.25},
        {**shard, "scale": True},
        {**shard, "names": ["a", "c"]},
    ):
        assert shard_kind(other) != shard_kind(shard)
    for unknown in (numpy.zeros(3), object(), torch.eye(3).to_sparse()):
        assert shard_kind({**shard, "x": unknown}) is None


def test_what_is_kept_is_a_copy():
    shard = (torch.arange(3.0), [torch.ones(2)], "name")
    kept = cloned(shard)
    shard[0].zero_()
    shard[1][0].zero_()
    assert kept[0].tolist() == [0.0, 1.0, 2.0] and kept[1][0].tolist() == [1.0, 1.0] and kept[2] == "name"


def test_copies_of_gradients_keep_every_bit():
    grads = [torch.tensor([-0.0, 1.0]), None, torch.tensor([float("nan")])]
    found = copies(grads)
    assert found[1] is None and found[0] is not grads[0]
    assert found[0].view(torch.int32).tolist() == grads[0].view(torch.int32).tolist()
    assert found[2].view(torch.int32).tolist() == grads[2].view(torch.int32).tolist()


def test_rates_are_tensors_inside_and_what_they_were_outside():
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    own = torch.tensor(0.5)
    optimizer = torch.optim.Adam([{"params": params[:1]}, {"params": params[1:], "lr": own}], lr=0.1)
    optimizer.state[params[0]] = {"step": torch.tensor(3.0)}
    rates = DeviceRates(optimizer, torch.device("cpu"))
    assert all(group["capturable"] for group in optimizer.param_groups)
    optimizer.param_groups[0]["lr"] = 0.2
    rates.refresh()
    with pytest.raises(ZeroDivisionError), rates.in_tensors():
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert isinstance(first, torch.Tensor) and float(first) == pytest.approx(0.2)
        assert second is own
        raise ZeroDivisionError
    assert optimizer.param_groups[0]["lr"] == 0.2 and optimizer.param_groups[1]["lr"] is own


def test_which_updates_can_be_recorded():
    params = [nn.Parameter(torch.zeros(2))]
    assert can_be_recorded(torch.optim.AdamW(params))
    assert can_be_recorded(torch.optim.SGD(params, lr=0.1, fused=True))
    assert not can_be_recorded(torch.optim.SGD(params, lr=0.1))


def test_every_unit_has_its_place_in_its_gradient_and_in_the_row():
    long, short = (nn.Parameter(torch.zeros(size)) for size in (3 * UNIT_NUMEL + 5, 7))
    ranges = [GradRange(long, 4, UNIT_NUMEL, 3 * UNIT_NUMEL + 5), GradRange(short, 9, 0, 7)]
    numbers, offsets, counts, places = unit_table([0, 3], ranges, 4).tolist()
    assert numbers == [0, 0, 0, 3]
    assert offsets == [4 * UNIT_NUMEL, 8 * UNIT_NUMEL, 12 * UNIT_NUMEL, 0]
    assert counts == [UNIT_NUMEL, UNIT_NUMEL, 5, 7]
    assert places == [4, 5, 6, 9]


def test_norms_land_in_their_places():
    """Of whole gradients a worker takes its share of the units, of its parts all; a parameter without one has none."""
    params = [nn.Parameter(torch.zeros(size)) for size in (3, UNIT_NUMEL + 4, 2, 2)]
    for scale in (1.0, 2.0):
        params[1].grad = torch.full((UNIT_NUMEL + 4,), scale)
        params[3].grad = torch.tensor([3.0, 4.0]) * scale
        rows = [torch.zeros(5, dtype=torch.float64) for _ in range(3)]
        for rank, row in enumerate(rows[:2]):
            UnitNorms(params, rank, 2).write(None, row)
        assert [row.tolist() for row in rows[:2]] == [[0, 256 * scale, 2 * scale, 0, 0], [0, 0, 0, 0, 5 * scale]]
        own = nn.Parameter(torch.zeros(4))
        own.grad = params[1].grad[UNIT_NUMEL:]
        UnitNorms(params, 0, 2).write([Owned(params[1], own, UNIT_NUMEL, (1,))], rows[2])
        assert rows[2].tolist() == [0, 0, 2 * scale, 0, 0]
