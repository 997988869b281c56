"""A stranger attacks every port on which a real run listens, by whatever process: the run does not notice."""

import contextlib
import os
import re
import resource
import secrets
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import netns
import pytest
from processes import DEADLINE_S, wait_until
from test_hosts import TRAIN, undisturbed  # noqa: F401 (a fixture)

from lockstep.comm.key_client import StoreClient

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's list of sockets"),
]
full = pytest.mark.skipif("FULL" not in os.environ, reason="needs FULL=1")
LISTEN = "0A"
MANY = 1000


@dataclass(frozen=True)
class Port:
    """A TCP port on which a process of the run listens."""

    address: str
    number: int
    pid: int

    @property
    def family(self) -> int:
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET


def tree(pid: int) -> list[int]:
    """A process and all that it has started."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def listening(pids: list[int]) -> list[Port]:
    owners = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owners.setdefault(os.readlink(fd), pid)
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            pid = owners.get(f"socket:[{words[9]}]")
            if words[3] == LISTEN and pid is not None:
                place, _, number = words[1].partition(":")
                address = socket.inet_ntoa(bytes.fromhex(place)[::-1]) if table == "tcp" else "::1"
                ports.append(Port("127.0.0.1" if address == "0.0.0.0" else address, int(number, 16), pid))
    return ports


WORDS = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "garbage": bytes(range(256)) * 256,
    "zeros": bytes(1 << 16),
    "half a greeting": b"lockstep1" + bytes(7),
    "a greeting, half a proof": b"lockstep1" + bytes(32) + bytes(5),
    "a long length": b"\xff" * 64,
}


def attack(family: int, place: object) -> list[socket.socket]:
    """Say everything that a stranger may say, a wrong secret among it, and keep all connections open."""
    kept = []
    for words in WORDS.values():
        channel = socket.socket(family)
        channel.settimeout(0.05)
        kept.append(channel)
        with contextlib.suppress(OSError):
            channel.connect(place)
            channel.sendall(words)
    if family != socket.AF_UNIX:
        with contextlib.suppress(OSError, ValueError):
            StoreClient(place, b"w" * 32, 0.1)
            raise AssertionError("a wrong secret opens it")
    for _ in range(MANY):
        channel = socket.socket(family)
        channel.setblocking(False)
        kept.append(channel)
        with contextlib.suppress(OSError):
            channel.connect(place)
    return kept


class Job:
    """A run on two hosts, which are two launchers on this one: so all its ports are within reach."""

    def __init__(self, folder: Path, *options: str, script: str = TRAIN, **environ: str) -> None:
        self.folder = folder
        self.strangers: list[socket.socket] = []
        (folder / "train.py").write_text(script)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            meet = f"127.0.0.1:{probe.getsockname()[1]}"
        told = {**os.environ, "LOCKSTEP_SECRET": secrets.token_hex(16), **environ}
        self.launchers = []
        for rank in (0, 1):
            words = ["--hosts", "2", "--host-rank", str(rank), "--meet", meet, "-n", "1", *options]
            with (folder / f"host{rank}").open("wb") as said:
                self.launchers.append(
                    subprocess.Popen(
                        [*netns.LOCKSTEP, "run", *words, "train.py"], cwd=folder, env=told, stdout=said, stderr=said
                    )
                )

    @property
    def pids(self) -> list[int]:
        return [pid for launcher in self.launchers for pid in tree(launcher.pid)]

    @property
    def said(self) -> str:
        return "".join((self.folder / f"host{rank}").read_text() for rank in (0, 1))

    def attack(self, ports: list[Port]) -> None:
        for port in ports:
            self.strangers += attack(port.family, (port.address, port.number))

    def close(self) -> None:
        for channel in self.strangers:
            channel.close()
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()


@pytest.fixture
def job(tmp_path):
    """A run whose processes may open 1,024 files each, as is usual; this one may open all that an attack takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 12 * MANY:
        pytest.skip(f"needs {12 * MANY} file handles, and may have {hard}")
    made = []

    def make(*options: str, **environ: str) -> Job:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        made.append(Job(tmp_path, *options, **environ))
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return made[0]

    yield make
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for each in made:
        each.close()


# It trains slowly until it has been attacked.
SLOW = TRAIN.replace("    time.sleep(", "    time.sleep(0 if os.path.exists('attacked') else ")
SLOW = SLOW.replace("lockstep.join(", "lockstep.join(backend='gloo', ")  # Which has ports; here all are on one host.


@full
@pytest.mark.parametrize("options", [(), ("--elastic", "--watch")], ids=["plain", "elastic"])
def test_strangers_change_nothing(job, undisturbed, options):  # noqa: F811
    run = job(*options, script=SLOW, EPOCHS="20", PAUSE="0.1")
    wait_until(lambda: run.said.count("step 2 of 2") == 2, "both to train", lambda: run.said)
    pids = run.pids
    ports = listening(pids)
    # The store of each kind, and what each worker has opened: gloo's ports, and those of its watcher.
    assert {port.pid for port in ports} >= {run.launchers[0].pid, *pids[-1:]} and len(ports) >= 3, ports
    run.attack(ports)
    workers = {port.pid for port in ports} - {run.launchers[0].pid}
    handles = {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in workers}
    (run.folder / "attacked").touch()
    assert "HASH" not in run.said, "the attack came too late"
    assert [launcher.wait(2 * DEADLINE_S) for launcher in run.launchers] == [0, 0], run.said
    assert set(re.findall(r"HASH (\w+)", run.said)) == {undisturbed("20")}, run.said
    assert re.findall(r"HASH \w+ rank (\d)", run.said) == ["0", "1"]
    # A generation that moves shards is the balance's doing, and loses nobody.
    assert not [line for line in run.said.splitlines() if ": without " in line or "Traceback" in line], run.said
    assert max(handles.values()) < 100, "what came to gloo's ports has been let in"


BEFORE = """
import os, pathlib, time
while not pathlib.Path("attacked").exists():
    time.sleep(0.01)
"""


@full
def test_strangers_who_come_first_change_nothing(job, undisturbed):  # noqa: F811
    """Before the workers have met: at the launchers' ports, which are all there are."""
    run = job(EPOCHS="3", script=BEFORE + TRAIN)
    wait_until(lambda: len(run.pids) >= 6, "the workers to start", lambda: run.said)
    ports = listening(run.pids)
    assert {port.pid for port in ports} == {run.launchers[0].pid}
    run.attack(ports)
    (run.folder / "attacked").touch()
    assert [launcher.wait(2 * DEADLINE_S) for launcher in run.launchers] == [0, 0], run.said
    assert set(re.findall(r"HASH (\w+)", run.said)) == {undisturbed("3")}, run.said
