"""Workers of several hosts: shared memory within each, and between them every byte once for all workers of a host.

Hosts are network namespaces. Workers are forks of one server, so that they need not import torch; `lockstep run` on
several hosts is in test_hosts.py.
"""

import hashlib
import os
import signal
from datetime import timedelta
from pathlib import Path

import netns
import pytest
import torch
import torch.distributed as dist
from processes import fork_context
from torch import nn

import lockstep
from lockstep.comm.hosts.group import HostsGroup
from lockstep.comm.hosts.places import Places

needs_hosts = pytest.mark.skipif(bool(netns.missing()), reason=netns.missing() or "-")
full = pytest.mark.skipif("FULL" not in os.environ, reason="needs FULL=1: more numbers of hosts and workers")
DEADLINE_S = 60


def _serve(host, environ, connection, function, args):
    host.enter()
    os.environ.update(environ)
    torch.set_num_threads(1)
    with lockstep.join(seed=0, timeout=20) as world:
        connection.send(function(world, *args))


class Workers:
    """Starts workers on hosts, so many on each, for one function."""

    def __init__(self, hosts):
        self.hosts = hosts
        self._port = 29400

    def run(self, counts, function, *args):
        """Results by rank; None from a worker that died."""
        context, started = fork_context(), []
        self._port += 1
        for number, count in enumerate(counts):
            for local in range(count):
                ours, theirs = context.Pipe()
                environ = {
                    "RANK": str(len(started)),
                    "WORLD_SIZE": str(sum(counts)),
                    "LOCAL_RANK": str(local),
                    "LOCAL_WORLD_SIZE": str(count),
                    "MASTER_ADDR": self.hosts[0].address,
                    "MASTER_PORT": str(self._port),
                    "OMP_NUM_THREADS": "1",
                }
                arguments = (self.hosts[number], environ, theirs, function, args)
                process = context.Process(target=_serve, args=arguments)
                process.start()
                theirs.close()
                started.append((process, ours))
        try:
            return [_result(connection) for _, connection in started]
        finally:
            for process, _ in started:
                process.join(10)
                process.kill()


def _result(connection):
    assert connection.poll(DEADLINE_S), "a worker does not answer"
    try:
        return connection.recv()
    except EOFError:
        return None


@pytest.fixture(scope="module")
def workers():
    with netns.hosts(3) as hosts:
        yield Workers(hosts)


def test_who_talks_to_whom():
    hosts = Places.of(["a", "b", "a", "a", "b"], 3)
    assert hosts.ranks == ((0, 2, 3), (1, 4))
    assert (hosts.mine, hosts.local, hosts.num_columns, hosts.column) == (0, 2, 2, {})
    assert not hosts.is_in_order
    everyone = [Places.of(["a", "b", "a", "a", "b"], rank) for rank in range(5)]
    assert everyone[0].column == {1: 1}
    assert everyone[4].column == {0: 2}
    told = {rank: places.partners for rank, places in enumerate(everyone)}
    for rank, places in enumerate(everyone):
        for host, ranks in enumerate(places.ranks):
            if host != places.mine:  # Each host has one worker that hears of this one.
                assert [other for other in ranks if rank in told[other]] == [places.partner(host)]


# --- Collectives ---


def inputs(size, numel, dtype):
    made = [torch.rand(numel, generator=torch.Generator().manual_seed(rank)) * 8 - 2 for rank in range(size)]
    return [each.to(dtype) for each in made]


