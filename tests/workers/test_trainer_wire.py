"""Trainer with a wire: the gradient of the whole batch, encoded on its way; overflows; resuming."""

import pytest
import torch
import torch.nn.functional as F
from models import MLP

import lockstep
from lockstep import wire

BACKENDS = ["gloo"]


def weighed(model, shard):
    """A mean over positive targets only: weights are not the sizes of the shards."""
    x, y = shard
    counted = y > 0
    if not counted.any():
        return model(x).sum() * 0.0, 0.0
    return F.cross_entropy(model(x)[counted], y[counted]), float(counted.sum())


def trained(world, chosen, zero, total):
    torch.manual_seed(3)
    net = MLP()
    trainer = lockstep.Trainer(
        net, torch.optim.SGD(net.parameters(), lr=0.1), weighed, shards=5, zero=zero, clip=0.5, wire=chosen, seed=1
    )
    results = [trainer.step(MLP.batch(total, torch.Generator().manual_seed(step), torch.float)) for step in range(6)]
    with trainer.model.whole_params():
        weights = torch.cat([p.detach().flatten() for p in net.parameters()])
    return weights.tolist(), [(out.loss, out.grad_norm, out.weight) for out in results]


@pytest.mark.parametrize(("chosen", "within"), [(wire.Full(), 1e-5), (wire.Int8(), 0.03)], ids=str)
@pytest.mark.parametrize(("workers", "zero", "total"), [(2, 0, 17), (3, 0, 12), (2, 1, 17), (2, 2, 16), (3, 0, 2)])
def test_it_is_the_training_without_a_wire(pool, chosen, within, workers, zero, total):
    """Also with more shards than samples, so that a worker has none."""
    expected, outs = pool.run(1, trained, None, 0, total)[0]
    results = pool.run(workers, trained, chosen, zero, total)
    for weights, found in results:
        assert weights == results[0][0] and found == results[0][1]
        assert torch.tensor(weights).sub(torch.tensor(expected)).norm() <= within * torch.tensor(expected).norm()
        assert [weight for *_, weight in found] == [weight for *_, weight in outs]
        assert found[0][:2] == pytest.approx(outs[0][:2], rel=within)


def overflows(world, chosen):
    torch.manual_seed(3)
    net = MLP()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer = lockstep.Trainer(
        net, torch.optim.SGD(net.parameters(), lr=0.1), weighed, shards=4, scaler=scaler, wire=chosen, seed=1
    )
    skipped, waiting = [], []
    for step in range(5):
        x, y = MLP.batch(16, torch.Generator().manual_seed(step), torch.float)
        x[6] = torch.inf if step == 2 else x[6]
        skipped.append(trainer.step((x, y)).skipped)
        waiting.append(trainer.model.coded.state_dict() if trainer.model.coded else {})
    return skipped, scaler.get_scale(), all(v.isfinite().all() for state in waiting for v in state.values())


@pytest.mark.parametrize("chosen", [wire.Half("fp16"), wire.Int8()], ids=str)
def test_an_overflow_skips_the_step_on_all_once(pool, chosen):
    for found in pool.run(2, overflows, chosen):
        assert found == ([False, False, True, False, False], 32.0, True)


def resumed(world, chosen, folder):
    def make():
        torch.manual_seed(3)
        net = MLP()
        return lockstep.Trainer(net, torch.optim.AdamW(net.parameters()), weighed, shards=4, wire=chosen, seed=1)

    def go_on(trainer, steps):
        for step in range(trainer.steps, trainer.steps + steps):
            trainer.step(MLP.batch(16, torch.Generator().manual_seed(step), torch.float))
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    whole, stopped, again = make(), make(), make()
    expected = go_on(whole, 8)
    go_on(stopped, 4)
    stopped.save(folder)
    again.load(folder)
    return (go_on(again, 4) - expected).norm().item() / expected.norm().item()


def test_resuming_goes_on_with_what_waited(pool, tmp_path):
    assert max(pool.run(2, resumed, wire.LowRank(2), str(tmp_path))) < 1e-6
