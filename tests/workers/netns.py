"""Hosts to test with: network namespaces of this machine on one bridge, each with an interface and an address.

A process in one of them reaches the others through the bridge and nothing else. All are taken away at the end, with
every process in them.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

LOCKSTEP = [sys.executable, "-m", "lockstep"]


def missing() -> str:
    """What is missing on this machine for network namespaces; empty if nothing is."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "iproute2 is missing"
    name = f"lst{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    linked = subprocess.run(["ip", "-n", name, "link", "add", "br0", "type", "bridge"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=True)
    return f"no bridge can be made: {linked.stderr.strip()}" if linked.returncode else ""


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Host:
    """One namespace."""

    def __init__(self, net: str, number: int) -> None:
        self.name, self.link, self.address = f"{net}h{number}", f"v{number}", f"10.77.0.{10 + number}"
        self._switch = f"{net}s"
        _ip("netns", "add", self.name)
        _ip("link", "add", "eth0", "netns", self.name, "type", "veth", "peer", "name", self.link, "netns", self._switch)
        _ip("-n", self._switch, "link", "set", self.link, "master", "br0", "up")
        _ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.name, "link", "set", "eth0", "up")
        _ip("-n", self.name, "link", "set", "lo", "up")

    def start(self, command: Sequence[str], folder: Path, name: str, **environ: str) -> subprocess.Popen[bytes]:
        """Start a process on this host; what it says goes to a file of that name."""
        with (folder / name).open("wb") as said:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command],
                cwd=folder,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def limit(self, mbit: int) -> None:
        """Let this host send no faster than this."""
        shape = ["tbf", "rate", f"{mbit}mbit", "burst", "256k", "latency", "50ms"]
        subprocess.run(["tc", "-n", self.name, "qdisc", "replace", "dev", "eth0", "root", *shape], check=True)

    def enter(self) -> None:
        """Have the calling process, which has one thread, on this host from now on."""
        new_network = 0x40000000  # CLONE_NEWNET
        with Path(f"/var/run/netns/{self.name}").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), new_network):
                raise OSError(ctypes.get_errno(), "setns")

    def cut(self) -> None:
        """Cut the link: nobody is told."""
        _ip("-n", self._switch, "link", "set", self.link, "down")

    def mend(self) -> None:
        """Have the link again."""
        _ip("-n", self._switch, "link", "set", self.link, "up")

    def kill(self) -> None:
        """Lose power: all processes end, and no other host hears of it."""
        self.cut()
        for pid in _ip("netns", "pids", self.name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        """Take the namespace away, with what runs in it."""
        with contextlib.suppress(subprocess.CalledProcessError):
            self.kill()
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True)


@contextlib.contextmanager
def hosts(number: int) -> Iterator[list[Host]]:
    """So many hosts that reach one another."""
    net = f"ls{os.getpid()}"
    _ip("netns", "add", f"{net}s")
    made: list[Host] = []
    try:
        _ip("-n", f"{net}s", "link", "add", "br0", "type", "bridge")
        _ip("-n", f"{net}s", "link", "set", "br0", "up")
        made.extend(Host(net, each) for each in range(number))
        yield made
    finally:
        for host in made:
            host.close()
        subprocess.run(["ip", "netns", "del", f"{net}s"], capture_output=True)


class Etcd:
    """An etcd cluster with a member on each of some hosts."""

    def __init__(self, members: Sequence[Host], folder: Path) -> None:
        names = ",".join(f"m{number}=http://{host.address}:2380" for number, host in enumerate(members))
        self.where = "etcd://" + ",".join(f"{host.address}:2379" for host in members)
        self.members = members
        self.processes = [
            host.start(
                ["etcd", "--name", f"m{number}", "--data-dir", str(folder / f"etcd{number}")]
                + ["--initial-cluster", names, "--initial-cluster-state", "new", "--log-outputs", "stderr"]
                + [f"--{kind}-client-urls=http://{host.address}:2379" for kind in ("listen", "advertise")]
                + [f"--listen-peer-urls=http://{host.address}:2380"]
                + [f"--initial-advertise-peer-urls=http://{host.address}:2380", "--unsafe-no-fsync"],
                folder,
                f"etcd{number}.log",
            )
            for number, host in enumerate(members)
        ]

    def keys(self) -> int:
        """How many keys there are."""
        for number, host in enumerate(self.members):
            if self.processes[number].poll() is None:
                command = ["ip", "netns", "exec", host.name, sys.executable, "-c", _COUNT, host.address]
                return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        raise AssertionError("no member of the cluster is there")

    def kill_leader(self) -> int:
        """Kill the member that leads; returns which it was."""
        for number, host in enumerate(self.members):
            if self.processes[number].poll() is not None:
                continue
            said = subprocess.run(
                ["ip", "netns", "exec", host.name, sys.executable, "-c", _STATUS, host.address],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.split()
            if said[0] == said[1]:
                self.processes[number].kill()
                return number
        raise AssertionError("no member of the cluster leads")


_COUNT = """
import json, sys, urllib.request
url = f"http://{sys.argv[1]}:2379/v3/kv/range"
body = b'{"key": "AA==", "range_end": "AA==", "count_only": true}'
print(json.load(urllib.request.urlopen(urllib.request.Request(url, body), timeout=5)).get("count", 0))
"""
_STATUS = """
import json, sys, urllib.request
url = f"http://{sys.argv[1]}:2379/v3/maintenance/status"
said = json.load(urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=5))
print(said["leader"], said["header"]["member_id"])
"""
