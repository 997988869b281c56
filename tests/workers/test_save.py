"""A run that stops and goes on, on another number of workers and with something else split, goes on the same."""

import contextlib
import itertools
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from amount import some
from models import build, part_of
from safetensors.torch import load_file
from test_zero import OPTIMIZERS, groups_of

import lockstep
from lockstep import keep

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
    others = some([(1, 0), (2, 1), (3, 2), (2, 3)], itertools.product((1, 2, 3), range(4)))
    # Batch norm sees another batch on other workers.
    for workers, zero in others if name != "cnn" else some([(4, 0), (4, 3)], itertools.product((4,), range(4))):
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
    tensors = load_file(file)
    net = build("gpt", torch.float64)
    for name, param in net.named_parameters():
        assert tensors[name].shape == param.shape


# The first start, and what schedulers give


def starts_or_goes_on(world, folder, path):
    model, optimizer, _ = begin("mlp", "adamw", 1)
    trainer_net = torch.nn.Linear(2, 1)
    trainer = lockstep.Trainer(
        trainer_net, torch.optim.SGD(trainer_net.parameters(), lr=0.1), lambda m, x: m(x).mean(), shards=2
    )
    found = [lockstep.load(folder, model, optimizer, missing="ok"), trainer.load(f"{folder}/trainer", missing="ok")]
    with pytest.raises(lockstep.UsageError, match='give "raise", or "ok"'):
        lockstep.load(folder, model, optimizer, missing=True)
    if not any(found):
        lockstep.save(folder, model, optimizer, step=3, extra=path)
        trainer.save(f"{folder}/trainer")
    return [(bool(each), each.step, each.extra) for each in found]


def test_a_first_start_has_nothing_to_load(pool, tmp_path):
    first = [(False, 0, None)] * 2
    assert pool.run(2, starts_or_goes_on, str(tmp_path), "here") == [first, first]
    assert pool.run(2, starts_or_goes_on, str(tmp_path), "here") == [[(True, 3, "here"), (True, 0, None)]] * 2
    (tmp_path / "step-000000003" / "manifest.json").write_text("")
    failed = pool.run(1, starts_or_goes_on, str(tmp_path), "here", expect_failure=True)
    assert "CheckpointError" in failed[0][1] and "manifest.json" in failed[0][1]


SCHEDULES = {
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 20),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: np.float64(0.9) ** n),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.MultiStepLR(o, [2])], [3]
    ),
}


def schedule_and_back(world, folder, name):
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = SCHEDULES[name](optimizer)
    for number in range(3):
        optimizer.step()
        schedule.step(*([float(number)] if name == "ReduceLROnPlateau" else []))
    state = schedule.state_dict()
    lockstep.save(folder, net, optimizer, step=1, extra={"state": state, 3: (1, np.float32(2))})
    lockstep.load(folder, net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))  # To go on without a schedule.
    fresh = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = SCHEDULES[name](fresh)
    extra = lockstep.load(folder, net, fresh).extra
    came_back = repr(extra)  # CyclicLR takes something out of it.
    schedule.load_state_dict(extra["state"])
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    return came_back == repr({"state": state, 3: (1, np.float32(2))})


@pytest.mark.parametrize("name", SCHEDULES)
def test_extra_takes_what_schedulers_give(pool, tmp_path, name):
    assert pool.run(1, schedule_and_back, str(tmp_path), name) == [True]


# From a stranger


def edit(folder, change):
    """Another manifest, with the right checksum."""
    path = Path(folder) / "step-000000001" / "manifest.json"
    plain = json.loads(path.read_text())
    del plain["crc32"]
    change(plain)
    body = json.dumps(plain, indent=2)[2:]
    path.write_text(f'{{\n  "crc32": "{zlib.crc32(body.encode()):08x}",\n{body}')


def at(*place):
    """The change that sets this place of the tree."""

    def change(plain):
        inner = plain["tree"]
        *path, last, value = place
        for step in path:
            inner = inner[step]
        inner[last] = value
        if value is Ellipsis:
            del inner[last]

    return change


def huge(plain):
    plain["tensors"]["optimizer/weight/big"] = {"shape": [1 << 50], "dtype": "uint8", "pieces": [
        {"file": next(iter(plain["files"])), "key": "x", "begin": 0, "numel": 1 << 50}]}  # fmt: skip


FOREIGN = {
    "params": (at("optimizer", "groups", 0, "params", [0]), r"groups\[0\]\['params'\] is \[0\]"),
    "unknown key": (at("optimizer", "groups", 0, "evil", 1), r"groups\[0\]\['evil'\] is 1"),
    "text for a rate": (at("optimizer", "groups", 0, "lr", "os.system"), r"groups\[0\]\['lr'\] is 'os.system'"),
    "a rate of nan": (at("optimizer", "groups", 0, "lr", {"$float": "nan"}), r"groups\[0\]\['lr'\] is nan"),
    "betas of another length": (at("optimizer", "groups", 0, "betas", [0.5] * 99), r"groups\[0\]\['betas'\]"),
    "groups that are none": (at("optimizer", "groups", [7]), r"groups\[0\] is 7"),
    "no scalars": (at("optimizer", "scalars", ...), "'scalars' is missing"),
    "scalars of another": (at("optimizer", "scalars", {"x": {"a": 1}}), r"scalars\['x'\]"),
    "scalars that are none": (at("optimizer", "scalars", {"weight": {"a": {"b": 1}}}), r"scalars\['weight'\]\['a'\]"),
    "no extra": (at("extra", ...), "'extra' is missing"),
    "steps": (at("extra", "trainer", "steps", -1), "'steps' is -1"),
    "position": (at("extra", "trainer", "position", "epoch", [1]), r"position: 'epoch' is \[1\]"),
    "schedule": (at("extra", "trainer", "scheduler", "step", 3), r"scheduler\['step'\] is 3"),
    "seed": (at("extra", "trainer", "seed", "x"), "seed is 'x'"),
    "a tensor of a petabyte": (huge, "optimizer/weight/big"),
}


