"""The pure parts of starting workers: who failed first, what the host offers, what a worker's environment is."""

import signal

import pytest

from lockstep import environment
from lockstep.errors import LaunchError, UsageError
from lockstep.start import host
from lockstep.start.failure import Failure, first, how
from lockstep.start.variables import refuse_nesting, variables

LOST = "Traceback (most recent call last):\n  ...\nlockstep.errors.WorkerLost: worker 0: worker 1 left"
VOID = "Traceback (most recent call last):\n  ...\nlockstep.errors.StepVoid: worker 1"
GLOO = "Traceback (most recent call last):\n  ...\nRuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1"
QUOTED = "Traceback (most recent call last):\n  ...\nRuntimeError: Got the following error when running the callback: "
QUOTED += "WorkerLost: worker 0: worker 1 (pid 7 on host) ended"
OWN = 'Traceback (most recent call last):\n    raise ValueError("Connection closed by peer")\nValueError: mine'
WRAPPED = LOST + "\n\nThe above exception was the direct cause of the following exception:\n\nRuntimeError: gave up"


@pytest.mark.parametrize("consequence", [LOST, VOID, GLOO, QUOTED, WRAPPED])
def test_a_cause_comes_before_its_consequences(consequence):
    cause, effect = Failure(1, 20.0, 1, OWN), Failure(0, 10.0, 1, consequence)
    assert first([effect, cause]) is cause
    assert first([effect, Failure(2, 9.0, 1, consequence)]).rank == 2


def test_among_equals_the_earliest():
    assert first([Failure(0, 2.0, 1, OWN), Failure(1, 1.0, 3)]).rank == 1
    assert first([]) is None


def test_a_killed_worker_is_never_a_consequence():
    assert first([Failure(0, 1.0, 1, LOST), Failure(1, 2.0, -9, LOST)]).rank == 1


def test_exit_codes_in_words():
    assert how(3) == "exit code 3"
    assert how(-signal.SIGKILL) == "killed by SIGKILL, often because memory ran out"
    assert how(-signal.SIGTERM) == "killed by SIGTERM"
    assert how(-63) == "killed by signal 63"
    assert (Failure(0, 0.0, -9).status, Failure(0, 0.0, 3).status) == (137, 3)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 3), ("", 0), ("-1", 0), ("0", 1), ("2,0", 2), ("0,-1,1", 1), ("GPU-5f, MIG-77", 2), ("NoDevFiles", 0)],
)
def test_gpus_are_counted_as_cuda_counts_them(visible, expected):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert host.num_gpus(environ, ["nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"]) == expected
    assert host.num_gpus(environ, ["nvidiactl"]) == 0


def test_cores_in_a_container():
    assert host.cores_in_quota("max 100000\n") is None
    assert host.cores_in_quota("250000 100000\n") == 2
    assert host.num_cores() >= 1


def test_numbers_of_workers_and_threads():
    assert host.num_workers(None) >= 1
    assert host.num_workers(5) == 5
    for wrong in (0, -1, True, 1.5, "2"):
        with pytest.raises(UsageError, match="workers cannot be started"):
            host.num_workers(wrong)
    assert host.num_threads(None, 10**6, {}) == 1
    assert host.num_threads(None, 2, {"OMP_NUM_THREADS": "9"}) is None
    assert host.num_threads(4, 2, {"OMP_NUM_THREADS": "9"}) == 4


def test_join_understands_a_workers_environment():
    added = variables({"GLOO_SOCKET_IFNAME": "eth0"}, rank=1, size=3, port=1234, num_threads=2)
    launch = environment.read(added)
    assert (launch.rank, launch.size, launch.local_rank, launch.local_size) == (1, 3, 1, 3)
    assert (launch.address, launch.port, launch.store_is_up) == ("127.0.0.1", 1234, True)
    assert added["OMP_NUM_THREADS"] == "2"
    assert "GLOO_SOCKET_IFNAME" not in added
    assert "OMP_NUM_THREADS" not in variables({}, rank=0, size=1, port=1, num_threads=None)


def test_workers_do_not_start_workers():
    refuse_nesting({"SLURM_PROCID": "0"})  # A batch script is a Slurm process, and may well start workers.
    for name in ("RANK", "OMPI_COMM_WORLD_RANK"):
        with pytest.raises(LaunchError, match=f"{name}=0 is set"):
            refuse_nesting({name: "0"})
