"""Async: every sample once whatever the speeds, every update once at every owner, no gradient staler than the bound."""

import os
import random
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from amount import some
from processes import fork_context
from torch import nn

import lockstep


class Counting(nn.Module):
    """Its gradients are sums of samples, whole numbers: what has been applied is known exactly, whatever the order."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(100))
        self.fine = nn.Parameter(torch.zeros(7, 3, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(40))

    def forward(self, x):
        total = x.sum()
        return total * self.weight.sum() + total.double() * self.fine.sum()


class Numbers:
    """Samples that are their own number, from 1 on."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor(float(index + 1))


def counting(world, staleness, pause=lambda: None, shards=5, optimizer=None, scheduler=None):
    """A trainer of whole numbers, and the samples that this worker has used."""
    net, used = Counting(), []
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0) if optimizer is None else optimizer(net.parameters())

    def loss_fn(model, shard):
        used.extend(int(x) for x in shard)
        pause()
        return model(shard)

    schedule = scheduler(optimizer) if scheduler is not None else None
    trainer = lockstep.Trainer(
        net, optimizer, loss_fn, shards=shards, strategy=lockstep.Async(staleness=staleness), scheduler=schedule
    )
    return trainer, used


def loading(num_workers):
    """Arguments for so many loader processes, forked: others would have to import torch first."""
    return {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}


def applied(trainer):
    """The sum of the samples that have been applied, the same in every element."""
    net = trainer.model.module
    values = {value for tensor in (net.weight, net.fine) for value in tensor.detach().flatten().tolist()}
    assert len(values) == 1 and bool((net.unused == 1).all()), values
    return -int(values.pop())


# Each once


def all_samples(world, staleness, num_workers):
    generator = random.Random(world.rank)
    trainer, used = counting(world, staleness, lambda: time.sleep(generator.random() * 0.004 * (1 + 2 * world.rank)))
    worst = 0
    for batch in trainer.batches(Numbers(61), batch_size=16, epochs=3, **loading(num_workers)):
        worst = max(worst, trainer.step(batch).staleness)
    return used, worst, applied(trainer), trainer.steps


@pytest.mark.parametrize(("workers", "staleness", "num_workers"), [(3, 0, 0), (3, 1, 0), (3, 4, 1), (1, 0, 0)])
def test_every_sample_is_used_once_and_every_update_applied_once(pool, workers, staleness, num_workers):
    """At uneven speeds; no gradient is staler than the bound; in the end all workers hold the same."""
    results = pool.run(workers, all_samples, staleness, num_workers)
    assert sorted(sample for used, *_ in results for sample in used) == sorted(3 * list(range(1, 62)))
    assert [total for _, _, total, _ in results] == [3 * 61 * 62 // 2] * workers
    assert max(worst for _, worst, *_ in results) <= staleness
    assert {steps for *_, steps in results} == {3 * (3 * 5 + 5)}


def uneven(world):
    """Worker 1 takes ten times as long."""
    trainer, used = counting(world, 100, lambda: time.sleep(0.02 if world.rank else 0.002), shards=2)
    for batch in trainer.batches(Numbers(80), batch_size=2):
        trainer.step(batch)
    return len(used)


def test_the_fast_do_more(pool):
    fast, slow = pool.run(2, uneven)
    assert fast + slow == 80 and fast > 2 * slow


# The bound


def held_up(world, staleness):
    """Worker 1 holds on to its first reading until worker 0 has made as many steps as it can."""
    store, begun = world.peers.store, 0

    def pause():
        nonlocal begun
        begun += 1
        if world.rank == 0:
            store.wait(["reading"])  # Worker 1 has read before anything was applied.
            store.set("begun", str(begun))
            return
        if begun == 1:
            store.set("reading", "1")
            give_up = time.monotonic() + 20
            while not store.check(["begun"]) or int(store.get("begun")) < staleness + 1:
                assert time.monotonic() < give_up
            time.sleep(0.3)  # More would come now, if the bound did not hold.
            seen.append(int(store.get("begun")))

    seen = []
    trainer, _ = counting(world, staleness, pause, shards=2)
    stale = [trainer.step(batch).staleness for batch in trainer.batches(Numbers(40), batch_size=2)]
    return seen, stale[:1], max(stale), applied(trainer)


@pytest.mark.parametrize("staleness", some([1, 3], [1, 2, 3, 7]))
def test_the_bound_makes_the_fast_wait_for_the_slow(pool, staleness):
    """While a reading is outstanding, so many updates are applied and one more is computed, and that is all."""
    fast, slow = pool.run(2, held_up, staleness)
    assert slow[0] == [staleness + 1] and slow[1] == [staleness]
    assert max(fast[2], slow[2]) <= staleness and fast[3] == slow[3] == 40 * 41 // 2


def stress(world, staleness, seed):
    generator = random.Random(f"{seed} {world.rank}")
    slow = generator.choice([0, 0, 0.002, 0.01])
    trainer, _ = counting(world, staleness, lambda: time.sleep(generator.random() * slow), shards=8)
    stale = [trainer.step(batch).staleness for batch in trainer.batches(Numbers(160), batch_size=8)]
    return max(stale, default=0), applied(trainer)


@pytest.mark.parametrize("staleness", [0, 1, 4])
@pytest.mark.parametrize("seed", some([0], range(8)))
def test_no_gradient_is_staler_than_the_bound(pool, staleness, seed):
    for worst, total in pool.run(4, stress, staleness, seed):
        assert worst <= staleness and total == 160 * 161 // 2


# Training


def problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 20, generator=generator)
    return list(zip(x, x[:, :5].argmax(1), strict=True))


