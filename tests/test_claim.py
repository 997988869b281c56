"""Whose batch is the current one, as loops begin, nest, run side by side and end."""

from datetime import timedelta

import pytest
import torch

from lockstep.comm.peers import Peer, Peers
from lockstep.data.claim import Claim
from lockstep.weight import Weight
from lockstep.world import World


@pytest.fixture
def world() -> World:
    me = Peer.me(0)
    return World(
        0,
        1,
        local_rank=0,
        local_size=1,
        device=torch.device("cpu"),
        backend="gloo",
        seed=0,
        peers=Peers(me, (me,), None, timedelta(seconds=1)),
        group=None,
        host_group=None,
        owns_group=False,
    )


def test_a_claim_says_what_the_batch_weighs(world: World) -> None:
    claim = Claim(world)
    claim.hold(3, 8)
    assert world.weight is not None and (world.weight.value, world.weight.total) == (3, 8)


def test_a_released_claim_gives_back_what_was_there(world: World) -> None:
    before = world.weight = Weight(5)
    claim = Claim(world)
    claim.hold(3, 8)
    claim.hold(2, 8)
    claim.release()
    assert world.weight is before


def test_a_claim_that_never_held_changes_nothing(world: World) -> None:
    before = world.weight = Weight(5)
    Claim(world).release()
    assert world.weight is before


def test_an_inner_loop_gives_the_outer_ones_batch_back(world: World) -> None:
    outer, inner = Claim(world), Claim(world)
    outer.hold(3, 8)
    training = world.weight
    inner.hold(1, 2)
    inner.release()
    assert world.weight is training
    outer.release()
    assert world.weight is None


@pytest.mark.parametrize("first", [0, 1])
def test_loops_side_by_side_leave_nothing_behind(world: World, first: int) -> None:
    claims = [Claim(world), Claim(world)]
    for step in range(2):
        for number, claim in enumerate(claims):
            claim.hold(step, number)
    claims[first].release()
    claims[1 - first].release()
    assert world.weight is None


def test_a_weight_that_another_set_since_stays(world: World) -> None:
    claim = Claim(world)
    claim.hold(3, 8)
    explicit = world.weight = Weight(57)
    claim.release()
    assert world.weight is explicit