def refused(world, folder, cases):
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    trainer = lockstep.Trainer(
        net, optimizer, lambda m, x: m(x).mean(), shards=2, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2)
    )
    trainer.step(torch.ones(2, 2))
    trainer.save(folder)
    path = Path(folder) / "step-000000001" / "manifest.json"
    whole = path.read_text()
    with torch.no_grad():
        net.weight.fill_(7)
    for name in cases:
        path.write_text(whole)
        edit(folder, FOREIGN[name][0])
        with pytest.raises(lockstep.CheckpointError, match=r"manifest\.json.*" + FOREIGN[name][1]):
            trainer.load(folder)
        assert net.weight.unique().tolist() == [7] and set(optimizer.param_groups[0]) <= set(trainer_keys())
    path.write_text(whole)
    assert trainer.load(folder).step == 1 and net.weight.max() < 7


def trainer_keys():
    return {"params", "initial_lr", *torch.optim.AdamW([torch.zeros(1)]).param_groups[0]}


def test_a_checkpoint_of_a_stranger_sets_nothing_but_what_is_known(pool, tmp_path):
    pool.run(1, refused, str(tmp_path), list(FOREIGN))


def strategy_refused(world, folder):
    net = torch.nn.Linear(3, 2)
    trainer = lockstep.Trainer(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        lambda m, x: m(x).mean(),
        shards=2,
        strategy=lockstep.DiLoCo(every=1, wire=lockstep.wire.Int8()),
    )
    trainer.step(torch.ones(2, 3))
    trainer.save(folder)
    path = Path(folder) / "step-000000001" / "manifest.json"
    whole = path.read_text()
    of_bias = json.loads(whole)["tensors"]["model/bias"]["pieces"][0]
    momentum = "strategy/all/outer/weight/momentum_buffer"
    changes = {
        momentum: {"shape": [3, 2]},
        "strategy/all/outer/bias/momentum_buffer": {"dtype": "int32"},
        f"strategy/{world.size - 1}/error.weight": {"dtype": "int32"},
        f"strategy/{world.size - 1}/error.bias": {"shape": [1], "pieces": [of_bias | {"numel": 1}]},
    }  # fmt: skip
    with torch.no_grad():
        net.weight.fill_(7)
    for name, change in changes.items():
        world.barrier()
        if world.is_main:
            path.write_text(whole)
            edit(folder, lambda plain: plain["tensors"][name].update(change))
        world.barrier()
        with pytest.raises(lockstep.CheckpointError, match=rf"manifest\.json: tensor '{name}' is .* expected for this"):
            trainer.load(folder)
        assert net.weight.unique().tolist() == [7]
    world.barrier()
    if world.is_main:
        path.write_text(whole)
    world.barrier()
    assert trainer.load(folder).step == 1 and net.weight.max() < 7


def test_what_a_strategy_keeps_is_checked_before_anything_is_loaded(pool, tmp_path):
    pool.run(2, strategy_refused, str(tmp_path))


# Random numbers


def with_dropout(world, folder, resumes):
    """The losses of two steps after a save, of a model with dropout: the run's own, or those of one that resumes."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = lockstep.DataParallel(net, optimizer=optimizer)

    def steps(number):
        losses = []
        for _ in range(number):
            loss = model(torch.ones(3, 4)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    if resumes:
        lockstep.load(folder, model, optimizer)
    else:
        steps(2)
        lockstep.save(folder, model, optimizer, step=1)
    return steps(2)


def test_dropout_goes_on_where_it_was(pool, tmp_path):
    expected = pool.run(2, with_dropout, str(tmp_path), False)
    assert expected[0] != expected[1]
    assert pool.run(2, with_dropout, str(tmp_path), True) == expected
    assert pool.run(3, with_dropout, str(tmp_path), True)  # From the seed on.


def forget_random(plain):
    plain["tensors"] = {name: entry for name, entry in plain["tensors"].items() if not name.startswith("random/")}


def cut_random(plain):
    entry = plain["tensors"]["random/0/0"]
    entry["shape"] = entry["shape"] + [1]


def random_of_another(plain):
    entry = plain["tensors"]["random/0/0"]
    numel = entry["shape"][0]
    (weight,) = plain["tensors"]["model/0.weight"]["pieces"]
    entry |= {"dtype": "float32", "shape": [weight["numel"]], "pieces": [weight]}
    assert numel != weight["numel"]


def loads_without(world, folder, words):
    with pytest.warns(UserWarning, match=words) if world.is_main else contextlib.nullcontext():
        return with_dropout(world, folder, True)


def test_an_old_checkpoint_without_random_numbers_loads_with_a_note(pool, tmp_path):
    pool.run(2, with_dropout, str(tmp_path), False)
    for change in (cut_random, random_of_another):
        whole = (tmp_path / "step-000000001" / "manifest.json").read_text()
        edit(tmp_path, change)
        failed = pool.run(2, with_dropout, str(tmp_path), True, expect_failure=True)
        assert "CheckpointError" in failed[0][1] and "'random/0/0' is no state of a random generator" in failed[0][1]
        (tmp_path / "step-000000001" / "manifest.json").write_text(whole)
    edit(tmp_path, forget_random)
    pool.run(2, loads_without, str(tmp_path), "does not say how far the random numbers were")
