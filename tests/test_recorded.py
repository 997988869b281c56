"""What recorded steps depend on, as far as it needs no GPU: kinds of shards, copies of gradients, rates in tensors."""

import numpy
import pytest
import torch
from torch import nn

from lockstep.replica.split import UNIT_NUMEL
from lockstep.replica.unit_norms import UnitNorms, _table
from lockstep.train.recorded_passes import _copies, _kept, _kind
from lockstep.train.recorded_update import Rates, can_be_recorded


def test_kinds_of_shards():
    shard = {"x": torch.zeros(2, 3), "scale": 0.5, "names": ["a", "b"]}
    assert _kind(shard) == _kind({"x": torch.ones(2, 3), "scale": 0.5, "names": ["a", "b"]})
    for other in (
        {**shard, "x": torch.zeros(3, 3)},
        {**shard, "x": torch.zeros(2, 3, dtype=torch.float64)},
        {**shard, "scale": 0.25},
        {**shard, "scale": True},
        {**shard, "names": ["a", "c"]},
    ):
        assert _kind(other) != _kind(shard)
    for unknown in (numpy.zeros(3), object(), torch.eye(3).to_sparse()):
        assert _kind({**shard, "x": unknown}) is None


def test_what_is_kept_is_a_copy():
    shard = (torch.arange(3.0), [torch.ones(2)], "name")
    kept = _kept(shard)
    shard[0].zero_()
    shard[1][0].zero_()
    assert kept[0].tolist() == [0.0, 1.0, 2.0] and kept[1][0].tolist() == [1.0, 1.0] and kept[2] == "name"


def test_copies_of_gradients_keep_every_bit():
    grads = [torch.tensor([-0.0, 1.0]), None, torch.tensor([float("nan")])]
    copies = _copies(grads)
    assert copies[1] is None and copies[0] is not grads[0]
    assert copies[0].view(torch.int32).tolist() == grads[0].view(torch.int32).tolist()
    assert copies[2].view(torch.int32).tolist() == grads[2].view(torch.int32).tolist()


def test_rates_are_tensors_inside_and_what_they_were_outside():
    params = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))]
    own = torch.tensor(0.5)
    optimizer = torch.optim.Adam([{"params": params[:1]}, {"params": params[1:], "lr": own}], lr=0.1)
    optimizer.state[params[0]] = {"step": torch.tensor(3.0)}
    rates = Rates(optimizer, torch.device("cpu"))
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


def test_every_unit_has_its_address_and_place():
    flat, short = torch.zeros(2 * UNIT_NUMEL + 5), torch.zeros(7, dtype=torch.float64)
    addresses, counts, places = _table([(4, flat), (9, short)]).tolist()
    assert places == [4, 5, 6, 9]
    assert counts == [UNIT_NUMEL, UNIT_NUMEL, 5, 7]
    assert addresses == [flat.data_ptr() + 4 * UNIT_NUMEL * number for number in range(3)] + [short.data_ptr()]


def test_norms_land_in_their_places():
    row = torch.zeros(8, dtype=torch.float64)
    norms = UnitNorms()
    for scale in (1.0, 2.0):
        norms.write([(1, torch.full((UNIT_NUMEL + 4,), scale)), (5, torch.tensor([3.0, 4.0]) * scale)], row)
        assert row.tolist() == [0, 256 * scale, 2 * scale, 0, 0, 5 * scale, 0, 0]