def collectives(world):
    assert world.backend == "hosts" and isinstance(world.group, HostsGroup)
    rank, size = world.rank, world.size
    bits = []
    for numel in (0, 1, 1000, 60_001, 300_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            given = inputs(size, numel, dtype)
            mine, wanted = given[rank], sum(each.double() for each in given)
            near = {"rtol": 2e-2, "atol": 0.2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
            what = numel, dtype
            total = mine.clone()
            dist.all_reduce(total)
            assert torch.allclose(total.double(), wanted, **near), what
            bits.append(hashlib.sha256(total.view(torch.uint8).numpy().tobytes() if numel else b"").hexdigest())
            shared = world.group.allocate(numel, dtype)
            shared.copy_(mine)
            dist.all_reduce(shared)
            assert torch.equal(shared, total), what
            world.group.release(shared)
            for op, reduced in ((dist.ReduceOp.MAX, torch.stack(given).amax(0)), (dist.ReduceOp.AVG, wanted / size)):
                if dtype != torch.int64 or op == dist.ReduceOp.MAX:
                    total = mine.clone()
                    dist.all_reduce(total, op)
                    assert torch.allclose(total.double(), reduced.double(), **near), (what, op)
            everyone = [torch.zeros_like(mine) for _ in range(size)]
            dist.all_gather(everyone, mine)
            assert all(map(torch.equal, everyone, given)), what
            for root in (0, size - 1):
                sent = mine.clone()
                dist.broadcast(sent, root)
                assert torch.equal(sent, given[root]), (what, root)
            root = size - 1
            dist.gather(mine, everyone if rank == root else None, dst=root)
            scattered = torch.zeros_like(mine)
            dist.scatter(scattered, given if rank == root else None, src=root)
            assert torch.equal(scattered, mine), what
            total = mine.clone()
            dist.reduce(total, root)
            assert torch.allclose(total.double(), wanted if rank == root else mine.double(), **near), what
            if part := numel // size:
                whole, own = mine[: part * size].clone(), torch.zeros(part, dtype=dtype)
                dist.reduce_scatter_tensor(own, whole)
                assert torch.allclose(own.double(), wanted[rank * part : (rank + 1) * part], **near), what
                gathered = torch.zeros_like(whole)
                dist.all_gather_into_tensor(gathered, mine[:part].clone())
                assert torch.equal(gathered, torch.cat([each[:part] for each in given])), what
                dist.all_to_all_single(gathered, whole)
                assert torch.equal(gathered, torch.cat([each[rank * part : (rank + 1) * part] for each in given])), what
    got = torch.zeros(5)
    right, left = (rank + 1) % size, (rank - 1) % size
    for ends in (lambda work: work.wait(), lambda work: world.wait(work, "testing")):
        sent, received = dist.isend(got + rank, right), dist.irecv(got, left)
        with pytest.raises(RuntimeError):  # Which leaves the connection as it is.
            dist.irecv(torch.zeros(5), left, tag=7).wait(timedelta(milliseconds=1))
        ends(sent), ends(received)
        assert got[0] == left and received.is_completed()
        got.zero_()
        dist.barrier()
        dist.send(torch.ones(5), right, tag=7)
    messages = [dist.P2POp(dist.isend, torch.full((5,), rank * 1.0), right), dist.P2POp(dist.irecv, got, left)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    assert got[0] == left
    dist.barrier()
    inner = dist.new_group([1, size - 1], timeout=timedelta(seconds=20), use_local_synchronization=True)
    if rank in (1, size - 1):
        one = torch.ones(3)
        dist.all_reduce(one, group=inner)
        assert one[0] == 2
    return bits


@needs_hosts
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("counts", [(2, 2), (2, 1, 2), pytest.param((2, 2, 2), marks=full)])
def test_every_collective_and_the_same_bits_on_all(workers, counts):
    bits = workers.run(counts, collectives)
    assert all(each == bits[0] for each in bits) and bits[0]


# --- Training ---


def data():
    made = torch.Generator().manual_seed(1)
    return torch.utils.data.TensorDataset(
        torch.randn(240, 16, generator=made), torch.randint(0, 4, (240,), generator=made)
    )


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained_in_order(world, zero, shards):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 320), nn.BatchNorm1d(320), nn.ReLU(), nn.Dropout(0.1), nn.Linear(320, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    trainer = lockstep.Trainer(net, optimizer, loss_of, shards=shards, clip=1.0, seed=3, zero=zero)
    for batch in trainer.batches(data(), batch_size=48, epochs=1):
        trainer.step(batch)
    tensors = trainer.state_dict()["tensors"]
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def trained_fast(world, zero):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 320), nn.Tanh(), nn.Linear(320, 320), nn.Tanh(), nn.Linear(320, 4)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)
    for x, y in lockstep.shard(torch.utils.data.DataLoader(data(), batch_size=44)):
        loss_of(model, (x.double(), y)).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.tolist() for name, value in model.state_dict().items()}


