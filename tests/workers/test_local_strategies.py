"""LocalSGD and DiLoCo against loops written by hand, their bits, their bytes, and going on later."""

import hashlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from amount import some
from models import CNN, MLP
from torch import nn

import lockstep
from lockstep import wire

BACKENDS = some(["gloo"], ["shm", "gloo"])
SHARDS, BATCH = 6, 12


def loss_fn(model, shard):
    x, y = shard
    return F.cross_entropy(model(x), y)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1)


def momentum(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params):
    """With an eps that is not tiny: else nearly zero gradients, whose last bits differ by processor, move weights."""
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-3)


def outer_sgd(params):
    return torch.optim.SGD(params, lr=1.0)


def outer_nesterov(params):
    return torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)


def batch(step, kind=MLP, size=BATCH):
    return kind.batch(size, torch.Generator().manual_seed(100 + step), torch.float)


def make(strategy, kind=MLP, optimizer=sgd, **options):
    torch.manual_seed(3)
    net = kind()
    options = {"shards": SHARDS, "seed": 7} | options
    return lockstep.Trainer(net, optimizer(net.parameters()), loss_fn, strategy=strategy, **options)


def weights(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def digest(trainer):
    sha = hashlib.sha256()
    for name, tensor in sorted(trainer.state_dict()["tensors"].items()):
        sha.update(name.encode() + tensor.numpy().tobytes())
    return sha.hexdigest()


# Against loops written by hand


class Worker:
    """One worker of a reference: its own weights and optimizer, its part of every batch, clipped by its own norm."""

    def __init__(self, rank, size, optimizer, clip=None):
        torch.manual_seed(3)
        self.net = MLP()
        self.optimizer = optimizer(self.net.parameters())
        self.rows = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        self.clip = clip

    def step(self, number):
        x, y = batch(number)
        F.cross_entropy(self.net(x[self.rows]), y[self.rows]).backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def reference(size, steps, every, delay, optimizer, outer, clip=None):
    """Every worker's weights after so many steps; none in a round of its own if `steps` is a multiple of `every`."""
    workers = [Worker(rank, size, optimizer, clip) for rank in range(size)]
    common = nn.Parameter(weights(workers[0].net))
    outer = outer([common])
    sent = None
    for number in range(steps):
        for worker in workers:
            worker.step(number)
        done = (number + 1) % every
        if sent is not None and done == delay % every:
            receive(workers, common, outer, sent)
            sent = None
        if done == 0:
            sent = [weights(worker.net) for worker in workers]
            if not delay:
                receive(workers, common, outer, sent)
                sent = None
    return [weights(worker.net) for worker in workers]


def receive(workers, common, outer, sent):
    common.grad = common.detach() - torch.stack(sent).mean(0)
    outer.step()
    for worker, then in zip(workers, sent, strict=True):
        nn.utils.vector_to_parameters(weights(worker.net) + common.detach() - then, worker.net.parameters())


def train(world, strategy, optimizer, steps, clip=None):
    trainer = make(strategy, optimizer=optimizer, clip=clip)
    for number in range(steps):
        trainer.step(batch(number))
    return weights(trainer.model.module).numpy()


def close(found, expected, tolerance=1e-6):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(one), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("workers", "optimizer"), some([(2, adamw), (3, momentum)], itertools.product((2, 3, 6), (momentum, adamw)))
)
def test_local_sgd_is_the_mean_of_workers(pool, workers, optimizer):
    found = pool.run(workers, train, lockstep.LocalSGD(every=4), optimizer, 8, 0.5)
    close(found, reference(workers, 8, 4, 0, optimizer, outer_sgd, 0.5), 2e-6)
    assert all((one == found[0]).all() for one in found)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_diloco_is_the_loop_of_the_paper(pool, workers):
    found = pool.run(workers, train, lockstep.DiLoCo(every=3), adamw, 12)
    close(found, reference(workers, 12, 3, 0, adamw, outer_nesterov), 5e-6)
    assert all((one == found[0]).all() for one in found)


