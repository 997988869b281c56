"""One script under every launcher that is here, and alone."""

import itertools
import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import os, torch, lockstep
world = lockstep.join(timeout=40)
model = lockstep.DataParallel(torch.nn.Linear(3, 3))
model(torch.ones(1, 3) * (1 + world.rank)).sum().backward()
grad = model.module.weight.grad[0, 0].item()
line = f"{world.rank}/{world.size} local {world.local_rank}/{world.local_size} {grad}\\n"
os.write(1, line.encode())  # In one piece: torchrun's workers share a pipe.
"""
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


SLURM = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid())}  # The port is made from the job's number.
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable]
TWO = ["0/2 local 0/2 1.5", "1/2 local 1/2 1.5"]


def begin(command, **variables):
    return subprocess.Popen(command, env=ENVIRON | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """The processes of every launcher, all running at the same time."""
    script = tmp_path_factory.mktemp("launchers") / "train.py"
    script.write_text(SCRIPT)
    groups = {
        "alone": [begin([sys.executable, script])],
        "torchrun": [begin([*TORCHRUN, script])],
        "slurm": [begin([sys.executable, script], SLURM_PROCID=n, SLURM_LOCALID=n, **SLURM) for n in "01"],
    }
    if shutil.which("mpirun"):
        groups["openmpi"] = [begin([*MPIRUN, script])]
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


def test_slurm(started):
    assert lines(started["slurm"]) == TWO


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_openmpi(started):
    assert lines(started["openmpi"]) == TWO
