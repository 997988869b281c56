"""Workers that die, stop or leave: the others end soon, naming them. These tests start processes of their own."""

import atexit
import ctypes
import itertools
import os
import re
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

import pytest
from amount import some
from pool import Pool
from processes import FromServer, fork_context, wait_until

import lockstep
from lockstep.errors import WorkerLost

BACKENDS = ["shm", "gloo"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def train(environ, words, backend, timeout, fault, victim, zero=0, cap_mb=0.1):
    """Worker: steps without end; the victim has its fault in step 5."""
    import torch

    os.environ.update(environ)
    errors = os.open(words, os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    torch.set_num_threads(1)
    world = lockstep.join(timeout=timeout, backend=backend)
    net = torch.nn.Sequential(*(torch.nn.Linear(200, 200) for _ in range(4)))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    model = lockstep.DataParallel(net, bucket_cap_mb=cap_mb, optimizer=optimizer, zero=zero)
    for step in range(100000):
        loss = model(torch.ones(2, 200)).square().mean()
        if step == 5 and world.rank == victim:
            fail(fault, net)
        loss.backward()
        if zero:
            optimizer.step()


def fail(fault, net):
    if fault == "killed":
        net[1].weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))  # In mid-backward.
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "left":
        sys.exit(0)
    elif fault == "raised":
        raise ValueError("the data is bad")


@pytest.fixture
def start(tmp_path):
    context = fork_context()
    processes = []

    def start(workers, *args):
        port = free_port()
        for rank in range(workers):
            words = tmp_path / f"words-{rank}"
            processes.append(context.Process(target=train, args=(environ_of(rank, workers, port), str(words), *args)))
            processes[-1].start()
        return processes, [tmp_path / f"words-{rank}" for rank in range(workers)]

    yield start
    for process in processes:
        process.kill()
        process.join()


def wait_for_fault(process, fault):
    """Until the victim is gone, or stopped."""
    if fault != "stopped":
        process.join(60)
        assert not process.is_alive()
        return
    give_up = time.monotonic() + 60
    while open(f"/proc/{process.pid}/stat").read().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < give_up
        time.sleep(0.01)


def last_words(processes, words, victim, fault, within_s):
    """The last line of each survivor, all of which must have ended in time."""
    wait_for_fault(processes[victim], fault)
    give_up = time.monotonic() + within_s
    lines = []
    for rank, process in enumerate(processes):
        if rank != victim:
            process.join(max(0.0, give_up - time.monotonic()))
            assert process.exitcode == 1, f"worker {rank} has not ended by itself"
            lines.append(words[rank].read_text().strip().splitlines()[-1])
    return lines


@pytest.mark.parametrize(
    ("fault", "victim", "backend"),
    some(
        [("killed", 0, "gloo"), ("killed", 2, "shm"), ("raised", 0, "shm"), ("left", 2, "gloo")],
        itertools.product(["killed", "raised", "left"], [0, 2], BACKENDS),
    ),
)
def test_a_dead_worker_ends_the_others_within_ten_seconds_by_name(start, fault, victim, backend):
    processes, words = start(3, backend, 600, fault, victim)
    for line in last_words(processes, words, victim, fault, within_s=10):
        assert line.startswith("lockstep.errors.WorkerLost")
        assert f"worker {victim} (pid {processes[victim].pid}" in line
        assert re.search(r"reducing bucket \d+ of step 5 \('\d\.(weight|bias)'", line)


@pytest.mark.parametrize(("backend", "zero"), [("gloo", 3)])
def test_the_same_where_something_is_split(start, backend, zero):
    processes, words = start(3, backend, 600, "killed", 1, zero)
    for line in last_words(processes, words, 1, "killed", within_s=10):
        assert line.startswith("lockstep.errors.WorkerLost")
        assert f"worker 1 (pid {processes[1].pid}" in line


@pytest.mark.parametrize(
    ("backend", "cap_mb"),  # One bucket is reduced by the thread that waits for it, over shared memory.
    some([("gloo", 0.1)], itertools.product(BACKENDS, [0.1, 25])),
)
def test_a_stopped_worker_is_named_at_the_deadline(start, backend, cap_mb):
    processes, words = start(3, backend, 2, "stopped", 1, 0, cap_mb)
    for line in last_words(processes, words, 1, "stopped", within_s=15):
        assert f"worker 1 (pid {processes[1].pid}" in line and "did not answer" in line
        assert "(timed out): it is stopped (process state T)" in line


def compute_until_done(world):
    """Somewhere in the script's own code, until the other worker has ended its wait."""
    while not world.peers.store.check(["done"]):
        time.sleep(0.05)


