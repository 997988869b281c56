"""One script under every launcher that is here, and alone."""

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


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def run(command, **variables):
    return subprocess.Popen(command, env=ENVIRON | variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def lines(*processes):
    said = []
    for process in processes:
        out, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors
        said += out.splitlines()
    return sorted(said)


TWO = ["0/2 local 0/2 1.5", "1/2 local 1/2 1.5"]


def test_alone(script):
    assert lines(run([sys.executable, script])) == ["0/1 local 0/1 1.0"]


def test_torchrun(script):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    assert lines(run(command)) == TWO


def test_slurm(script):
    job = str(os.getpid())  # The port is made from it.
    tasks = [
        run([sys.executable, script], SLURM_PROCID=n, SLURM_NTASKS="2", SLURM_LOCALID=n, SLURM_JOB_ID=job) for n in "01"
    ]
    assert lines(*tasks) == TWO


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs Open MPI")
def test_openmpi(script):
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, script]
    assert lines(run(command)) == TWO
