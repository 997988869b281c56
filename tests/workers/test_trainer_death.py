"""A worker that dies in mid-step of a Trainer: the others name it, and go on without it to the same bits."""

import itertools
import os
import signal
import time

import pytest
from amount import some
from processes import fork_context
from test_failure import free_port
from test_trainer_bits import digest, feed, make, train

import lockstep

WORKERS, VICTIM = 3, 1
SAVED_AT, DIES_IN, STEPS = 3, 5, 8
NOTICED_WITHIN_S = 10


def die_in_backward(trainer):
    """Kill this worker when its next backward pass comes to the first layer, its buckets partly sent."""
    first = next(trainer.model.module.parameters())
    first.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))


def train_until_lost(trainer, folder):
    """Steps with a checkpoint on the way, which one worker does not survive; the error, and when it was raised."""
    try:
        for batch in feed(trainer, "cnn"):
            if trainer.steps == DIES_IN and trainer.world.rank == VICTIM:
                die_in_backward(trainer)
            trainer.step(batch)
            if trainer.steps == SAVED_AT:
                trainer.save(folder)
    except lockstep.WorkerLost as lost:
        return time.monotonic(), lost.ranks, str(lost), trainer.steps
    raise AssertionError("nobody died")


def go_on(folder):
    """The rest of the steps, from the checkpoint."""
    trainer = make("cnn", "adamw", zero=0)
    assert trainer.load(folder).step == SAVED_AT
    for batch in feed(trainer, "cnn"):
        trainer.step(batch)
        if trainer.steps == STEPS:
            return digest(trainer)
    raise AssertionError("the data has ended")


def work(connection, folder, backend, zero, port, rank):
    """Worker: a world of three until one is lost, then one of two in the same processes."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(WORKERS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    with lockstep.join(seed=0, timeout=600, backend=backend):
        connection.send(train_until_lost(make("cnn", "adamw", zero), folder))
        new_port = connection.recv()  # Sent when all have said whom they lost: who left before that would be named too.
    os.environ.update(RANK=str(rank - (rank > VICTIM)), WORLD_SIZE=str(WORKERS - 1), MASTER_PORT=new_port)
    with lockstep.join(seed=0, timeout=60, backend=backend):
        connection.send(go_on(folder))


@pytest.fixture
def start(tmp_path):
    context = fork_context()
    processes = []

    def start(backend, zero):
        port, connections = free_port(), []
        for rank in range(WORKERS):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=work, args=(theirs, str(tmp_path), backend, zero, port, rank)))
            processes[-1].start()
            theirs.close()
            connections.append(ours)
        return processes, connections

    yield start
    for process in processes:
        process.kill()
        process.join()


def receive(connection, within_s):
    assert connection.poll(within_s), f"no answer within {within_s} s"
    return connection.recv()


@pytest.mark.parametrize(("backend", "zero"), some([("gloo", 1)], itertools.product(["gloo", "shm"], [0, 1, 3])))
def test_the_others_name_it_and_go_on_from_the_checkpoint(started_pool, start, backend, zero):
    processes, connections = start(backend, zero)
    processes[VICTIM].join(60)
    died = time.monotonic()
    assert processes[VICTIM].exitcode == -signal.SIGKILL
    survivors = [connections[rank] for rank in range(WORKERS) if rank != VICTIM]
    for connection in survivors:
        raised, ranks, text, steps = receive(connection, 2 * NOTICED_WITHIN_S)
        assert raised < died + NOTICED_WITHIN_S
        assert ranks == (VICTIM,) and f"worker {VICTIM} (pid {processes[VICTIM].pid}" in text
        assert steps == DIES_IN, "the step in which it died has happened nowhere"
    port = str(free_port())
    for connection in survivors:
        connection.send(port)
    expected, _ = started_pool.run(1, train, "cnn", "adamw", 0, STEPS)[0]
    assert [receive(connection, 60) for connection in survivors] == [expected] * (WORKERS - 1)
