"""Mixed collectives on backend shm, with random sizes, dtypes, reductions, groups and delays, and with workers killed.

All workers draw the same operations from one seed, and each computes by itself what every result must be. The long
form is run with LOCKSTEP_STRESS=10000 (operations per number of workers).
"""

import contextlib
import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from amount import some
from processes import fork_context

from lockstep.comm import shm
from lockstep.comm.shm.queue import waited_for
from lockstep.errors import LockstepError, WorkerLost

OPERATIONS = int(os.environ.get("LOCKSTEP_STRESS", "30"))
NOTICE_S = 2
SLACK_S = 8
"""For a machine with fewer cores than workers, on which a worker may not run for seconds."""

pytestmark = pytest.mark.timeout(max(120, OPERATIONS * 2))

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.bool)
MAX_NUMEL = 400_000
HELD = 300_000


class Worker:
    """One worker's part in the stress."""

    def __init__(self, rank, size, seed):
        self.rank, self.size = rank, size
        self.common = random.Random(seed)
        self.own = random.Random(f"{seed}/{rank}")
        self.groups = self.make_groups()

    def make_groups(self):
        everybody = tuple(range(self.size))
        chosen = [everybody]
        for _ in range(2 if self.size > 2 else 0):
            chosen.append(tuple(sorted(self.common.sample(everybody, self.common.randint(2, self.size - 1)))))
        return [(ranks, self.make_group(ranks)) for ranks in chosen]

    def make_group(self, ranks):
        group = dist.new_group(ranks, backend="shm", timeout=timedelta(seconds=60))
        if self.rank not in ranks:
            return None
        return group, shm.allocate(group, HELD, torch.uint8)

    def step(self):
        """One operation, the same on all workers."""
        ranks, member = self.common.choice(self.groups)
        name = self.common.choice(("all_reduce",) * 3 + tuple(OPERATIONS_BY_NAME))
        dtype = self.common.choice(DTYPES)
        numel = int(self.common.choice((1, 10, 1000, 30_000, MAX_NUMEL)) * self.common.random())
        choice, seed = self.common.random(), self.common.getrandbits(32)
        if member is None:
            return
        if self.own.random() < 0.1:
            time.sleep(self.own.random() * 0.005)
        group, held = member
        generator = torch.Generator().manual_seed(seed)
        parts = [(torch.rand(numel, generator=generator) * 20).to(dtype) for _ in ranks]
        context = Context(group, ranks, ranks.index(self.rank), parts, held, choice, self.own)
        OPERATIONS_BY_NAME[name](context)


class Context:
    """What one operation works on."""

    def __init__(self, group, ranks, me, parts, held, choice, own):
        self.group, self.ranks, self.me, self.parts, self.choice = group, ranks, me, parts, choice
        self.numel, self.dtype = parts[0].numel(), parts[0].dtype
        self.held, self.own = held, own

    def mine(self):
        """This worker's input: in shared memory, contiguous or not, as chance has it."""
        part, draw = self.parts[self.me], self.own.random()
        num_bytes = part.numel() * part.itemsize
        if draw < 0.5 and num_bytes <= self.held.numel():
            return self.held[:num_bytes].view(part.dtype).copy_(part)
        if draw < 0.6:
            return torch.stack((part, part), 1)[:, 0]
        return part.clone()

    def empty(self, numel=None):
        return torch.empty(self.numel if numel is None else numel, dtype=self.dtype)


def check(found, wanted, what):
    if not torch.equal(found, wanted):
        raise AssertionError(f"{what}: wrong result, first difference at {(found != wanted).nonzero()[0].tolist()}")


def reference(parts, op):
    wide = [part.float() if part.dtype == torch.bfloat16 else part for part in parts]
    result = wide[0].clone()
    for part in wide[1:]:
        if op == dist.ReduceOp.SUM:
            result = result | part if result.dtype == torch.bool else result + part
        else:
            result = torch.maximum(result, part) if op == dist.ReduceOp.MAX else torch.minimum(result, part)
    return result.to(parts[0].dtype)


def pick_op(context):
    return (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)[int(context.choice * 3)]


def all_reduce(context):
    op, mine = pick_op(context), context.mine()

    def start():
        return dist.all_reduce(mine, op, group=context.group, async_op=context.own.random() < 0.6)

    with waited_for() if context.own.random() < 0.5 else contextlib.nullcontext():
        work = in_a_pass(start) if context.own.random() < 0.4 else start()
    if work is not None:
        await_somehow(work, context.own.choice(("wait", "help", "look", "future")))
    check(mine, reference(context.parts, op), f"all_reduce {op} {context.dtype} {context.numel}")


def in_a_pass(start):
    """What `start` gives, called inside a backward pass."""
    found = []
    value = torch.ones(1, requires_grad=True) * 2
    value.register_hook(lambda _: found.append(start()))
    value.backward()
    return found[0]


def await_somehow(work, way):
    if way == "help":
        work.help(lambda: None)
    elif way == "look":
        while not work.is_completed():
            time.sleep(0.0001)
    elif way == "future":
        await_future(work.get_future())
    work.wait()


def await_future(future):
    try:
        future.wait()
    except RuntimeError as error:  # It has quoted what `work.wait` raises.
        assert "error when running the callback: WorkerLost: " in str(error)


