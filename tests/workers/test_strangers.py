"""A stranger attacks every port on which a real run listens, by whatever process: the run does not notice."""

import contextlib
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
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


def unix_names(pids: list[int]) -> list[str]:
    """The abstract Unix sockets on which processes of the run listen."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(fd))
    found = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        words = line.split()
        if len(words) == 8 and f"socket:[{words[6]}]" in inodes and words[7].startswith("@"):
            found.append("\0" + words[7][1:])
    return sorted(set(found))


WORDS = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "garbage": bytes(range(256)) * 256,
    "zeros": bytes(1 << 16),
    "half a greeting": b"lockstep1" + bytes(7),
    "a greeting, half a proof": b"lockstep1" + bytes(32) + bytes(5),
    "a long length": b"\xff" * 64,
}


def attack(family: int, place: object, log: list[str]) -> list[socket.socket]:
    """Say everything that a stranger may say; returns what is kept open."""
    kept = []
    for name, words in WORDS.items():
        channel = socket.socket(family)
        channel.settimeout(2)
        with contextlib.suppress(OSError):
            channel.connect(place)
            channel.sendall(words)
            channel.settimeout(0.3)
            answer = channel.recv(1 << 12)
            log.append(f"{name}: {answer[:16]!r}")
        kept.append(channel)
    return kept


def flood(family: int, place: object) -> list[socket.socket]:
    kept = []
    for _ in range(MANY):
        channel = socket.socket(family)
        channel.setblocking(False)
        with contextlib.suppress(OSError):
            channel.connect(place)
        kept.append(channel)
    return kept


class Job:
    """A run on two hosts, which are two launchers on this one: so all its ports are within reach."""

    def __init__(self, folder: Path, *options: str, **environ: str) -> None:
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            meet = f"127.0.0.1:{probe.getsockname()[1]}"
        told = {**os.environ, "LOCKSTEP_SECRET": secrets.token_hex(16), "EPOCHS": "4", "PAUSE": "0.1", **environ}
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

    def close(self) -> None:
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()


@pytest.fixture
def many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65536)
    if wanted < 10 * MANY:
        pytest.skip(f"may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