def learn(world):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 5))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda updates: 1 / (1 + updates / 100))

    def loss_fn(model, shard):
        x, y = shard
        return F.cross_entropy(model(x), y)

    trainer = lockstep.Trainer(
        net, optimizer, loss_fn, shards=4, clip=5.0, scheduler=schedule, strategy=lockstep.Async(staleness=4)
    )
    first = last = None
    for batch in trainer.batches(problem(), batch_size=64, epochs=8):
        last = trainer.step(batch)
        first = first or last
    metrics = trainer.evaluate(problem(), lambda model, shard: (model(shard[0]).argmax(1) == shard[1]).float().mean())
    state = {name: value.clone() for name, value in net.state_dict().items()}
    return metrics, (first.loss, last.loss), {name: value.numpy() for name, value in state.items()}, schedule.last_epoch


def test_it_learns_and_all_workers_end_with_the_same_bits(pool):
    """Weights and running statistics; the schedule goes on with every update, at every owner."""
    results = pool.run(3, learn)
    for accuracy, (first, last), state, updates in results:
        assert accuracy > 0.9 and last < first and updates == 8 * 8 * 4
        assert all((state[name] == value).all() for name, value in results[0][2].items())


# Stop and go on


def some_of_it(world, folder, num_workers, steps):
    trainer, used = counting(world, 4, optimizer=lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.0))
    if steps is None or (Path(folder) / "go-on").exists():
        trainer.load(folder)
    world.barrier()
    for number, batch in enumerate(trainer.batches(Numbers(61), batch_size=16, epochs=2, **loading(num_workers))):
        trainer.step(batch)
        if number + 1 == steps:
            break
    if steps is not None:
        trainer.save(folder)
        if world.is_main:
            (Path(folder) / "go-on").touch()
    return used, applied(trainer), trainer.steps


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stopped_run_goes_on_with_what_nobody_has_used(pool, tmp_path, num_workers):
    """On other numbers of workers, in mid-epoch, also with what loader processes had claimed ahead."""
    used = []
    for workers, steps in ((3, 2), (2, 5), (4, 3), (2, None)):
        results = pool.run(workers, some_of_it, str(tmp_path), num_workers, steps)
        used += [sample for each, *_ in results for sample in each]
        assert {total for _, total, _ in results} == {sum(used)}
        assert len({count for *_, count in results}) == 1
    assert sorted(used) == sorted(2 * list(range(1, 62)))


