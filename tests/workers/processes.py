"""Real processes for tests of what starts and ends them: forks of a server, a launcher in a fork, who is alive."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

DEADLINE_S = 40
# An optimizer imports torch._dynamo when it is made, which takes every process longer than importing torch did.
PRELOADED = [
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed.tensor.parallel",
    "lockstep",
    "lockstep.train.trainer",
    "lockstep.watching.hangs",
]


def fork_context() -> multiprocessing.context.ForkServerContext:
    """Starts processes as forks of the test run's one server, which has imported what workers use."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it wrote."""

    code: int
    out: str
    err: str


class Forked:
    """`function()` in a fork of the test's process, which has torch imported already; its result is the exit code."""

    def __init__(self, function: Callable[[], int], folder: Path, stdout_fd: int | None = None):
        self._out, self._err = folder / "stdout", folder / "stderr"
        files = [os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for path in (self._out, self._err)]
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                os.dup2(files[0] if stdout_fd is None else stdout_fd, 1)
                os.dup2(files[1], 2)
                os.closerange(3, 1024)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                os.chdir(folder)
                code = function()
                sys.stdout.flush()
                sys.stderr.flush()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        for fd in files:
            os.close(fd)

    def signal(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait(self) -> Ended:
        status: list[int] = []

        def has_ended() -> bool:
            pid, raw = os.waitpid(self.pid, os.WNOHANG)
            status.append(raw)
            return pid == self.pid

        try:
            wait_until(has_ended, "the launcher to end", lambda: self._err.read_text(errors="replace"))
        except BaseException:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            raise
        code = os.waitstatus_to_exitcode(status[-1])
        return Ended(code, self._out.read_bytes().decode(), self._err.read_bytes().decode())


class FromServer:
    """`function(*args)` in a fork of the server, which has torch imported and one thread; its result is the exit code.

    In such a process `lockstep.launch` may fork its workers: `in_forks` sees to it. That takes milliseconds for what
    takes fresh interpreters seconds. `function` is found again by its name.
    """

    def __init__(self, folder: Path, function: Callable[..., int], *args: object):
        folder.mkdir(exist_ok=True)
        self.out, self.err = folder / "stdout", folder / "stderr"
        environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        self._process = fork_context().Process(target=_captured, args=(self.out, self.err, environ, function, args))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, seconds: float = 3 * DEADLINE_S) -> Ended:
        self._process.join(seconds)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        return Ended(self._process.exitcode, self.out.read_text(), self.err.read_text())


def _captured(out: Path, err: Path, environ: dict, function: Callable[..., int], args: tuple) -> None:
    os.environ.clear()
    os.environ.update(environ)
    for path, fd in ((out, 1), (err, 2)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, fd)
        os.close(opened)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    sys.exit(function(*args))


def in_forks(module: object, name: str) -> None:
    """Have `lockstep.launch` run a module's function in forks from now on: one that cannot be found by its name."""
    function = getattr(module, name)
    setattr(module, name, lambda *args: function(*args))


def wait_until(condition: Callable[[], bool], what: str, details: Callable[[], str] = lambda: "") -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up, f"waited {DEADLINE_S} s for {what}\n{details()}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_pids(folder: Path, number: int) -> list[int]:
    """The process ids that workers have written to `*.pid` files; each file appears whole."""
    wait_until(lambda: len(list(folder.glob("*.pid"))) == number, f"{number} processes to start")
    return [int(path.read_text()) for path in folder.glob("*.pid")]


def wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_alive, pids)), "processes to end", lambda: str([p for p in pids if is_alive(p)]))


PUBLISH = '''
import os, pathlib, subprocess, sys, time

def publish(name, pid):
    """Write a process id to a file that appears whole."""
    path = pathlib.Path(name + ".tmp")
    path.write_text(str(pid))
    path.rename(name + ".pid")

def stay_with_a_child():
    """Start another process, say who we are, and stay."""
    rank = os.environ["RANK"]
    publish("child" + rank, subprocess.Popen(["sleep", "1000"]).pid)
    publish("worker" + rank, os.getpid())
    time.sleep(1000)
'''