@pytest.mark.parametrize(
    ("kind", "every", "delay"),
    some(
        [(lockstep.LocalSGD, 4, 1), (lockstep.DiLoCo, 4, 3), (lockstep.LocalSGD, 3, 3)],
        [(kind, *each) for kind in (lockstep.LocalSGD, lockstep.DiLoCo) for each in ((4, 1), (4, 3), (3, 3), (1, 1))],
    ),
)
def test_overlap_keeps_local_progress(pool, kind, every, delay):
    """After 11 steps an exchange may be under way, and workers differ by what they have learned by themselves."""
    outer = outer_sgd if kind is lockstep.LocalSGD else outer_nesterov
    found = pool.run(3, train, kind(every=every, overlap=True, delay=delay), momentum, 11)
    close(found, reference(3, 11, every, delay, momentum, outer), 5e-6)


def test_every_step_is_synchronous_training(pool):
    found = pool.run(3, train, lockstep.LocalSGD(every=1), sgd, 6)
    expected = pool.run(1, train, None, sgd, 6)[0]
    close(found, [torch.from_numpy(expected)] * 3)


def test_alone_local_sgd_is_plain_training(pool):
    expected = pool.run(1, train, None, adamw, 6)[0]
    close(pool.run(1, train, lockstep.LocalSGD(every=2), adamw, 6), [torch.from_numpy(expected)])


def test_outer_sgd_is_local_sgd(pool):
    """Bit for bit."""
    local = pool.run(3, train, lockstep.LocalSGD(every=2), adamw, 6)
    outer = pool.run(3, train, lockstep.DiLoCo(every=2, outer=outer_sgd), adamw, 6)
    assert all((one == other).all() for one, other in itertools.product(local, outer))


# What workers hold, and what they send


def rounds_of(world, kind, strategy):
    trainer = make(strategy, kind=kind, optimizer=adamw)
    hashes = []
    for number in range(6):
        trainer.step(batch(number, kind))
        tensors = [*trainer.model.module.parameters(), *trainer.model.module.buffers()]
        hashes.append(hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest())
    return hashes


@pytest.mark.parametrize("strategy", [lockstep.LocalSGD(every=3), lockstep.DiLoCo(every=3, wire=wire.Int8(block=64))])
def test_replicas_are_equal_after_an_exchange(pool, strategy):
    """Weights and buffers, counts included: 6 shards on 4 workers are 2 + 2 + 1 + 1. And the same bits each time."""
    first, again = (pool.run(4, rounds_of, CNN, strategy) for _ in range(2))
    for step, hashes in enumerate(zip(*first, strict=True)):
        assert len(set(hashes)) == (1 if step % 3 == 2 else 4)
    assert first == again


class Wide(MLP):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 512), nn.GELU(), nn.Linear(512, 256), nn.GELU(), nn.Linear(256, 5))


def volume(world, strategy):
    trainer = make(strategy, kind=Wide, bucket_cap_mb=0.1)
    sent = [trainer.model.companion.num_bytes]
    for number in range(4):
        trainer.step(batch(number))
        sent.append(trainer.model.companion.num_bytes)
    return sent, sum(param.numel() for param in trainer.model.parameters())


@pytest.mark.parametrize("encoding", [None, wire.Half("fp16"), wire.Int8()])
def test_volume(pool, encoding):
    """2(N-1)/N of the weights each `every` steps, or what the wire promises, within 2 %; nothing before."""
    for sent, numel in pool.run(3, volume, lockstep.LocalSGD(every=4, wire=encoding)):
        assert sent[:4] == [0] * 4
        promised = 2 * 2 / 3 * 4 * numel if encoding is None else encoding.bytes_promised(numel, 3)
        assert sent[4] == pytest.approx(promised, rel=0.02)


@pytest.mark.parametrize(
    ("encoding", "share"), [(wire.Half("fp16"), 0.01), (wire.Int8(block=64), 0.05), (wire.LowRank(4), 0.5)]
)
@pytest.mark.parametrize("overlap", some([True], [False, True]))
def test_wires_come_close(pool, encoding, share, overlap):
    """As a share of the way that the weights have come."""
    plain = reference(2, 12, 3, int(overlap), adamw, outer_nesterov)
    start = weights(Worker(0, 1, adamw).net)
    for one, other in zip(
        pool.run(2, train, lockstep.DiLoCo(every=3, wire=encoding, overlap=overlap), adamw, 12), plain, strict=True
    ):
        assert (torch.from_numpy(one) - other).norm() < share * (other - start).norm()


