"""`lockstep.launch`, with real workers: what comes back, what is raised, and who is left."""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from processes import PUBLISH, Forked, is_alive, wait_for_pids, wait_until_gone

import lockstep
from lockstep import world as worlds
from lockstep.errors import LaunchError, UsageError, WorkerFailed, WorkerLost
from lockstep.start import host
from lockstep.start.function import launch
from lockstep.start.supervisor import Rendezvous

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    if worlds._Current.world is not None:
        worlds._Current.world.leave()


@pytest.fixture(scope="module")
def _a_first_store():
    """torch opens two files with its first store, and keeps them."""
    with contextlib.closing(Rendezvous()) as rendezvous:
        rendezvous.attend([])


@pytest.fixture(autouse=True)
def _nothing_is_left(_clean_environment, _a_first_store):
    """No test leaves a child, an open file, a thread or a change of the environment behind."""

    def state():
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
        return environ, {path.name for path in Path("/proc/self/fd").iterdir()}, threading.active_count(), children()

    before = state()
    yield
    assert state() == before


def children():
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # A thread that has just been joined, on its way out.
            found |= {int(pid) for pid in (task / "children").read_text().split() if is_alive(int(pid))}
    return found


class Custom(Exception):
    def __init__(self, message, detail):
        super().__init__(message, detail)
        self.detail = detail


class Stubborn(Exception):
    """Cannot be unpickled: it needs more than its arguments."""

    def __init__(self, *, needed):
        super().__init__("stubborn as can be")
        self.needed = needed


def rank():
    return int(os.environ["RANK"])


def everything(base, *, factor):
    """Runs in a fresh interpreter."""
    world = lockstep.join()
    environ = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "MASTER_ADDR")}
    return world.sum(base * factor), torch.full((1_000_000,), world.rank), torch.get_num_threads(), environ


def fail_on_one(message):
    if rank() == 1:
        try:
            raise KeyError("the reason")
        except KeyError as error:
            raise Custom(message, detail={"step": 7}) from error


def test_an_importable_function_runs_in_fresh_interpreters():
    results = launch(everything, workers=2, args=(1,), kwargs={"factor": 10})
    threads = max(1, host.num_cores() // 2)
    for number, (total, large, num_threads, environ) in enumerate(results):
        assert total == 20
        assert large.equal(torch.full((1_000_000,), number))
        assert num_threads == threads
        assert environ == {
            "OMP_NUM_THREADS": str(threads),
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
        }


def test_the_first_failure_is_raised_as_itself():
    with pytest.raises(Custom) as raised:
        launch(fail_on_one, 2, ("it broke",))
    assert raised.value.args == ("it broke", {"step": 7})
    assert raised.value.detail == {"step": 7}
    (note,) = raised.value.__notes__
    assert note.startswith("Raised by worker 1:\n\nTraceback (most recent call last):\n")
    assert "KeyError: 'the reason'" in note
    assert "in fail_on_one" in note
    assert "lockstep/start" not in note


def test_a_closure_runs_in_forks_also_after_the_parent_used_its_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    net = torch.nn.Linear(300, 300)

    def train():
        for _ in range(2):
            net(torch.randn(300, 300)).square().sum().backward()
        total = torch.randn(1_000_000).exp().sum() > 0
        return lockstep.join().gather((rank(), torch.get_num_threads(), bool(total)))

    for parameter in net.parameters():
        parameter.grad = None
    net(torch.randn(300, 300)).square().sum().backward()
    assert launch(train, 2) == [[(0, 1, True), (1, 1, True)]] * 2
    torch.set_num_threads(threads)


def test_large_results_from_all_at_once():
    results = launch(lambda: bytes([rank()]) * 30_000_000, 3)
    assert results == [bytes([number]) * 30_000_000 for number in range(3)]


def test_what_workers_register_for_their_end_is_run_and_what_the_parent_did_is_not(tmp_path):
    def of_parent():
        (tmp_path / f"parent{os.getpid()}").touch()

    atexit.register(of_parent)
    launch(lambda: atexit.register(lambda: (tmp_path / f"worker{rank()}").touch()) and None, 2)
    atexit.unregister(of_parent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker0", "worker1"]


def test_a_worker_that_crashes_after_it_has_returned_has_returned():
    def work():
        atexit.register(os._exit, 9)
        return rank()

    assert launch(work, 2) == [0, 1]


def stay_unless(number, how):
    """What workers do of which one fails."""

    def work():
        world = lockstep.join()
        if world.rank == number:
            how()
        world.barrier()

    return work


def fail(error):
    raise error


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("holds a lock")
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), WorkerLost, "worker 1 was killed by SIGKILL, often because"),
        (lambda: os._exit(0), WorkerFailed, "worker 1 ended with exit code 0 and without a result"),
        (lambda: os._exit(5), WorkerFailed, "worker 1 ended with exit code 5 and without a result"),
        (lambda: sys.exit(3), WorkerFailed, r"worker 1 called sys\.exit\(3\)"),
        (lambda: fail(Unpicklable()), WorkerFailed, "(?s)worker 1 raised .*Unpicklable: holds a lock.*Traceback"),
        (lambda: fail(Stubborn(needed=1)), WorkerFailed, "(?s)worker 1 raised .*stubborn.*Traceback"),
        (lambda: fail(ZeroDivisionError("by zero")), ZeroDivisionError, "by zero"),
        (lambda: fail(KeyboardInterrupt()), KeyboardInterrupt, None),
    ],
)
def test_failures(how, kind, message):
    """The other worker waits in a barrier and finds its peer lost, which is not what is raised."""
    with pytest.raises(kind, match=message) as raised:
        launch(stay_unless(1, how), 2)
    if kind is WorkerLost:
        assert raised.value.ranks == (1,)


