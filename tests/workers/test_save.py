"""A run that stops and goes on, on another number of workers and with something else split, goes on the same."""

import pytest
import torch
import torch.nn.functional as F
from models import build, part_of
from test_zero import OPTIMIZERS, groups_of

import lockstep
from lockstep import keep
from lockstep.keep.safetensors import SafetensorsFile

BEFORE, AFTER = 4, 4


def begin(name, optimizer_name, zero):
    net = build(name, torch.float64)
    optimizer = OPTIMIZERS[optimizer_name](groups_of(net))
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero, bucket_cap_mb=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def go_on(world, model, optimizer, schedule, first, last):
    """The loss of every step, over the global batch."""
    losses = []
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        x, y = part_of(type(model.module).batch(12, generator, torch.float64), world)
        loss = F.cross_entropy(model(x), y)
        lockstep.backward(loss, weight=len(x))
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(world.mean(loss.item(), weight=len(x)))
    return losses


def stop(world, folder, name, optimizer_name, zero, wait=True):
    model, optimizer, schedule = begin(name, optimizer_name, zero)
    go_on(world, model, optimizer, schedule, 0, BEFORE)
    saved = lockstep.save(folder, model, optimizer, step=BEFORE, extra=schedule.state_dict(), wait=wait)
    rest = go_on(world, model, optimizer, schedule, BEFORE, BEFORE + AFTER)
    if not wait:
        saved.wait()
    return rest


def resume(world, folder, name, optimizer_name, zero):
    model, optimizer, schedule = begin(name, optimizer_name, zero)
    resumed = lockstep.load(folder, model, optimizer)
    schedule.load_state_dict(resumed.extra)
    assert resumed.step == BEFORE
    return go_on(world, model, optimizer, schedule, BEFORE, BEFORE + AFTER)


@pytest.mark.parametrize(("name", "optimizer_name"), [("gpt", "adamw"), ("mlp", "adafactor"), ("cnn", "sgd")])
def test_goes_on_with_other_workers_and_stages(pool, tmp_path, name, optimizer_name):
    expected = pool.run(4, stop, str(tmp_path), name, optimizer_name, 3)[0]
    for workers in (1, 2, 3) if name != "cnn" else (4,):  # Batch norm sees another batch on other workers.
        for zero in (0, 1, 2, 3):
            for losses in pool.run(workers, resume, str(tmp_path), name, optimizer_name, zero):
                assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("zero", [0, 2])
def test_gloo_and_asynchronous_saves(pool, tmp_path, zero):
    expected = pool.run(3, stop, str(tmp_path), "gpt", "adamw", zero, False, backend="gloo")[0]
    for losses in pool.run(2, resume, str(tmp_path), "gpt", "adamw", 3, backend="gloo"):
        assert losses == pytest.approx(expected, rel=1e-9)


def wrong(world, folder, name, optimizer_name):
    model, optimizer, _ = begin(name, optimizer_name, 1)
    before = [p.detach().clone() for p in model.module.parameters()]
    with pytest.raises(lockstep.CheckpointError) as caught:
        lockstep.load(folder, model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))
    return str(caught.value)


def test_another_model_is_refused_and_left_alone(pool, tmp_path):
    pool.run(2, stop, str(tmp_path), "mlp", "adamw", 1)
    for text in pool.run(2, wrong, str(tmp_path), "gpt", "adamw"):
        assert "another model" in text
    for text in pool.run(2, wrong, str(tmp_path / "nothing"), "gpt", "adamw"):
        assert "nothing" in text


def test_whole_model_for_other_tools(pool, tmp_path):
    pool.run(3, stop, str(tmp_path), "gpt", "adamw", 3)
    with keep.open_checkpoint(tmp_path) as checkpoint:
        file = keep.export(checkpoint, tmp_path / "model.safetensors", prefix="model/")
    tensors = SafetensorsFile(file)
    net = build("gpt", torch.float64)
    for name, param in net.named_parameters():
        assert tensors.read_whole(name).shape == param.shape