def reduce(context):
    op, mine, root = pick_op(context), context.mine(), int(context.choice * len(context.ranks))
    dist.reduce(mine, context.ranks[root], op, group=context.group)
    if root == context.me:
        check(mine, reference(context.parts, op), "reduce")


def broadcast(context):
    mine, root = context.mine(), int(context.choice * len(context.ranks))
    dist.broadcast(mine, context.ranks[root], group=context.group)
    check(mine, context.parts[root], "broadcast")


def all_gather(context):
    outs = [context.empty() for _ in context.ranks]
    dist.all_gather(outs, context.mine(), group=context.group)
    check(torch.cat(outs), torch.cat(context.parts), "all_gather")


def reduce_scatter(context):
    size, op = len(context.ranks), pick_op(context)
    numel = context.numel // size
    mine = context.mine()[: numel * size]
    out = context.empty(numel)
    options = dist.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, False
    context.group._reduce_scatter_base(out, mine, options).wait()
    wanted = reference(context.parts, op)[context.me * numel : (context.me + 1) * numel]
    check(out, wanted, "reduce_scatter")


def all_to_all(context):
    size = len(context.ranks)
    cuts = [int(context.numel * (other + 1) / size * context.choice) for other in range(size)]
    outs = [context.empty(cuts[context.me]) for _ in range(size)]
    dist.all_to_all(outs, [context.parts[context.me][:cut].clone() for cut in cuts], group=context.group)
    for out, part in zip(outs, context.parts, strict=True):
        check(out, part[: cuts[context.me]], "all_to_all")


def messages(context):
    size = len(context.ranks)
    after, before = context.ranks[(context.me + 1) % size], (context.me - 1) % size
    out, tag = context.empty(), int(context.choice * 100)
    works = [
        dist.isend(context.mine(), after, group=context.group, tag=tag),
        dist.irecv(out, context.ranks[before], group=context.group, tag=tag),
    ]
    for work in works:
        work.wait()
    check(out, context.parts[before], "send and receive")
    dist.barrier(group=context.group)


def scatter(context):
    root, out = int(context.choice * len(context.ranks)), context.empty()
    dist.scatter(out, context.parts if root == context.me else None, context.ranks[root], group=context.group)
    check(out, context.parts[context.me], "scatter")
    outs = [context.empty() for _ in context.ranks] if root == context.me else None
    dist.gather(context.mine(), outs, context.ranks[root], group=context.group)
    if outs is not None:
        check(torch.cat(outs), torch.cat(context.parts), "gather")


OPERATIONS_BY_NAME = {
    function.__name__: function
    for function in (all_reduce, reduce, broadcast, all_gather, reduce_scatter, all_to_all, messages, scatter)
}


def serve(connection, rank, size, port, seed, operations, victims):
    """Run the stress in a fresh process; victims[rank] says after which operation it kills itself."""
    torch.set_num_threads(1)
    shm.register()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    try:
        dist.init_process_group("shm", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        worker = Worker(rank, size, seed)
        for number in range(operations):
            if victims.get(rank) == number:
                connection.send(("killed", time.monotonic(), ""))
                os.kill(os.getpid(), signal.SIGKILL)
            worker.step()
        dist.barrier()
    except WorkerLost as error:
        connection.send(("lost", time.monotonic(), str(error)))
    except LockstepError as error:
        connection.send(("error", time.monotonic(), f"{type(error).__name__}: {error}"))
    except BaseException as error:
        connection.send(("wrong", time.monotonic(), f"{type(error).__name__}: {error}"))
        raise
    else:
        connection.send(("done", time.monotonic(), ""))
    dist.destroy_process_group()


def stress(size, seed, operations, victims=()):
    """What became of each worker: (how, when, text)."""
    context = fork_context()
    os.environ["OMP_NUM_THREADS"] = "1"
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe(duplex=False)
        args = (theirs, rank, size, store.port, seed, operations, dict(victims))
        processes.append(context.Process(target=serve, args=args, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    give_up = time.monotonic() + 60 + operations
    try:
        return [receive(pipe, give_up) for pipe in pipes]
    finally:
        for process in processes:
            process.join(timeout=10)
            assert process.exitcode is not None, "a worker hangs at its end"
            process.kill()


def receive(pipe, give_up):
    assert pipe.poll(max(0, give_up - time.monotonic())), "a worker hangs"
    return pipe.recv()


@pytest.mark.parametrize("size", some((3, 8), (2, 3, 4, 8)))
def test_random_operations_are_right(size):
    outcomes = stress(size, seed=size, operations=OPERATIONS)
    assert [how for how, _, _ in outcomes] == ["done"] * size, outcomes


@pytest.mark.parametrize("size, seed", [(2, 1), (3, 2), (4, 3)] + [(8, seed) for seed in range(OPERATIONS // 500)])
def test_killed_workers_are_named_in_time(size, seed):
    chance = random.Random(seed)
    victim = chance.randrange(size)
    outcomes = stress(size, seed, 10_000, {victim: chance.randrange(5, 60)})
    killed = outcomes[victim]
    assert killed[0] == "killed", outcomes
    others = [outcome for rank, outcome in enumerate(outcomes) if rank != victim]
    assert any(f"worker {victim} " in text for _, _, text in others), outcomes
    for how, when, text in others:
        # One who noticed it in another group may have left this one, where the victim had come: then it is named.
        assert how == "lost" and (f"worker {victim} " in text or "left the group" in text), outcomes
        assert when - killed[1] < NOTICE_S + SLACK_S, outcomes
