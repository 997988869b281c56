"""`lockstep run --hosts a,b` over a real sshd on a port of its own: the run, its secret, its ends, what is shown."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import netns
import pytest
from processes import PUBLISH, is_alive, wait_for_pids, wait_until, wait_until_gone
from test_hosts import TRAIN, undisturbed  # noqa: F401 (a fixture)

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="needs openssh-server and openssh-client"),
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0, reason="sshd lets root in only if root runs it"
    ),
]
full = pytest.mark.skipif("FULL" not in os.environ, reason="needs FULL=1: real workers on several hosts")


class Sshd:
    """Keys, and an sshd that takes them."""

    def __init__(self, folder: Path, host: netns.Host | None = None) -> None:
        self.folder = folder
        os.makedirs("/run/sshd", exist_ok=True)
        for name in ("host_key", "key"):
            if not (folder / name).exists():
                subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
        address = host.address if host is not None else "127.0.0.1"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = 2222 if host is not None else probe.getsockname()[1]
        options = {
            "HostKey": folder / "host_key",
            "AuthorizedKeysFile": folder / "key.pub",
            "PidFile": "none",
            "UsePAM": "no",
            "StrictModes": "no",
            "PermitRootLogin": "prohibit-password",
            "MaxStartups": "100",
            "SetEnv": " ".join(f'{name}="{os.environ.get(name, "")}"' for name in ("PYTHONPATH", "OMP_NUM_THREADS")),
        }
        command = [str(SSHD), "-D", "-e", "-f", "/dev/null", "-o", f"ListenAddress={address}:{self.port}"]
        command += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        inside = [] if host is None else ["ip", "netns", "exec", host.name]
        with (folder / f"sshd-{address}.log").open("wb") as log:
            self.process = subprocess.Popen([*inside, *command], stdout=log, stderr=log)
        wait_until(lambda: b"listening on" in (folder / f"sshd-{address}.log").read_bytes(), "sshd to listen")

    @property
    def client(self) -> str:
        """What `--ssh` is given."""
        words = ["ssh", "-p", str(self.port), "-i", str(self.folder / "key"), "-F", "/dev/null"]
        return shlex.join([*words, "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-q"])


@pytest.fixture
def sshd(tmp_path):
    served = Sshd(tmp_path)
    yield served
    served.process.kill()
    served.process.wait()


def start(folder, script, *words, **environ):
    (folder / "train.py").write_text(script)
    with (folder / "said").open("wb") as said:
        return subprocess.Popen(
            [*netns.LOCKSTEP, "run", *words, "train.py"],
            cwd=folder, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
        )  # fmt: skip


def said(folder):
    return (folder / "said").read_text()


SHOWS = """
import os, pathlib
told = os.environ
print("worker", told["RANK"], "of", told["WORLD_SIZE"], "local", told["LOCAL_RANK"], told["A"], pathlib.Path.cwd().name)
pathlib.Path("secret" + told["RANK"]).write_text(told["LOCKSTEP_SECRET"])
command = pathlib.Path("/proc", str(os.getppid()), "cmdline").read_bytes()
pathlib.Path("launcher" + told["RANK"]).write_bytes(command)
"""


def test_hosts_are_started_with_a_secret_that_no_command_line_shows(sshd, tmp_path):
    (tmp_path / "hosts").write_text("127.0.0.1 slots=2\nlocalhost\n")
    words = ("--hostfile", "hosts", "--ssh", sshd.client, "-n", "1", "--env", "A=x y", "--log-dir", "logs")
    run = start(tmp_path, SHOWS, *words)
    assert run.wait(60) == 0, said(tmp_path)
    shown = sorted(line for line in said(tmp_path).splitlines() if line.startswith("["))
    assert shown == [f"[{n}] worker {n} of 3 local {n % 2} x y {tmp_path.name}" for n in range(3)]
    assert said(tmp_path).count("never met") == 1  # What every launcher says last, once.
    assert "lockstep: connected" not in said(tmp_path)
    found = {(tmp_path / f"secret{n}").read_text() for n in range(3)}
    assert len(found) == 1 and len(found.pop()) >= 32
    for n in range(3):
        assert (tmp_path / f"secret{n}").read_text().encode() not in (tmp_path / f"launcher{n}").read_bytes()
        assert (tmp_path / f"logs/worker-{n}.log").read_text() == shown[n].partition("] ")[2] + "\n"


STAYS = PUBLISH + "\nstay_with_a_child()\n"


@pytest.mark.parametrize("how", ["starter", "ssh"])
def test_workers_end_with_the_starter_and_with_the_connection(sshd, tmp_path, how):
    run = start(tmp_path, STAYS, "--hosts", "127.0.0.1,localhost", "--ssh", sshd.client, "-n", "1", "--notice", "0.2")
    pids = wait_for_pids(tmp_path, 4)
    ssh = [int(pid) for pid in Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()]
    assert len(ssh) == 2
    os.kill(run.pid if how == "starter" else ssh[1], signal.SIGKILL)
    wait_until_gone(pids)
    assert run.wait(60) == (-9 if how == "starter" else 1)
    wait_until_gone(ssh)


def test_an_interrupted_starter_and_a_host_that_cannot_be_reached(sshd, tmp_path):
    client = sshd.client
    run = start(tmp_path, STAYS, "--hosts", "127.0.0.1", "--ssh", client, "-n", "2")
    pids = wait_for_pids(tmp_path, 4)
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert not any(map(is_alive, pids))
    words = ("--hosts", "127.0.0.1,no.such.host.invalid", "--ssh", client.replace(" -q", ""), "-n", "1")
    run = start(tmp_path, "", *words)
    assert run.wait(60) == 2
    assert "the first host is 127.0.0.1, where no.such.host.invalid cannot reach it" in said(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    run = start(tmp_path, "", *words, "--meet", f"127.0.0.1:{port}")
    assert run.wait(60) == 255
    assert "lockstep run: it could not be started on no.such.host.invalid (exit code 255)" in said(tmp_path)
    assert "Could not resolve hostname" in said(tmp_path)
    run = start(tmp_path, "import sys; sys.exit(2)", "--hosts", "127.0.0.1", "--ssh", client, "-n", "2")
    assert run.wait(60) == 2, "a worker's exit code is no launcher's"
    assert "failed first (exit code 2)" in said(tmp_path) and "could not be started" not in said(tmp_path)
    (tmp_path / "train.py").unlink()
    run = subprocess.run(
        [*netns.LOCKSTEP, "run", "--hosts", "127.0.0.1,localhost", "--ssh", client, "no.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert run.returncode == 255 and run.stderr.count("there is no 'no.py' here") == 1, run.stderr


FAILS = """
import os, sys, time
print("hello")
if os.environ["RANK"] == "1":
    raise ValueError("bad sample")
