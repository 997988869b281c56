"""A worker whose messages are late is named: workers in network namespaces of their own, joined by a bridge.

What leaves one namespace passes a relay that holds it back. Needs root, and half a minute: with FULL=1 only. And two
hosts that know their own name as 127.0.0.1 find each other by the route to where they meet.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import DEADLINE_S, wait_until

slowly = pytest.mark.skipif(
    "FULL" not in os.environ or not hasattr(os, "geteuid") or os.geteuid() != 0 or not Path("/dev/net/tun").exists(),
    reason="needs FULL=1, root, and Linux with network namespaces",
)

DELAY_S = 0.05

RELAY = """
import collections, ctypes, fcntl, os, select, struct, sys, time

def tap(name):
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH", name.encode(), 0x1002))  # TUNSETIFF: a tap without headers
    return fd

def forward(fd, frame):
    try:
        os.write(fd, frame)
    except OSError:
        pass  # As a full cable would.

name, space, delay = sys.argv[1], sys.argv[2], float(sys.argv[3])
outer = tap(name)
with open(f"/run/netns/{space}") as there:
    assert ctypes.CDLL(None).setns(there.fileno(), 0x40000000) == 0
inner = tap("eth0")
print("ready", flush=True)
late = collections.deque()
while True:
    wait = max(0, late[0][0] - time.monotonic()) if late else None
    for fd in select.select([outer, inner], [], [], wait)[0]:
        frame = os.read(fd, 65536)
        if fd == inner:
            late.append((time.monotonic() + delay, frame))
        else:
            forward(inner, frame)
    while late and late[0][0] <= time.monotonic():
        forward(outer, late.popleft()[1])
"""

SCRIPT = """
import torch, lockstep
torch.set_num_threads(1)
world = lockstep.join(seed=0, backend="gloo")
model = lockstep.DataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    model(torch.ones(4, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Bridge:
    """Namespaces on one bridge, each with the address 10.77.0.(rank + 1); what `slow` sends is late."""

    def __init__(self, size, slow=None):
        self.name = f"lk{os.getpid() % 100000}"
        self.spaces = [f"{self.name}n{rank}" for rank in range(size)]
        self.slow = slow
        self.relay = None

    def __enter__(self):
        ip("link", "add", self.name, "type", "bridge")
        ip("link", "set", self.name, "up")
        for rank, space in enumerate(self.spaces):
            ip("netns", "add", space)
            outside = f"{self.name}v{rank}"
            if rank == self.slow:
                command = [sys.executable, "-c", RELAY, outside, space, str(DELAY_S)]
                self.relay = subprocess.Popen(command, stdout=subprocess.PIPE)
                assert self.relay.stdout.readline() == b"ready\n"
            else:
                ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", outside, "master", self.name, "up")
            ip("-n", space, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", space, "link", "set", device, "up")
        return self

    def __exit__(self, *_):
        if self.relay is not None:
            self.relay.kill()
            self.relay.wait()
            self.relay.stdout.close()
        for rank, space in enumerate(self.spaces):  # A namespace takes its end of a cable with it only some time later.
            subprocess.run(["ip", "link", "del", f"{self.name}v{rank}"], check=False, capture_output=True)
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.name], check=False, capture_output=True)

    def start(self, rank, script, folder, remove=()):
        environ = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self.spaces)),
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29411",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "LOCKSTEP_WATCH": str(folder),
        }
        for name in remove:
            environ.pop(name)
        command = ["ip", "netns", "exec", self.spaces[rank], sys.executable, str(script)]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@slowly
@pytest.mark.timeout(3 * DEADLINE_S)
@pytest.mark.parametrize(("size", "slow"), [(2, 1), (3, 0)])
def test_slow_network_is_named(tmp_path, size, slow):
    (tmp_path / "script.py").write_text(SCRIPT)
    with Bridge(size, slow) as bridge:
        workers = [bridge.start(rank, tmp_path / "script.py", tmp_path / "run") for rank in range(size)]
        try:
            wait_until(lambda: all(worker.poll() is not None for worker in workers), "the workers to end")
        finally:
            for worker in workers:
                worker.kill()
            said = [worker.communicate()[1] for worker in workers]
    assert not any(worker.returncode for worker in workers), said
    last = json.loads((tmp_path / "run" / "steps.jsonl").read_text().splitlines()[-1])
    assert last["verdict"].startswith(f"worker {slow} holds everyone up by ") and last["verdict"].endswith("network")
    assert last["last"]["cause"] == "network"


STEPS = """
import os, torch, lockstep
world = lockstep.join(seed=0, timeout=40)
model = lockstep.DataParallel(torch.nn.Linear(2, 1))
for _ in range(3):
    model(torch.ones(1, 2) * (1 + world.rank)).sum().backward()
print(world.backend, world.peers.me.address, model.module.weight.grad[0, 0].item() / 3)
"""


@pytest.fixture
def loopback_names():
    """Two namespaces on one cable, in which the host's own name is that of loopback."""
    bridge = Bridge(2)
    folders = [Path("/etc/netns") / space for space in bridge.spaces]
    had_folder = Path("/etc/netns").exists()
    try:
        for folder in folders:
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")
        try:
            bridge.__enter__()
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        yield bridge
    finally:
        bridge.__exit__()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        if not had_folder:
            shutil.rmtree("/etc/netns", ignore_errors=True)


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2"
)
@pytest.mark.timeout(2 * DEADLINE_S)
def test_hosts_whose_own_name_is_that_of_loopback(tmp_path, loopback_names):
    (tmp_path / "script.py").write_text(STEPS)
    remove = ("GLOO_SOCKET_IFNAME", "LOCKSTEP_WATCH")
    workers = [loopback_names.start(rank, tmp_path / "script.py", tmp_path, remove=remove) for rank in range(2)]
    for rank, worker in enumerate(workers):
        out, errors = worker.communicate(timeout=2 * DEADLINE_S)
        assert worker.returncode == 0, errors
        assert out == f"gloo 10.77.0.{rank + 1} 1.5\n"
