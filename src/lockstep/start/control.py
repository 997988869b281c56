"""How an elastic run is told to change while it goes on: a Unix socket of its launcher, for the same user alone.

The socket has a name in no file system, so nothing is left behind. A name says whose run it is and which: by the
launcher's process id, and by the name that `lockstep run --name` gave. Anybody can take a name in that space, so both
sides ask the kernel who the other one is before they believe a word.

A request is one line, `resize N`, and so is the answer: `ok `, or `no `, and a sentence.
"""

import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.comm.channel import is_same_user
from lockstep.errors import LaunchError, UsageError

_PREFIX = "lockstep-run"
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}")
_LONGEST_BYTES = 256
_PATIENCE_S = 5.0
"""How long the other side may take for its one line."""
_BACKLOG = 16


def check_name(name: str) -> None:
    """Raise UsageError for what cannot be the name of a run."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r}: the name of a run begins with a letter and has letters, digits, `_`, `-` and `.`, 64 at "
            "most."
        )


class Control:
    """The launcher's side. `resize` is called with how many workers are wanted, and returns what came of it."""

    def __init__(self, name: str | None, resize: Callable[[int], str]) -> None:
        self._resize = resize
        self._listeners: list[socket.socket] = []
        self._asking: dict[socket.socket, tuple[float, bytes]] = {}
        """Since when each connection is there, and what has come of its line."""
        if sys.platform != "linux":
            if name is not None:
                raise LaunchError("--name needs abstract Unix sockets, which this system has not. Use SIGUSR1.")
            return
        for run in (str(os.getpid()), name):
            if run is not None:
                self._listen(run)

    @property
    def sockets(self) -> list[socket.socket]:
        """What `attend` is to be called for when it can be read from."""
        return [*self._listeners, *self._asking]

    def attend(self) -> None:
        """Take in what has arrived, and answer what is whole; never waits."""
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                while True:
                    asking, _ = listener.accept()
                    if not is_same_user(asking):
                        asking.close()
                        continue
                    asking.setblocking(False)
                    self._asking[asking] = (time.monotonic(), b"")
        for asking, (since, line) in list(self._asking.items()):
            with contextlib.suppress(BlockingIOError):
                try:
                    data = asking.recv(_LONGEST_BYTES)
                except ConnectionError:
                    data = b""
                line += data
                self._asking[asking] = (since, line)
                if line.endswith(b"\n") and len(line) <= _LONGEST_BYTES:
                    self._answer(asking, line)
                if line.endswith(b"\n") or len(line) > _LONGEST_BYTES or not data:
                    self._drop(asking)
                continue
            if time.monotonic() > since + _PATIENCE_S:
                self._drop(asking)

    def close(self) -> None:
        """Listen no more."""
        for each in self.sockets:
            each.close()
        self._listeners, self._asking = [], {}

    def _listen(self, run: str) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_address(run))
        except OSError as error:
            listener.close()
            self.close()
            raise LaunchError(f"--name {run}: a run of yours on this host has this name already.") from error
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._listeners.append(listener)

    def _answer(self, asking: socket.socket, line: bytes) -> None:
        match = re.fullmatch(r"resize (\d{1,6})\n", line.decode(errors="replace"))
        try:
            said = "ok " + self._resize(int(match[1])) if match else "no this launcher does not know that request."
        except UsageError as error:
            said = f"no {error}"
        with contextlib.suppress(OSError):
            asking.send(said.replace("\n", " ").encode() + b"\n")

    def _drop(self, asking: socket.socket) -> None:
        del self._asking[asking]
        asking.close()


def resize(run: str, wanted: int) -> str:
    """Ask the launcher of `run`, by its process id or name, for so many workers; returns what it said.

    Raises UsageError if it refuses, and LaunchError if there is no such run of this user's.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(_PATIENCE_S)
        try:
            channel.connect(_address(run))
            if not is_same_user(channel):
                raise LaunchError(f"what answers for run {run!r} belongs to another user.")
            channel.sendall(f"resize {wanted}\n".encode())
            said = _line(channel)
        except (ConnectionError, FileNotFoundError) as error:
            running = ", ".join(runs()) or "none"
            raise LaunchError(
                f"there is no elastic run {run!r} of yours on this host. Give the process id of `lockstep run "
                f"--elastic`, or its --name. There are: {running}."
            ) from error
        except TimeoutError as error:
            raise LaunchError(f"the launcher of run {run!r} did not answer within {_PATIENCE_S:g} s.") from error
    if not said.startswith("ok "):
        raise UsageError(said.removeprefix("no ") or f"the launcher of run {run!r} has just ended.")
    return said.removeprefix("ok ")


def runs() -> list[str]:
    """The elastic runs of this user on this host, by process id and by name."""
    prefix = f"@{_PREFIX}-{os.geteuid()}-"
    try:
        lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    except OSError:
        return []
    names = {line.split()[-1].removeprefix(prefix) for line in lines if f" {prefix}" in line}
    return sorted(names)


def _address(run: str) -> str:
    return f"\0{_PREFIX}-{os.geteuid()}-{run}"


def _line(channel: socket.socket) -> str:
    received = b""
    while not received.endswith(b"\n"):
        data = channel.recv(1 << 12)
        if not data:
            break
        received += data
    return received.decode(errors="replace").strip()