def with_state(world, folder, steps):
    trainer, _ = counting(world, 4, optimizer=lambda params: torch.optim.Adam(params, lr=0.1))
    if not steps:
        trainer.load(folder)
    for batch in trainer.batches(Numbers(64), batch_size=16):
        if trainer.steps >= steps:
            break
        trainer.step(batch)
    else:
        raise AssertionError("the feed has ended")
    if steps:
        trainer.save(folder)
    tensors = trainer.state_dict()["tensors"].items()
    return trainer.steps, {name: value.numpy() for name, value in tensors if not name.startswith("random/")}


def test_the_optimizer_goes_on_too(pool, tmp_path):
    saved, _ = pool.run(2, with_state, str(tmp_path), 4)
    for steps, tensors in pool.run(3, with_state, str(tmp_path), 0):
        assert steps == saved[0] == 8 and tensors.keys() == saved[1].keys()
        assert all((tensors[name] == value).all() for name, value in saved[1].items())
        assert tensors["optimizer/weight/step"] == 8 and tensors["optimizer/weight/exp_avg"].any()


def loaded_by_hand(world):
    trainer, used = counting(world, 4)
    trainer.model.load_state_dict({name: torch.full_like(each, 2) for name, each in trainer.model.state_dict().items()})
    for batch in trainer.batches(Numbers(20), batch_size=10):
        trainer.step(batch)
    return sum(used), {value for each in trainer.model.parameters() for value in each.flatten().tolist()}