def test_results_that_cannot_be_sent():
    with pytest.raises(WorkerFailed, match="worker 0 returned a lock that cannot be sent"):
        launch(lambda: threading.Lock(), 1)


def test_leaving_by_exit_zero_is_no_failure():
    assert launch(lambda: sys.exit() if rank() else "stayed", 2) == ["stayed", None]


def test_a_timeout_names_who_is_late(tmp_path):
    with pytest.raises(WorkerLost, match=r"worker\(s\) 1 had not returned") as raised:
        launch(lambda: time.sleep(1000) if rank() == 1 else None, 2, timeout=1.0)
    assert raised.value.ranks == (1,)


def test_calls_that_cannot_be_right(monkeypatch):
    with pytest.raises(UsageError, match="0 workers"):
        launch(rank, 0)
    with pytest.raises(UsageError, match="must be a tuple"):
        launch(rank, 2, args="config")
    with pytest.raises(UsageError, match="must be a function"):
        launch("train", 2)
    with pytest.raises(UsageError, match="must lie in the future"):
        launch(rank, 2, timeout=0)
    with pytest.raises(UsageError, match="must lie in the future"):
        launch(rank, 2, timeout=float("nan"))
    with pytest.raises(LaunchError, match=r"one compute thread, and threads=4"):
        launch(lambda: None, 2, threads=4)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match="put the function into a module"):
        launch(lambda: None, 2)


def test_a_fork_refuses_to_inherit_a_world():
    with lockstep.join(), pytest.raises(LaunchError, match="this process is in a world"):
        launch(lambda: None, 2)
    assert launch(lambda: 1, 1) == [1]


def test_a_worker_launches_no_workers():
    with pytest.raises(LaunchError, match="RANK=0 is set"):
        launch(lambda: launch(rank, 2), 1)


def staying(tmp_path):
    """A launcher whose workers, each with a child of its own, stay; an interrupt shows in its exit code."""
    namespace = {}
    exec(PUBLISH, namespace)

    def start():
        try:
            launch(namespace["stay_with_a_child"], 2)
        except KeyboardInterrupt:
            return 33
        return 0

    return Forked(start, tmp_path)


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 33), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_nobody_outlives_the_launcher(tmp_path, signum, code):
    launcher = staying(tmp_path)
    pids = wait_for_pids(tmp_path, 4)
    launcher.signal(signum)
    assert launcher.wait().code == code
    wait_until_gone(pids)


def python(*arguments, code, cwd):
    return subprocess.run(
        [sys.executable, *arguments], input=code, cwd=cwd, text=True, capture_output=True, timeout=50, check=False
    )


def test_interactive_code(tmp_path):
    code = """
import lockstep
def train(x):
    return lockstep.join().sum(x)
print(lockstep.launch(train, workers=2, args=(3,)))
"""
    done = python("-", code=code, cwd=tmp_path)
    assert done.stdout == "[6, 6]\n", done.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path):
    (tmp_path / "script.py").write_text("""
from lockstep.start.function import launch
def train():
    return 1
print(launch(train, workers=1))
""")
    done = python("script.py", code="", cwd=tmp_path)
    assert done.returncode == 1
    assert "LaunchError: lockstep.launch was called while a worker was importing" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr


def test_a_script_with_functions_in_it_and_behind_its_guard(tmp_path):
    (tmp_path / "script.py").write_text("""
from lockstep.start.function import launch
class Mine(Exception):
    pass
def train():
    raise Mine("own")
if __name__ == "__main__":
    def hidden():
        pass
    for function in (train, hidden):
        try:
            launch(function, workers=1)
        except Exception as error:
            print(type(error).__name__, str(error)[:39])
""")
    done = python("script.py", code="", cwd=tmp_path)
    assert done.stdout.splitlines() == ["Mine own", "LaunchError worker 0 could not load the function: A"], done.stderr