# Losses, weights, overflows, schedules


def own_losses(world):
    """Two shards a worker, of which the second has no tokens: what is counted is the worker's own."""

    def token_loss(model, shard):
        x, y, mask = shard
        losses = F.cross_entropy(model(x), y, reduction="none") * mask
        return losses.sum() / mask.sum().clamp(min=1), mask.sum()

    torch.manual_seed(3)
    net = MLP()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer := sgd(net.parameters()), 1, 0.5)
    trainer = lockstep.Trainer(
        net, optimizer, token_loss, shards=4, scheduler=scheduler, strategy=lockstep.LocalSGD(every=10)
    )
    x, y = batch(0, MLP, 8)
    mask = torch.tensor([1.0, 1, 0, 0, 1, 0, 0, 1])
    rows = slice(4 * world.rank, 4 * world.rank + 4)
    expected = (F.cross_entropy(net(x[rows]), y[rows], reduction="none") * mask[rows]).sum() / 2
    out = trainer.step((x, y, mask))
    rest = trainer.step(tuple(each[:1] for each in (x, y, mask)))
    return out.loss - expected.item(), out.weight, rest.weight, out.lr, rest.lr


def test_a_step_reports_what_this_worker_counted(pool):
    for rank, (difference, weight, rest, *rates) in enumerate(pool.run(2, own_losses)):
        assert abs(difference) < 1e-5 and weight == 2
        assert rest == 1 - rank and rates == [0.1, 0.05]  # The second batch has one sample; worker 1 has none of it.


def overflow(world):
    """An overflow on worker 1 alone is worker 1's alone, until it is saved."""
    torch.manual_seed(3)
    net = MLP()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer = lockstep.Trainer(
        net, momentum(net.parameters()), loss_fn, shards=2, scaler=scaler, strategy=lockstep.LocalSGD(every=4)
    )
    skipped = []
    for number in range(4):
        x, y = batch(number)
        x[BATCH - 1] = torch.inf if number == 1 else x[BATCH - 1]
        skipped.append(trainer.step((x, y)).skipped)
    scale = scaler.get_scale()
    return skipped, scale, digest(trainer), scaler.get_scale(), all(p.isfinite().all() for p in net.parameters())


def test_every_worker_has_a_scale_of_its_own(pool):
    first, second = pool.run(2, overflow)
    assert (first[0], second[0]) == ([False] * 4, [False, True, False, False])
    assert (first[1], second[1]) == (64.0, 32.0)
    assert first[2:] == second[2:] and first[3:] == (32.0, True)


# To go on later


def run_until(world, strategy, folder, first, last, save_at=()):
    """The hash at the end, and the weights as they are without ending the round."""
    scheduler = []

    def optimizer(params):
        made = adamw(params)
        scheduler.append(torch.optim.lr_scheduler.CosineAnnealingLR(made, 20))
        return made

    torch.manual_seed(3)
    net = CNN()
    made = optimizer(net.parameters())
    trainer = lockstep.Trainer(net, made, loss_fn, shards=SHARDS, scheduler=scheduler[0], seed=7, strategy=strategy)
    if first:
        trainer.load(folder)
        assert trainer.steps == first
    for number in range(first, last):
        trainer.step(batch(number, CNN))
        if trainer.steps in save_at:
            trainer.save(folder)
    return digest(trainer)