def trained(world, shards):
    hashes = [trained_in_order(world, zero, shards) for zero in range(4)]
    weights = [trained_fast(world, zero) for zero in range(4)]
    return world.backend, hashes, weights


# 8 shards on 5 workers: the hosts have several roots each.
@needs_hosts
@pytest.mark.parametrize(
    ("counts", "shards"),
    [((2, 2), 4), ((2, 2, 2), 6), pytest.param((3, 2), 8, marks=full), pytest.param((1, 2), 5, marks=full)],
)
def test_hosts_train_as_one_worker(workers, counts, shards):
    ((_, (wanted, *_), (reference, *_)),) = workers.run((1,), trained, shards)
    for backend, hashes, weights in workers.run(counts, trained, shards):
        assert backend == "hosts"
        assert set(hashes) == {wanted}
        for found in weights:
            for name, value in reference.items():
                torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(value), rtol=1e-9, atol=1e-11)


# --- Bytes ---


def sent_bytes():
    """By this host, headers included, as the kernel counts."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split()[9])
    raise AssertionError("no eth0")


def counted(world, zero, in_order):
    """What this host sends in a step, over the bytes of the gradients."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batch = torch.randn(8, 512), torch.zeros(8, dtype=torch.long)
    if in_order:
        trainer = lockstep.Trainer(net, optimizer, loss_of, shards=world.size, zero=zero)
        take = iter(trainer.batches(torch.utils.data.TensorDataset(*batch), batch_size=8, epochs=10))
        step = lambda: trainer.step(next(take))
    else:
        model = lockstep.DataParallel(net, optimizer=optimizer, zero=zero)

        def step():
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        step()
    world.barrier()
    before = sent_bytes()
    world.barrier()
    for _ in range(4):
        step()
    world.barrier()
    return (sent_bytes() - before) / 4 / sum(4 * param.numel() for param in net.parameters())


@needs_hosts
@pytest.mark.parametrize(
    ("counts", "zero", "in_order"),
    [
        ((2, 2), 0, False),
        ((2, 2), 3, False),
        ((2, 2, 2), 1, True),
        pytest.param((2, 2), 0, True, marks=full),
        pytest.param((2, 2, 2), 0, False, marks=full),
        pytest.param((4, 4), 0, False, marks=full),
    ],
)
def test_a_bucket_crosses_the_link_once_however_many_workers_there_are(workers, counts, zero, in_order):
    found = workers.run(counts, counted, zero, in_order)
    by_host = [found[sum(counts[:host])] for host in range(len(counts))]
    promised = 2 * (len(counts) - 1)  # By all hosts together; who owns more of what is split sends less.
    assert promised <= sum(by_host) < 1.04 * promised, by_host
    assert zero or max(by_host) < 1.04 * promised / len(counts), by_host


# --- Failure ---


def loses_one(world):
    flat = torch.ones(1_000_000)
    dist.all_reduce(flat)
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for _ in range(3):
            world.wait(dist.all_reduce(flat, async_op=True), "adding")
    except lockstep.WorkerLost as error:
        return error.ranks, str(error)
    return None


@needs_hosts
def test_a_dead_worker_is_named_on_every_host(workers):
    found = workers.run((2, 2), loses_one)
    assert found[3] is None
    for ranks, text in found[:3]:
        assert 3 in ranks and "worker 3" in text, text


def calls_something_else(world):
    try:
        if world.rank == 3:
            dist.barrier()
        else:
            dist.all_reduce(torch.ones(1000))
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return None


@needs_hosts
def test_different_calls_are_told_on_every_host(workers):
    found = workers.run((2, 2), calls_something_else)
    assert all(name == "UsageError" and "worker 3 barrier" in text for name, text in found), found
