"""Watched training with real workers: the shares add up, the slow one is named, nothing changes a bit."""

import itertools
import json
import os
import signal
import sys
import threading
import time

import pytest
import torch
from amount import some
from processes import Forked, FromServer, in_forks
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from lockstep.cli.main import main
from lockstep.watching.hang_state import Look
from lockstep.watching.network import Probes
from lockstep.watching.step_record import SHARES

BACKENDS = some(["shm"], ["shm", "gloo"])


class Slowed(nn.Module):
    """Takes its time on one worker."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        time.sleep(self.seconds)
        return x


def net(seconds=0.0):
    return nn.Sequential(nn.Linear(32, 64), Slowed(seconds), nn.ReLU(), nn.Linear(64, 4))


def train(world, folder, steps, *, watched=True, data_s=0.0, forward_s=0.0, accumulate=1):
    """The watcher's last words, and the weights."""
    torch.manual_seed(0)
    model = lockstep.DataParallel(net(forward_s), bucket_cap_mb=0.004)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watcher = lockstep.watch(model, folder, progress=False) if watched else None
    samples = [(torch.full((32,), i / 100), i % 4) for i in range(8 * accumulate * steps)]

    def collate(picked):
        time.sleep(data_s)
        return torch.utils.data.default_collate(picked)

    for number, (x, y) in enumerate(lockstep.shard(DataLoader(samples, batch_size=8, collate_fn=collate)), 1):
        model.require_backward_grad_sync = number % accumulate == 0
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if number % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            if watcher is not None:
                watcher.log(loss=loss)
    said = None
    if watcher is not None:
        watcher.close()
        said = watcher.verdict(), watcher.summary()
    return said, [param.detach().clone() for param in model.parameters()]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_watched(world, folder, steps, options):
    return train(world, folder, steps, **options)[0]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_shares_add_up_to_the_step(pool, tmp_path, workers, accumulate):
    said = pool.run(workers, train_watched, str(tmp_path), 12, {"accumulate": accumulate})
    assert all(each == said[0] for each in said)  # The same on every worker.
    steps = lines(tmp_path / "steps.jsonl")
    assert [step["step"] for step in steps] == list(range(1, 13))
    for step in steps:
        assert [worker["rank"] for worker in step["workers"]] == list(range(workers))
        assert step["batch"] == 8 * accumulate and step["lr"] == 1e-2 and step["loss"] > 0
        for worker in step["workers"]:
            shares = worker["shares_ms"]
            assert sum(shares.values()) == pytest.approx(worker["wall_ms"], rel=1e-6)
            assert set(shares) == set(SHARES) and min(shares.values()) >= 0
            assert shares["forward"] > 0 and shares["backward"] > 0 and shares["data"] > 0 and shares["optimizer"] > 0
            if workers == 1:
                assert shares["exposed"] == shares["waiting"] == 0
    # One step follows the other: no time is lost between them.
    for before, after in itertools.pairwise(steps):
        for one, other in zip(before["workers"], after["workers"], strict=True):
            assert other["begin_us"] == pytest.approx(one["begin_us"] + 1e3 * one["wall_ms"], abs=1)
    assert [len(trace["workers"]) for trace in lines(tmp_path / "trace.jsonl")] == [workers] * 12


def test_run_is_described(pool, tmp_path):
    pool.run(2, train_watched, str(tmp_path), 4, {})
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["version"] == 1 and run["size"] == 2 and len(run["hosts"]) == 2
    assert run["num_params"] == sum(param.numel() for param in net().parameters())
    assert run["grad_bytes"] == 4 * run["num_params"] and run["single_ms"] > 0
    held = [name for bucket in run["buckets"] for name in bucket["params"]]
    assert sorted(held) == sorted(name for name, _ in net().named_parameters())
    launched = [bucket["place"] for bucket in lines(tmp_path / "trace.jsonl")[-1]["workers"][0]["buckets"]]
    assert launched == [bucket["place"] for bucket in run["buckets"]]
    pool.run(2, train_watched, str(tmp_path), 3, {})
    assert len(lines(tmp_path / "steps.jsonl")) == 3 and len(lines(tmp_path / "earlier" / "1" / "steps.jsonl")) == 4


def both(world, steps):
    return train(world, None, steps, watched=True)[1], train(world, None, steps, watched=False)[1]


