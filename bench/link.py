"""Two hosts and a cable between them, on one machine: network namespaces joined by a virtual Ethernet pair.

Nothing outside the two namespaces is touched, and nothing outside can reach in. Needs root and iproute2. The
namespaces are removed when the block ends, however it ends; those of a process that was killed are removed by the
next one.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import NoReturn

INTERFACE = "link0"
"""The cable's end, by the same name in both namespaces."""
ADDRESSES = ("10.77.0.1", "10.77.0.2")
BURST_BYTES = 256 << 10
"""What may pass at once: a few of the 64 KB packets that the kernel makes of a stream."""


class Link:
    """A context manager: within it the two namespaces exist."""

    def __init__(self) -> None:
        _require_tools()
        self._names = tuple(f"lockstep-{os.getpid()}-{side}" for side in range(2))

    def __enter__(self) -> "Link":
        _sweep()
        signal.signal(signal.SIGTERM, _exit)  # So that SIGTERM, too, runs `__exit__`.
        try:
            self._connect()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def start(self, side: int, command: Sequence[str], environ: dict[str, str]) -> "subprocess.Popen[bytes]":
        """Start `command` in the namespace of `side` (0 or 1)."""
        return subprocess.Popen(["ip", "netns", "exec", self._names[side], *command], env=environ)

    def run_here(self, workers: int = 1, **more: str) -> None:
        """Run this very script as so many workers on each side, all of one world; raises SystemExit if one fails.

        `more` goes into their environment.
        """
        environ = os.environ | {"WORLD_SIZE": str(2 * workers), "LOCAL_WORLD_SIZE": str(workers)}
        environ |= {
            "MASTER_PORT": "29500",
            "MASTER_ADDR": ADDRESSES[0],
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "OMP_NUM_THREADS": "1",
            **more,
        }
        environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # The namespaces have no name service, of which torch would warn.
        command = [sys.executable, *sys.argv]
        started = []
        try:
            for rank in range(2 * workers):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank % workers)}
                started.append(self.start(rank // workers, command, environ | place))
            has_failed = _await(started)
        finally:
            for worker in started:
                worker.kill()
                worker.wait()
        if has_failed:
            raise SystemExit(1)

    def _connect(self) -> None:
        first, second = self._names
        for name in self._names:
            _run("ip", "netns", "add", name)
        pair = ["type", "veth", "peer", "name", INTERFACE, "netns", second]
        _run("ip", "link", "add", INTERFACE, "netns", first, *pair)
        for name, address in zip(self._names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def limit(bits_per_second: float) -> None:
    """Let the calling process's end of the link send no faster than this; the other end must do the same."""
    rate = f"{bits_per_second:.0f}bit"
    shape = ["tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "50ms"]
    _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", *shape)


def _await(workers: list["subprocess.Popen[bytes]"]) -> bool:
    """Wait until all have ended well or one has not; returns whether one has not."""
    while any(worker.poll() is None for worker in workers):
        if any(worker.returncode for worker in workers):
            return True
        time.sleep(0.1)
    return any(worker.returncode for worker in workers)


def _require_tools() -> None:
    if os.geteuid() != 0:
        raise SystemExit("this makes network namespaces, which only root may: run it as root.")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise SystemExit(f"this needs `{tool}`, which is not on the PATH. It comes with iproute2.")


def _sweep() -> None:
    """Remove namespaces whose makers have ended without doing it."""
    listed = subprocess.run(["ip", "netns", "list"], stdout=subprocess.PIPE, text=True, check=True).stdout
    for name, pid in re.findall(r"^(lockstep-(\d+)-[01])\b", listed, re.MULTILINE):
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def _exit(_number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"`{' '.join(command)}` failed: {done.stdout.strip()}")