def test_weights_that_are_loaded_by_hand_are_what_is_trained(pool):
    results = pool.run(2, loaded_by_hand)
    assert sum(used for used, _ in results) == 20 * 21 // 2
    assert all(values == {2 - 20 * 21 // 2, 2} for _, values in results)


def from_synchronous(world, folder, strategy, steps):
    net = Counting()

    def loss_fn(model, shard):
        return model(shard) * len(shard)  # A synchronous step divides by the number of samples.

    trainer = lockstep.Trainer(
        net, torch.optim.SGD(net.parameters(), lr=1.0), loss_fn, shards=4, strategy=strategy, seed=1
    )
    if strategy is not None:
        trainer.load(folder)
    used = []
    for batch in trainer.batches(Numbers(64), batch_size=8):
        used += [int(x) for shard in batch.shards for x in shard.batch]
        trainer.step(batch)
        if strategy is None and trainer.steps == steps:
            break
    if strategy is None:
        trainer.save(folder)
    return used


def test_a_synchronous_run_can_go_on_asynchronously(pool, tmp_path):
    used = pool.run(2, from_synchronous, str(tmp_path), None, 3)
    used += pool.run(3, from_synchronous, str(tmp_path), lockstep.Async(), 0)
    assert sorted(sample for each in used for sample in each) == list(range(1, 65))


# Things that go wrong


def fails_once(world):
    calls = 0

    def pause():
        nonlocal calls
        calls += 1
        if world.rank == 1 and calls == 2:
            raise ArithmeticError("bad sample")

    trainer, used = counting(world, 1, pause)
    lost = 0
    for batch in trainer.batches(Numbers(60), batch_size=20, epochs=2):
        before = len(used)
        try:
            trainer.step(batch)
        except ArithmeticError:
            lost = sum(used[before:])
    return lost, applied(trainer)


def test_a_shard_that_fails_is_left_out_and_nobody_waits_for_it(pool):
    results = pool.run(3, fails_once)
    lost = sum(each for each, _ in results)
    assert lost and {total for _, total in results} == {2 * 60 * 61 // 2 - lost}


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def stopped(world):
    calls, watching = 0, None
    pids = world.gather(os.getpid())

    def resume():
        give_up = time.monotonic() + 20
        while not is_stopped(pids[1]) and time.monotonic() < give_up:
            time.sleep(0.01)
        time.sleep(1.5)  # Longer than the slices in which the others wait.
        os.kill(pids[1], signal.SIGCONT)

    def pause():
        nonlocal calls
        calls += 1
        if world.rank == 1 and calls == 2:
            os.kill(os.getpid(), signal.SIGSTOP)

    if world.rank == 0:
        watching = threading.Thread(target=resume)
        watching.start()
    trainer, used = counting(world, 2, pause)
    for batch in trainer.batches(Numbers(60), batch_size=5):
        trainer.step(batch)
    if watching is not None:
        watching.join()
    return sum(used), applied(trainer)


def test_a_worker_that_is_stopped_for_a_while_loses_nothing(pool):
    results = pool.run(3, stopped)
    assert sum(used for used, _ in results) == 60 * 61 // 2
    assert {total for _, total in results} == {60 * 61 // 2}


def doomed(environ, words, staleness, victim):
    """Worker of a world of its own: the victim is killed in its third pass; the others write what they get."""
    os.environ.update(environ)
    torch.set_num_threads(1)
    world = lockstep.join(timeout=30)
    calls = 0

    def pause():
        nonlocal calls
        calls += 1
        if world.rank == victim and calls == 3:
            Path(words).write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)

    trainer, _ = counting(world, staleness, pause)
    try:
        for batch in trainer.batches(Numbers(10000), batch_size=5):
            trainer.step(batch)
    except lockstep.WorkerLost as error:
        Path(words).write_text(f"{time.time()} {error.ranks} {error}")


@pytest.mark.parametrize(
    ("staleness", "victim"), some([(0, 1), (4, 0)], [(k, rank) for k in (0, 1, 4) for rank in (0, 1)])
)
def test_a_worker_that_is_killed_is_named(tmp_path, staleness, victim):
    """Also the one that keeps the semaphore and the store."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = fork_context()
    processes = []
    for rank in range(3):
        environ = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        words = str(tmp_path / f"words-{rank}")
        processes.append(context.Process(target=doomed, args=(environ, words, staleness, victim)))
        processes[-1].start()
    try:
        for process in processes:
            process.join(40)
            assert process.exitcode is not None, "a worker hangs"
    finally:
        for process in processes:
            process.kill()
    died = float((tmp_path / f"words-{victim}").read_text())
    for rank in {0, 1, 2} - {victim}:
        when, ranks = re.match(r"(\S+) \((.*?),?\)", (tmp_path / f"words-{rank}").read_text()).groups()
        assert str(victim) in ranks.split(", ") and float(when) - died < 2


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(10))


def refused(world):
    net, texts = nn.Linear(3, 3), []

    def no_loss(model, shard):
        return None

    def attempt(function):
        with pytest.raises(lockstep.UsageError) as caught:
            function()
        texts.append(str(caught.value))

    def make(optimizer=None, **options):
        optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
        return lockstep.Trainer(net, optimizer, no_loss, shards=2, strategy=lockstep.Async(), **options)

    attempt(lambda: make(zero=1))
    attempt(lambda: make(wire=lockstep.wire.Int8()))
    attempt(lambda: make(scaler=torch.amp.GradScaler("cpu")))
    attempt(lambda: make(torch.optim.Adafactor(net.parameters())))
    trainer = make()
    attempt(lambda: trainer.batches(Stream(), 2))
    attempt(lambda: trainer.step(torch.zeros(4, 3)))
    attempt(lambda: trainer.step(next(trainer.batches(Numbers(8), 2))))
    return texts


def test_what_cannot_be_is_told(pool):
    words = ["zero=0", "wire with Async", "loss scale", "element by element", "map-style"]
    words += ["one shard that this worker has claimed", "must return the mean loss"]
    for texts in pool.run(1, refused):
        assert all(word in text for word, text in zip(words, texts, strict=True)), texts


def apart(world):
    """Worker 0 saves in mid-feed, where the others do not come by."""
    trainer, _ = counting(world, 8)
    for batch in trainer.batches(Numbers(40), batch_size=10):
        trainer.step(batch)
        if world.rank == 0:
            trainer.state_dict()


def test_a_save_where_not_all_come_by_is_told(pool):
    for ok, text in pool.run(2, apart, expect_failure=True):
        assert not ok and "save and evaluate where all of them come by" in text