def test_watching_changes_no_bit(pool):
    for watched, unwatched in pool.run(2, both, 20):
        assert all(map(torch.equal, watched, unwatched))


def with_straggler(world, slow, options):
    return train(world, None, 12, **(options if world.rank == slow else {}))[0]


@pytest.mark.parametrize("workers", some([2], [2, 4]))
@pytest.mark.parametrize(
    ("options", "words"),
    some(
        [({"data_s": 0.2}, "in data loading")],
        [({"data_s": 0.2}, "in data loading"), ({"forward_s": 0.2}, "in the forward pass")],
    ),
)
def test_straggler_is_named(pool, workers, options, words):
    for verdict, summary in pool.run(workers, with_straggler, 1, options):
        assert verdict.startswith("worker 1 holds everyone up by ") and verdict.endswith(words)
        assert summary.verdict == verdict and summary.steps == 12
        assert summary.waiting_ms > 0.3 * summary.wall_ms and summary.efficiency is not None


def ask_after_the_loop(world, steps, seconds, asks):
    """What the watcher says of a slow worker 1, right after its last step, on those who ask."""
    model = lockstep.DataParallel(net(seconds if world.rank == 1 else 0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with lockstep.watch(model, progress=False) as watcher:
        for _ in range(steps):
            model(torch.ones(2, 32)).sum().backward()
            optimizer.step()
        said = watcher.verdict() if world.rank in asks else None
        world.barrier()  # None has ended yet.
    return said


@pytest.mark.parametrize("asks", some([(1,)], [(0, 1), (0,), (1,)]))
def test_a_verdict_tells_what_is_known_now(pool, asks):
    for rank, said in enumerate(pool.run(2, ask_after_the_loop, 14, 0.2, asks)):
        assert said is None if rank not in asks else said.startswith("worker 1 holds everyone up by ")


def noise_scale(world, dimensions, square, steps, zero):
    """The gradient of a sample is the sample itself, so mean and covariance are known."""
    torch.manual_seed(world.rank)
    mean = torch.full((dimensions,), (square / dimensions) ** 0.5)
    module = nn.Linear(dimensions, 1, bias=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    model = lockstep.DataParallel(module, optimizer=optimizer, zero=zero)
    size = 3 + world.rank
    with lockstep.watch(model, progress=False) as watcher:
        for _ in range(steps):
            lockstep.backward(model(mean + torch.randn(size, dimensions)).mean(), weight=size)
            optimizer.step()
            optimizer.zero_grad()
    return watcher.summary().noise_scale


@pytest.mark.parametrize("zero", some([0], [0, 1, 2, 3]))
def test_noise_scale(pool, zero):
    for found in pool.run(3, noise_scale, 200, 50.0, 16 * 16, zero):
        assert found == pytest.approx(200 / 50, rel=0.25)


def trained(world, zero, folder):
    torch.manual_seed(0)
    module = net()
    trainer = lockstep.Trainer(
        module,
        torch.optim.AdamW(module.parameters(), lr=1e-2),
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        shards=4,
        zero=zero,
        watch=folder or False,
    )
    samples = [(torch.full((32,), i / 100), i % 4) for i in range(80)]
    for batch in trainer.batches(samples, 8):
        out = trainer.step(batch)
    assert (trainer.watcher is None) == (folder is None)
    if trainer.watcher is not None:
        trainer.watcher.close()
    with trainer.model.whole_params():
        return out.loss, [param.detach().clone() for param in module.parameters()]


@pytest.mark.parametrize("zero", some([0], [0, 1, 3]))
def test_trainer(pool, tmp_path, zero):
    (loss, weights), *_ = pool.run(2, trained, zero, str(tmp_path))
    steps = lines(tmp_path / "steps.jsonl")
    assert len(steps) == 10 and steps[-1]["loss"] == pytest.approx(loss) and steps[-1]["grad_norm"] > 0
    assert all(worker["shares_ms"]["data"] > 0 for worker in steps[-1]["workers"])
    assert [step["batch"] for step in steps] == [8] * 10  # What was only run to be timed does not count.
    (again, unwatched), *_ = pool.run(2, trained, zero, None)
    assert again == loss and all(map(torch.equal, weights, unwatched))


def wrap_what_is_not_wrapped(world):
    with pytest.raises(lockstep.UsageError, match=r"lockstep\.DataParallel"):
        lockstep.watch(net())
    model = lockstep.DataParallel(net())
    watcher = lockstep.watch(model, progress=False)
    assert lockstep.watch(model) is watcher  # A world has one.


def test_watch_is_for_wrapped_models(pool):
    pool.run(2, wrap_what_is_not_wrapped)


class Telling(nn.Parameter):
    """Notes which threads look at its gradient."""

    threads = ()

    @property
    def grad(self):
        self.threads = {*self.threads, threading.current_thread().name}
        return torch.Tensor.grad.__get__(self)

    @grad.setter
    def grad(self, grad):
        torch.Tensor.grad.__set__(self, grad)


def look_in_mid_pass(world, steps):
    """Who has looked at gradients, and what another thread found to lack in the middle of the last backward pass."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    for layer in module:
        layer.weight, layer.bias = Telling(layer.weight.data), Telling(layer.bias.data)
    model = lockstep.DataParallel(module)
    look, seen = Look(world, model), []

    def watch_from_another_thread(_grad):
        thread = threading.Thread(target=lambda: seen.append(look.take()), name="watch")
        thread.start()
        thread.join()

    module[1].register_forward_hook(lambda _, __, output: output.register_hook(watch_from_another_thread) and None)
    for _ in range(steps):
        model(torch.ones(2, 8)).sum().backward()
        model.zero_grad()
    return set().union(*(param.threads for param in module.parameters())), seen[0], seen[-1]


def test_no_thread_but_the_training_looks_at_gradients(pool):
    for threads, first, last in pool.run(2, look_in_mid_pass, 3):
        assert threads == {"MainThread"}
        assert set(first.lacking) == set(last.lacking) == {"1.bias", "1.weight", "0.bias", "0.weight"}


SCRIPT = """
import torch, lockstep
world = lockstep.join(seed=0)
model = lockstep.DataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_as_it_is(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = Forked(lambda: main(["run", "-n", "2", "--watch=seen", "script.py"]), tmp_path).wait()
    assert ended.code == 0, ended.err
    assert len(lines(tmp_path / "seen" / "steps.jsonl")) == 30
    assert "30 steps" in ended.err
    assert json.loads((tmp_path / "seen" / "run.json").read_text())["script"] == "script.py"


def die_after_20_steps():
    world = lockstep.join(seed=0)
    model = lockstep.DataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(30):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 20 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def lose_a_watched_worker(folder):
    in_forks(sys.modules[__name__], "die_after_20_steps")
    os.environ["LOCKSTEP_WATCH"] = folder
    try:
        lockstep.launch(die_after_20_steps, 2)
    except lockstep.WorkerFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def test_a_dead_worker_holds_nothing_up(tmp_path):
    ended = FromServer(tmp_path / "out", lose_a_watched_worker, str(tmp_path / "run")).wait()
    assert ended.code == 1 and "worker 1" in ended.err and "SIGKILL" in ended.err, ended.err
    assert len(lines(tmp_path / "run" / "steps.jsonl")) >= 20


def test_probes(tmp_path):
    """Two in one process: each finds the other, and the way is short."""
    probes = [Probes(rank, "127.0.0.1", b"7") for rank in range(2)]
    stranger = Probes(1, "127.0.0.1", b"8")
    for each in (*probes, stranger):
        each.start([each.address for each in probes])
    give_up = time.monotonic() + 20
    while not all(each.delays() for each in probes) and time.monotonic() < give_up:
        time.sleep(0.01)
    for rank, each in enumerate(probes):
        assert abs(each.ahead(1 - rank)) < 1e9
        assert all(there + back < 10e9 for there, back in each.delays()[1 - rank])
    assert not stranger.delays()  # It has another token.
    for each in (*probes, stranger):
        each.close()


def _watches_where_nothing_can_be_written(world, folder):
    model = lockstep.DataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(lockstep.UsageError) as caught:
        lockstep.watch(model, folder=folder)
    assert world.sum(1) == world.size
    return str(caught.value)


def test_a_folder_that_cannot_be_written_is_said_by_all(pool, tmp_path):
    (tmp_path / "file").touch()
    for said in pool.run(2, _watches_where_nothing_can_be_written, str(tmp_path / "file" / "run")):
        assert said.startswith("the watch folder") and "Not a directory" in said and "--watch=FOLDER" in said