def one_rank_alone(world, fault):
    """Worker 0 calls a collective that worker 1 does not."""
    world.barrier()
    if world.rank == 1:
        if fault == "raised":
            raise ValueError("the data is bad\nfor several reasons")
        if fault == "elsewhere":
            compute_until_done(world)
        return ""
    try:
        with pytest.raises(WorkerLost) as raised:
            world.sum(1)
    finally:
        world.peers.store.set("done", "1")
    return str(raised.value)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raised", "raised ValueError: the data is bad while this worker was summing over the workers. Its own output"),
        ("finished", "has finished: its program came to its end while this worker was summing"),
        ("elsewhere", "did not answer within 0:00:01 (timed out): it is at "),
    ],
)
def test_what_became_of_the_one_who_is_missing_is_said(pool, fault, said):
    text = pool.run(2, one_rank_alone, fault, timeout=1 if fault == "elsewhere" else 30, expect_failure=True)[0][1]
    assert text.startswith("worker 0: worker 1 (pid ") and said in text, text
    assert "memory" not in text
    assert ("test_failure.py" in text and " in compute_until_done" in text) == (fault == "elsewhere"), text


def come_too_late(world):
    """The others give up on worker 1, which then comes."""
    if world.rank == 1:
        compute_until_done(world)
    try:
        with pytest.raises(WorkerLost) as raised:
            world.sum(1)
            world.sum(1)  # What the others had left for the first one is there.
    finally:
        world.peers.store.set("done", "1")
    return str(raised.value), raised.value.ranks


def test_a_worker_does_not_name_itself(started_pool):
    (_, ranks), (text, own_ranks) = started_pool.run(2, come_too_late, timeout=1, backend="shm")
    assert (ranks, own_ranks) == ((1,), ())
    assert text.startswith("worker 1: the others have given up waiting for this worker"), text


def join_alone(port):
    """Worker 0 of three, of which no other comes."""
    os.environ.update(environ_of(0, 3, port))
    lockstep.join(timeout=2)


def test_missing_workers_are_named_when_joining(tmp_path):
    ended = FromServer(tmp_path, join_alone, free_port()).wait()
    assert ended.code == 1
    assert "missing: 1, 2" in ended.err.splitlines()[-1]


DEADLINE_S = 3
MARGIN_S = 12
"""Those who are still there are asked for 4 s who is missing; the rest is for slow machines."""
END_S = 60
"""The interpreter's own end computes for a second, which on a busy machine takes many; a wait would be longer yet."""
PHASES = ["load", "forward", "backward", "exchange", "optimizer", "gather", "save", "leave"]


def end_for_real(words, function, *args):
    """Call it, and end this fork as an interpreter ends: by exit handlers, its streams and C's destructors."""
    os.dup2(os.open(words, os.O_WRONLY | os.O_CREAT), 2)
    code = 0
    try:
        function(*args)
    except BaseException as error:
        sys.last_value, code = error, 1
        traceback.print_exc()
    ctypes.pythonapi.Py_Exit(code)


def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_waiting_for(peers, words):
    """Stop when this worker is about to wait in something that is described by one of `words`."""
    wait = peers.wait

    def wait_or_stop(work, doing):
        if any(word in (doing if isinstance(doing, str) else doing()) for word in words):
            stop()
        wait(work, doing)

    peers.wait = wait_or_stop


def raises(*_):
    raise ValueError("the data is bad")


def stop_in(phase, world, model, optimizer):
    """Let this worker stop itself when it comes to `phase`, or do another thing that nobody else does."""
    net = model.module
    if phase == "forward":
        net[1].register_forward_hook(stop)
    elif phase == "backward":
        net[1].weight.register_hook(stop)
    elif phase == "exchange":
        stop_waiting_for(world.peers, ["reducing bucket"])
    elif phase == "optimizer":
        optimizer.stops = True
    elif phase == "gather":
        stop_waiting_for(world.peers, ["gathering", "updated parameters"])
    elif phase == "save":
        stop_waiting_for(world.peers, ["gathering objects"])
    elif phase == "leave":
        world.on_leave.append(stop)
    elif phase == "alone":
        model.state_dict()
    elif phase == "pipe":
        os.kill(os.getpid(), signal.SIGPIPE)
    elif phase == "raised":
        net[1].weight.register_hook(raises)
    else:
        stop()


def train_until_stopped(environ, backend, zero, phase, victim, folder):
    """Worker: three steps, a save and the end; the victim stops in the second step or later."""
    import torch

    class Adam(torch.optim.Adam):
        stops = False

        def step(self, *args):
            if self.stops:
                stop()
            return super().step(*args)

    os.environ.update(environ)
    torch.set_num_threads(1)
    atexit.register(Path(f"{folder}.left").touch)  # Called when the world has been left.
    world = lockstep.join(timeout=DEADLINE_S if phase != "raised" else 600, backend=backend)
    net = torch.nn.Sequential(*(torch.nn.Linear(50, 50) for _ in range(4)))
    optimizer = Adam(net.parameters(), lr=1e-3)
    model = lockstep.DataParallel(net, bucket_cap_mb=0.01, optimizer=optimizer, zero=zero)
    for step in range(3):
        if step == 1 and world.rank == victim and phase not in ("save", "leave"):
            stop_in(phase, world, model, optimizer)
        if step == 1 and world.rank != victim and phase == "raised":
            wait_until(Path(f"{folder}.left").exists, "a worker to leave whose buckets nobody has answered")
        model(torch.ones(2, 50)).square().mean().backward()
        optimizer.step()
    if world.rank == victim:
        stop_in(phase, world, model, optimizer)
    lockstep.save(folder, model, optimizer)