STRATEGIES = [
    lockstep.LocalSGD(every=4),
    lockstep.DiLoCo(every=4, outer=outer_nesterov, wire=wire.Int8(block=64)),
    lockstep.DiLoCo(every=4, outer=adamw, overlap=True, delay=2),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("save_at", some([8], [6, 8, 9]))
def test_resumed_as_if_it_had_never_stopped(pool, tmp_path, strategy, save_at):
    """A save ends the round; the run that saved and the one that goes on from there are the same to the bit."""
    expected = pool.run(2, run_until, strategy, str(tmp_path), 0, 15, (save_at,))
    assert len(set(expected)) == 1
    found = pool.run(2, run_until, strategy, str(tmp_path), save_at, 15)
    assert found == expected


def test_resumed_on_other_numbers_of_workers_and_without_a_strategy(pool, tmp_path):
    folder = str(tmp_path)
    pool.run(3, run_until, STRATEGIES[1], folder, 0, 5, (5,))
    for workers, strategy in ((1, STRATEGIES[1]), (2, STRATEGIES[2]), (3, None)):
        assert len(set(pool.run(workers, run_until, strategy, folder, 5, 8))) == 1
    plain = str(tmp_path / "plain")
    pool.run(2, run_until, None, plain, 0, 3, (3,))
    assert len(set(pool.run(3, run_until, STRATEGIES[2], plain, 3, 6))) == 1


def after_a_loop(world, strategy):
    trainer = make(strategy, optimizer=adamw)
    data = list(zip(*batch(0, MLP, 40), strict=True))
    for each in trainer.batches(data, batch_size=BATCH, epochs=2):
        trainer.step(each)
    assert trainer.steps == 8
    return hashlib.sha256(weights(trainer.model.module).numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("strategy", [lockstep.LocalSGD(every=5), lockstep.DiLoCo(every=6, overlap=True, delay=4)])
def test_a_loop_over_batches_ends_with_equal_weights(pool, strategy):
    assert len(set(pool.run(3, after_a_loop, strategy))) == 1


def evaluated(world):
    trainer = make(lockstep.DiLoCo(every=10, overlap=True), optimizer=adamw)
    for number in range(13):
        trainer.step(batch(number))
    x, y = batch(50)
    data = list(zip(x, y, strict=True))
    found = trainer.evaluate(data, lambda model, shard: loss_fn(model, shard))
    with torch.no_grad():
        alone = F.cross_entropy(trainer.model.module(x), y).item()
    before = weights(trainer.model.module)
    assert trainer.evaluate(data, lambda model, shard: loss_fn(model, shard)) == found
    assert torch.equal(before, weights(trainer.model.module))  # A second time nothing is left to exchange.
    return found, alone


def test_metrics_are_of_one_model(pool):
    results = pool.run(3, evaluated)
    assert len(set(results)) == 1 and results[0][0] == pytest.approx(results[0][1], rel=1e-5)


# Things that go wrong


def flipped(world, policy):
    trainer = make(lockstep.LocalSGD(every=2), check_every=4, on_difference=policy)
    for number in range(8):
        if number == 5 and world.rank == 1:
            bits = trainer._stepper._anchors["weights"].common[2].data.view(torch.int32)
            bits[3, 4] ^= 1 << 7
        try:
            trainer.step(batch(number))
        except lockstep.ReplicaDiffers as error:
            return trainer.steps, str(error)
    return trainer.steps, digest(trainer)


@pytest.mark.filterwarnings("ignore:worker 1")
def test_a_flipped_bit_of_the_common_weights_is_found(pool):
    for steps, text in pool.run(3, flipped, "stop"):
        assert steps == 8 and "worker 1" in text and "net.2.weight" in text
    assert len({found for _, found in pool.run(3, flipped, "repair")}) == 1


def one_ends(world, strategy):
    trainer = make(strategy)
    for number in range(6):
        if world.rank == 1 and number == 3:
            return None
        try:
            trainer.step(batch(number))
        except lockstep.WorkerLost as error:
            return number, str(error)
    return "went on"


@pytest.mark.parametrize("strategy", [lockstep.LocalSGD(every=5), lockstep.DiLoCo(every=4, overlap=True, delay=2)])
def test_a_worker_that_leaves_is_missed_at_the_exchange(pool, strategy):
    for found in pool.run(3, one_ends, strategy, timeout=5)[::2]:
        number, text = found
        assert number == (4 if not strategy.overlap else 5) and "worker 1" in text


def refused(world):
    texts = []
    for options in ({"zero": 1}, {"wire": wire.Int8()}):
        with pytest.raises(lockstep.UsageError) as caught:
            make(lockstep.LocalSGD(every=2), **options)
        texts.append(str(caught.value))
    with pytest.raises(lockstep.UsageError) as caught:
        make(lockstep.DiLoCo(every=2, outer=lambda params: None))
    return [*texts, str(caught.value)]


def test_misuse_is_told(pool):
    for zero, encoding, outer in pool.run(2, refused):
        assert "zero=0" in zero and "to the strategy" in encoding.replace("\n", " ") and "NoneType" in outer