time.sleep(100)
"""


def test_what_is_shown_and_what_is_kept(tmp_path):
    run = start(tmp_path, FAILS, "-n", "3", "--only", "2", "--notice", "0.1", "--log-dir", "logs/deep")
    assert run.wait(60) == 1
    text = said(tmp_path)
    assert re.findall(r"^\[\d\] .*$", text, re.MULTILINE) == ["[2] hello"]
    assert "worker 1 failed first" in text and text.rstrip().endswith("ValueError: bad sample")
    kept = [(tmp_path / f"logs/deep/worker-{n}.log").read_text() for n in range(3)]
    assert kept[0] == kept[2] == "hello\n"
    assert "hello\n" in kept[1] and "Traceback" in kept[1] and "ValueError: bad sample\n" in kept[1]
    quiet = start(tmp_path, FAILS.replace('== "1"', '== "0"'), "-n", "1", "--quiet")
    assert quiet.wait(60) == 1
    assert "hello" not in said(tmp_path) and "ValueError: bad sample" in said(tmp_path)


@full
@pytest.mark.skipif(bool(netns.missing()), reason=netns.missing() or "-")
@pytest.mark.parametrize("what", ["nothing", "elastic", "cut"])
def test_hosts_with_an_sshd_each_train_as_one(tmp_path, undisturbed, what):  # noqa: F811
    with netns.hosts(3) as hosts, contextlib.ExitStack() as stack:
        servers = [Sshd(tmp_path, host) for host in hosts[:2]]
        for server in servers:
            stack.callback(server.process.wait)
            stack.callback(server.process.kill)
        (tmp_path / "train.py").write_text(TRAIN)
        names = ",".join(host.address for host in hosts[:2])
        epochs, pause = ("3", "0") if what == "nothing" else ("20", "0.1")
        words = ["--hosts", names, "--ssh", servers[0].client, "-n", "2", "--env", f"EPOCHS={epochs}"]
        words += ["--env", f"PAUSE={pause}", *(["--elastic"] if what == "elastic" else []), "train.py"]
        run = hosts[2].start([*netns.LOCKSTEP, "run", *words], tmp_path, "said")
        if what != "nothing":
            until = time.monotonic() + 100
            while "step 8 " not in said(tmp_path):
                assert time.monotonic() < until and run.poll() is None, said(tmp_path)
                time.sleep(0.05)
            hosts[1].cut()
        assert run.wait(150) == (1 if what == "cut" else 0), said(tmp_path)
        if what == "cut":
            assert "was not heard of for 10 s" in said(tmp_path)
        else:
            assert set(re.findall(r"HASH (\w+)", said(tmp_path))) == {undisturbed(epochs)}
