"""One script under every launcher that is here, and alone."""

import itertools
import os
import shutil
import subprocess
import sys
from datetime import timedelta

import netns
import pytest
import torch.distributed as dist

from lockstep.comm import meeting
from lockstep.comm.peers import Peer
from lockstep.errors import LaunchError

SCRIPT = """
import os, torch, lockstep
world = lockstep.join(timeout=40)
model = lockstep.DataParallel(torch.nn.Linear(3, 3))
model(torch.ones(1, 3) * (1 + world.rank)).sum().backward()
grad = model.module.weight.grad[0, 0].item()
line = f"{world.rank}/{world.size} local {world.local_rank}/{world.local_size} {grad}\\n"
os.write(1, line.encode())  # In one piece: torchrun's workers share a pipe.
"""
DIES_ONCE = """
import os
from datetime import timedelta
from torch.distributed import TCPStore
if os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timedelta(seconds=60))
    store.get("lockstep/here/0")  # Worker 0 is in join(), and has left traces there.
    os._exit(1)
"""
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


SLURM = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid())}  # The port is made from the job's number.
OTHER_SLURM = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid() + 1)}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
OPENMPI = shutil.which("mpirun.openmpi")  # Debian's names, since both may be there, and `mpirun` is either.
MPICH = shutil.which("mpiexec.hydra")
MPIRUN = [OPENMPI, "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
TWO = ["0/2 local 0/2 1.5", "1/2 local 1/2 1.5"]


def begin(command, **variables):
    return subprocess.Popen(command, env=ENVIRON | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The processes of every launcher, all running at the same time."""
    script = tmp_path_factory.mktemp("launchers") / "train.py"
    script.write_text(SCRIPT)
    restarts = script.with_name("restarts.py")
    restarts.write_text(DIES_ONCE + SCRIPT)
    groups = {
        "alone": [begin([sys.executable, script])],
        "torchrun": [begin([*TORCHRUN, script])],
        "restarted": [begin([*TORCHRUN, "--max-restarts", "1", restarts])],
        "slurm": [begin([sys.executable, script], SLURM_PROCID=n, SLURM_LOCALID=n, **SLURM) for n in "01"],
    }
    if "FULL" in os.environ:
        secret = {"LOCKSTEP_SECRET": "5" * 32, **OTHER_SLURM}
        groups["torchrun with a secret"] = [begin([*TORCHRUN, script], LOCKSTEP_SECRET="5" * 32)]
        groups["slurm with a secret"] = [
            begin([sys.executable, script], SLURM_PROCID=n, SLURM_LOCALID=n, **secret) for n in "01"
        ]
    if OPENMPI:
        groups["openmpi"] = [begin([*MPIRUN, script])]
    if MPICH:
        groups["mpich"] = [begin([MPICH, "-n", "2", sys.executable, script])]
    yield groups
    for process in itertools.chain(*groups.values()):
        process.kill()
        process.wait()


def lines(processes):
    said = []
    for process in processes:
        out, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        said += out.splitlines()
    return sorted(said)


def test_alone(started):
    assert lines(started["alone"]) == ["0/1 local 0/1 1.0"]


def test_torchrun(started):
    assert lines(started["torchrun"]) == TWO


def test_torchrun_restarts_a_worker_that_died_before_it_joined(started):
    assert lines(started["restarted"]) == TWO


@pytest.mark.skipif("FULL" not in os.environ, reason="needs FULL=1")
def test_a_users_secret(started):
    assert lines(started["torchrun with a secret"]) == TWO
    assert lines(started["slurm with a secret"]) == TWO


def test_who_waits_says_for_whom_and_where(monkeypatch, capsys):
    monkeypatch.setattr(meeting, "NOTICE_S", 0.1)
    with pytest.raises(LaunchError, match=r"for 3 workers at host:29500 .*missing: 1, 2"):
        meeting.Roster(dist.HashStore(), Peer.me(0), 3, timedelta(seconds=0.5), "host:29500").agree()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "worker 0 has waited" in said and "at host:29500; not there yet: 1, 2" in said


def test_slurm(started):
    assert lines(started["slurm"]) == TWO


@pytest.mark.skipif(OPENMPI is None, reason="needs Open MPI (Debian: openmpi-bin)")
def test_openmpi(started):
    assert lines(started["openmpi"]) == TWO


@pytest.mark.skipif(MPICH is None, reason="needs MPICH (Debian: mpich)")
def test_mpich(started):
    assert lines(started["mpich"]) == TWO


@pytest.mark.timeout(400)
@pytest.mark.skipif("FULL" not in os.environ, reason="needs FULL=1: real workers on two hosts")
@pytest.mark.skipif(bool(netns.missing()), reason=netns.missing() or "-")
@pytest.mark.parametrize("secret", ["", "5" * 32])
def test_torchrun_over_two_hosts(tmp_path, secret):
    (tmp_path / "train.py").write_text(SCRIPT)
    with netns.hosts(2) as hosts:
        place = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "test"]
        place += ["--rdzv-endpoint", f"{hosts[0].address}:29400"]
        started = []
        for rank, host in enumerate(hosts):
            # Both have the same name here, by which torchrun would find out who serves.
            own = ["--rdzv-conf", f"is_host={rank == 0}", "--local-addr", host.address]
            command = [sys.executable, "-m", "torch.distributed.run", *place, *own, "train.py"]
            started.append(host.start(command, tmp_path, f"said{rank}", OMP_NUM_THREADS="1", LOCKSTEP_SECRET=secret))
        codes = [process.wait(170) for process in started]
    said = [(tmp_path / f"said{rank}").read_text() for rank in (0, 1)]
    found = sorted(line for text in said for line in text.splitlines() if " local " in line)
    assert codes == [0, 0], said
    assert found == [f"{rank}/4 local {rank % 2}/2 2.5" for rank in range(4)], said