def environ_of(rank, workers, port):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


CODES = {"leave": (None, 0), "alone": (1, 1), "raised": (1, 1), "pipe": (0, 0)}
"""Exit codes of the victim, None if it is stopped, and of the other, where they are not None and 1."""
UNNAMED = ("leave", "alone", "pipe")
"""Where there is nobody to name. Python ignores SIGPIPE, so nothing happens there."""


class Pair:
    """Two workers, of which one stops in a phase, or does what nobody else does; the other must speak up and end."""

    def __init__(self, backend, zero, phase, victim, folder):
        self.name = f"{backend}-{zero}-{phase}-{victim}"
        self._phase, self._victim = phase, victim
        self._words, self._left = folder / f"{self.name}.words", folder / f"{self.name}.left"
        self._processes, port = [], free_port()
        for rank in range(2):
            words = str(self._words) if rank != victim else os.devnull
            args = (environ_of(rank, 2, port), backend, zero, phase, victim, str(folder / self.name))
            process = fork_context().Process(target=end_for_real, args=(words, train_until_stopped, *args))
            process.start()
            self._processes.append(process)

    def failing(self):
        """What is wrong with its end, if anything."""
        victim, other = self._processes[self._victim], self._processes[1 - self._victim]
        if self._phase in PHASES:
            wait_for_fault(victim, "stopped")
            limit = time.time() + DEADLINE_S + MARGIN_S
        else:
            victim.join(END_S)
            limit = time.time() + MARGIN_S
        other.join(END_S)
        codes = (victim.exitcode, other.exitcode)
        said = self._words.read_text().strip().splitlines()[-1:]
        is_named = f"worker {self._victim} (pid {victim.pid}" in "".join(said) or self._phase in UNNAMED
        late_s = self._words.stat().st_mtime - limit
        if codes == CODES.get(self._phase, (None, 1)) and is_named and self._left.exists() and late_s < 0:
            return ""
        left = self._left.exists()
        return f"{self.name}: ended with {codes}, exit handlers ran: {left}, {late_s:.1f} s late, said {said}"

    def end(self):
        for process in self._processes:
            process.kill()
            process.join()


SELECTION = [
    ("gloo", 0, "load", 0),
    ("shm", 1, "optimizer", 1),
    ("gloo", 2, "gather", 1),
    ("gloo", 3, "backward", 1),
    ("shm", 3, "save", 0),
    ("shm", 2, "leave", 0),
    *(LONELY := [("gloo", 3, "alone", 0), ("gloo", 1, "raised", 1)]),
]
EVERYTHING = [
    (backend, zero, phase, victim)
    for backend, zero, phase, victim in itertools.product(BACKENDS, range(4), PHASES, [0, 1])
    if zero or phase != "gather"  # Where nothing is split, nothing is gathered.
]
EVERYTHING += [*LONELY, ("gloo", 0, "pipe", 0), ("shm", 3, "pipe", 0)]


@pytest.mark.parametrize("cases", some([SELECTION], (EVERYTHING[at : at + 6] for at in range(0, len(EVERYTHING), 6))))
def test_a_worker_that_stops_in_any_phase_is_named_and_the_others_end_at_the_deadline(tmp_path, cases):
    pairs = [Pair(*case, tmp_path) for case in cases]
    try:
        failing = [found for found in (pair.failing() for pair in pairs) if found]
    finally:
        for pair in pairs:
            pair.end()
    assert not failing, "\n".join(failing)


def breaks(world):
    world.all_reduce(1)
    raise ValueError("of the script")


def num_gloo_threads(world, most=None):
    """Threads of gloo's in this process, its own world's included; waits until there are at most so many, by rank."""

    def is_gloos(task):
        try:
            return Path(task, "comm").read_text().startswith("gloo_tcp")
        except (FileNotFoundError, ProcessLookupError):  # The thread ended since the folder was read.
            return False

    def count():
        return sum(map(is_gloos, Path("/proc/self/task").iterdir()))

    if most is not None:
        wait_until(lambda: count() <= most[world.rank], "the groups of broken worlds to go", lambda: str(count()))
    return count()


@pytest.fixture
def new_pool():
    """Two workers that nothing was run in before."""
    pool = Pool(2)
    yield pool
    pool.stop()


def test_a_process_that_goes_on_lets_go_of_broken_worlds(new_pool):
    """What gloo keeps running for operations that never end would take a core for good.

    A group goes when its last operation is over, so at the latest by the deadline of its world and `MARGIN`: 15 s here,
    of the 40 s that are waited.
    """
    before = new_pool.run(2, num_gloo_threads, backend="gloo")
    for _ in range(3):
        assert not any(ok for ok, _ in new_pool.run(2, breaks, expect_failure=True, backend="gloo", timeout=5))
    new_pool.run(2, num_gloo_threads, before, backend="gloo")
