"""`lockstep run --hosts a,b,c`: `lockstep run` on each of these hosts over ssh, and all of them end with this process.

Phases: one ssh a host, with the run's secret as the first line of its stdin; pass on what comes; end.

The stdin of each ssh stays open from here. However this process or the connection ends, `kill -9` included, the
launcher over there sees the end of its stdin, and ends itself and its workers: see `end_with_stdin`. What it has been
told to do is on a command line that others can read; the secret never is.
"""

import contextlib
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.comm.channel import SECRET_BYTES
from lockstep.comm.routes import is_loopback
from lockstep.environment import SECRET, STDIN, port_from
from lockstep.errors import LaunchError, UsageError
from lockstep.start.hosts import FAREWELL_S
from lockstep.start.relay import OutputStream, Relay
from lockstep.start.supervisor import collected_signals

# Without questions, which nobody could answer for several hosts at once; a link that is cut ends in 15 s.
_OPTIONS = shlex.split("-o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=5 -o ServerAliveCountMax=3")
_CONNECTED = b"lockstep: connected"
"""What the shell over there says first: from then on it is the launcher that speaks for its host."""
_CLOSING = b"lockstep run: "
_SSH_FAILED = 255
_NEVER_BEGAN = (2, 126, 127)
"""Exit codes of a launcher that was asked for what cannot be, and of a shell that finds no Python there."""
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class RemoteHost:
    """One host of a list."""

    name: str
    """As ssh takes it: `node0`, `me@10.0.0.1`, or an alias of ~/.ssh/config."""
    workers: int | None = None
    """How many it is to have, where the list says so."""


def parse_hosts(text: str) -> list[RemoteHost]:
    """The hosts of `a,b:4`, or of a hostfile's lines: `a`, `a:4` as in MPICH's, `a slots=4` as in Open MPI's."""
    hosts = []
    for line in re.split(r"[,\n]", text):
        entry = line.partition("#")[0].strip()
        match = re.fullmatch(r"([\w.@-]+)(?::(\d+)|\s+slots\s*=\s*(\d+))?", entry)
        if entry and (match is None or entry.startswith("-")):
            raise UsageError(f"{entry!r} is no host: give its name, and how many workers it has, as node0 or node0:4.")
        if match is not None:
            workers = match[2] or match[3]
            hosts.append(RemoteHost(match[1], int(workers) if workers else None))
    if not hosts:
        raise UsageError("the list of hosts is empty: give --hosts a,b,c or a --hostfile with a host a line.")
    if len({host.name for host in hosts}) < len(hosts):
        raise UsageError("a host is in the list twice: give each once, with how many workers it has, as node0:8.")
    return hosts


def read_hostfile(path: str) -> list[RemoteHost]:
    """The hosts of a file."""
    try:
        return parse_hosts(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"--hostfile {path} cannot be read: {error}.") from error


def meeting_point(hosts: Sequence[RemoteHost], ssh: str) -> str:
    """HOST:PORT, where ssh goes to for the first host, and a port that is likely to be free there."""
    name = _hostname(hosts[0], ssh)
    if _is_here(name):
        away = [host.name for host in hosts if not _is_here(_hostname(host, ssh))]
        if away:
            raise UsageError(
                f"the first host is {name}, where {away[0]} cannot reach it, and all workers meet there. List it by "
                "the name or address that the other hosts know it by, or give that as --meet HOST:PORT."
            )
    return f"{f'[{name}]' if ':' in name else name}:{port_from(secrets.randbelow(1 << 20))}"


def _is_here(name: str) -> bool:
    return name == "localhost" or is_loopback(name)


