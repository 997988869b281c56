import pytest

from lockstep import LaunchError
from lockstep.environment import Launch, first_host, read

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "9",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "77",
    "SLURM_JOB_NODELIST": "n[03-04]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-123@1",
}


def test_alone():
    assert read({}) == Launch("alone")
    assert read({"WORLD_SIZE": "1"}) == Launch("alone")
    assert read({"MASTER_ADDR": "left over", "MASTER_PORT": "from elsewhere"}) == Launch("alone")


def test_torchrun():
    assert read(TORCHRUN) == Launch("torchrun", 1, 4, 1, 2, "a", 9)
    assert read(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).store_is_up
    without_local = {k: v for k, v in TORCHRUN.items() if not k.startswith("LOCAL")}
    assert read(without_local).local_rank is None
    assert read({"RANK": "0", "WORLD_SIZE": "1"}).size == 1


def test_torchrun_inside_slurm_is_torchrun():
    assert read(SLURM | TORCHRUN).launcher == "torchrun"


def test_slurm():
    launch = read(SLURM)
    assert (launch.launcher, launch.rank, launch.size, launch.local_rank, launch.address) == ("slurm", 3, 8, 1, "n03")
    assert launch.port == read(SLURM | {"SLURM_PROCID": "5"}).port
    assert read(SLURM | {"MASTER_ADDR": "b", "MASTER_PORT": "5"}).address == "b"
    assert read(SLURM | {"SLURM_STEP_NUM_TASKS": "4"}).size == 4


def test_openmpi():
    launch = read(OPENMPI)
    assert (launch.launcher, launch.rank, launch.size, launch.local_size) == ("openmpi", 1, 2, 2)
    assert launch.address == "127.0.0.1"
    assert launch.port == read(OPENMPI | {"OMPI_COMM_WORLD_RANK": "0"}).port


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RANK": "1"}, ["RANK", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK"]),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, ["MASTER_ADDR"]),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, ["MASTER_PORT"]),
        (TORCHRUN | {"RANK": "4"}, ["RANK", "WORLD_SIZE", "worker 4 of 4"]),
        (TORCHRUN | {"RANK": "one"}, ["RANK='one'"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK"]),
        (TORCHRUN | {"WORLD_SIZE": "0"}, ["0"]),
        (TORCHRUN | {"LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, ["LOCAL_WORLD_SIZE=5", "WORLD_SIZE=4"]),
        ({"SLURM_PROCID": "1"}, ["SLURM_PROCID", "SLURM_NTASKS"]),
        (SLURM | {"WORLD_SIZE": "2"}, ["WORLD_SIZE=2", "SLURM_NTASKS"]),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, ["SLURM_NNODES", "MASTER_ADDR"]),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ["OMPI_COMM_WORLD_RANK"]),
        (OPENMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, ["MASTER_ADDR"]),
    ],
)
def test_what_does_not_add_up_is_named(environ, named):
    with pytest.raises(LaunchError) as caught:
        read(environ)
    assert all(name in str(caught.value) for name in named)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-05,9],x", "gpu03"),
        ("a-b[7]", "a-b7"),
        ("r[1-2]-ib", "r1-ib"),
        ("n[2,5]", "n2"),
    ],
)
def test_first_host(nodes, host):
    assert first_host(nodes) == host