def _hostname(host: RemoteHost, ssh: str) -> str:
    """Where ssh goes to for a host."""
    try:
        asked = subprocess.run([*shlex.split(ssh), "-G", host.name], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise LaunchError(f"{ssh!r} cannot be started here: {error}. Is openssh-client installed?") from error
    found = re.search(r"^hostname (.+)$", asked.stdout, re.MULTILINE)
    return found[1] if found else host.name.rpartition("@")[2]


def commands(
    hosts: Sequence[RemoteHost], ssh: str, meet: str, options: Sequence[str], script: Sequence[str]
) -> list[list[str]]:
    """What is started here, one command a host. options, script: of `lockstep run`, as this one was given them."""
    built = []
    for rank, host in enumerate(hosts):
        added = ["--hostfile=", f"--hosts={len(hosts)}", f"--host-rank={rank}", f"--meet={meet}"]
        added += [f"--secret-file={STDIN}"] + ([f"--workers={host.workers}"] if host.workers else [])
        there = [sys.executable, "-m", "lockstep", "run", *options, *added, *script]
        line = f"cd {shlex.quote(str(Path.cwd()))} && echo {shlex.quote(_CONNECTED.decode())} && exec "
        built.append([*shlex.split(ssh), *_OPTIONS, host.name, line + shlex.join(there)])
    return built


def secret_of_run() -> str:
    """The secret that was given, or a new one."""
    return os.environ.get(SECRET) or secrets.token_hex(SECRET_BYTES)


def end_with_stdin() -> None:
    """From now on this process is ended, as by SIGTERM, at the end of its stdin: in the launcher over there."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1 << 10):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lockstep-stdin", daemon=True).start()


@dataclass(slots=True)
class _HostStream(OutputStream):
    """What one ssh says on stdout or stderr: lines that have their worker's number already."""

    is_connected: bool = False
    closing: list[bytes] = field(default_factory=list)
    """The launcher's last words, which are the same on every host."""

    def _sort(self, line: bytes, plain: bytes, now: float) -> list[bytes]:
        if line == _CONNECTED and not self.is_connected:
            self.is_connected = True
        elif self.closing or line.startswith(_CLOSING):
            self.closing.append(line)
        else:
            return [line]
        return []


def run(hosts: Sequence[RemoteHost], started: Sequence[Sequence[str]], secret: str, *, is_elastic: bool) -> int:
    """Run these commands, each with the secret, until all have ended; returns the run's exit code."""
    with collected_signals() as signals:
        processes = [_start(command, secret) for command in started]
        streams = [
            _HostStream(rank, pipe.fileno(), to_fd, None, has_prefix=False)
            for rank, process in enumerate(processes)
            for pipe, to_fd in ((process.stdout, 1), (process.stderr, 2))
            if pipe is not None
        ]
        relay = Relay(list(streams))
        relay.start()
        end_at = give_up = float("inf")
        while None in (codes := [process.poll() for process in processes]):
            now = time.monotonic()
            if end_at == float("inf") and any(codes) and not is_elastic:
                end_at = now + FAREWELL_S  # The others hear of it by themselves, and say so; if they have met.
            is_over = signals or relay.is_unread or _not_started(hosts, processes, streams)
            if give_up == float("inf") and (is_over or now > end_at):
                give_up = now + FAREWELL_S
                _end(processes)
            if len(signals) > 1 or now > give_up:
                for process in processes:
                    process.kill()
            time.sleep(_LOOK_S)
        relay.finish()
    _end(processes)
    missing = _not_started(hosts, processes, streams)
    _say_last(streams, missing)
    if signals:
        return 128 + signals[0]
    ended = [process.returncode for process in processes]
    if is_elastic and 0 in ended:
        return 0
    told = [code for code in ended if code not in (0, _SSH_FAILED)]
    return _SSH_FAILED if missing or (not told and any(ended)) else next(iter(told), 0)


def _not_started(
    hosts: Sequence[RemoteHost], processes: Sequence[subprocess.Popen[bytes]], streams: Sequence["_HostStream"]
) -> list[str]:
    """The hosts on which `lockstep run` was not even begun, so that the others would wait for them."""
    found = []
    for n, (host, process) in enumerate(zip(hosts, processes, strict=True)):
        out, errors = streams[2 * n : 2 * n + 2]
        is_a_workers = any(line.startswith(_CLOSING + b"worker ") for line in errors.closing)  # Whose exit code it is.
        if (process.returncode in _NEVER_BEGAN and not is_a_workers) or (
            process.returncode == _SSH_FAILED and not out.is_connected
        ):
            found.append(f"{host.name} (exit code {process.returncode})")
    return found


def _start(command: Sequence[str], secret: str) -> subprocess.Popen[bytes]:
    try:
        # In a session of its own, so that Ctrl-C comes here alone: else nobody would hear how it has ended over there.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"{command[0]} could not be started: {error}. Is openssh-client installed?") from error
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # It has ended already, and says why.
        process.stdin.write(secret.encode() + b"\n")
    return process


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Have the launchers end by themselves."""
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def _say_last(streams: Sequence[_HostStream], missing: Sequence[str]) -> None:
    """Each of the launchers' last words once."""
    said: list[bytes] = []
    for stream in streams:
        text = b"\n".join(stream.closing)
        if text and text not in said and not (missing and b"ended by SIGTERM" in text):
            said.append(text)
    if missing:
        why = f"lockstep run: it could not be started on {', '.join(missing)}; what ssh says is above."
        said.append(why.encode())
    os.write(2, b"".join(text + b"\n" for text in said))
