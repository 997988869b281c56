import pytest

from lockstep import LaunchError, UsageError
from lockstep.environment import HostPlace, Launch, first_host, hosts_of, read, required_secret, workers_of
from lockstep.start.host import refuse_nesting

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


MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


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


def test_mpich():
    launch = read(MPICH)
    assert (launch.launcher, launch.rank, launch.size, launch.local_rank, launch.local_size) == ("mpich", 1, 2, 1, 2)
    assert (launch.address, launch.port) == ("127.0.0.1", read(MPICH | {"PMI_RANK": "0"}).port)
    several = MPICH | {"PMI_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "9"}
    assert (read(several).address, read(several).port) == ("a", 9)


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
        ({"PMI_RANK": "1"}, ["PMI_RANK", "PMI_SIZE"]),
        (MPICH | {"PMI_SIZE": "4"}, ["MPICH started 4 workers, 2 of them on this host", "MASTER_ADDR"]),
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


STEP = SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}


def test_one_host_is_no_run_over_several():
    for environ in ({}, SLURM, SLURM | {"SLURM_STEP_NUM_NODES": "1"}, {"JOB_COMPLETION_INDEX": "3"}):
        assert hosts_of(environ, None, None, None, None) is None
    assert hosts_of({}, "1", None, None, None) is None


def test_the_place_of_a_host():
    assert hosts_of({}, "3", 2, "a:1", None) == HostPlace("a:1", 3, 2)
    assert hosts_of({"JOB_COMPLETION_INDEX": "1"}, "2", None, "a:1", None) == HostPlace("a:1", 2, 1)
    operator = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "m", "PET_MASTER_PORT": "9"}
    assert hosts_of(operator, None, None, None, None) == HostPlace("m:9", 4, 3)
    assert hosts_of({}, None, None, None, "a:1") == HostPlace("a:1", 0, None)


def test_the_place_of_a_pod_of_an_operator():
    elastic = {"PET_NNODES": "2:4", "PET_RDZV_ENDPOINT": "job-worker-0:29400", "PET_NPROC_PER_NODE": "8"}
    assert hosts_of(elastic, None, 1, None, None) == HostPlace("job-worker-0:29400", 2, 1)
    assert hosts_of(elastic, None, 3, None, None) == HostPlace("job-worker-0:29400", 0, None)  # It joins.
    assert (workers_of(elastic), workers_of({"PET_NPROC_PER_NODE": "gpu"}), workers_of({})) == (8, None, None)
    # RANK is that of the pod in a PyTorchJob; that of a worker has LOCAL_RANK beside it.
    refuse_nesting(elastic | {"RANK": "1", "WORLD_SIZE": "2"})
    for worker in (elastic | TORCHRUN, TORCHRUN, MPICH):
        with pytest.raises(LaunchError, match="workers do not start workers"):
            refuse_nesting(worker)


def test_slurm_says_where_a_launcher_belongs():
    place = hosts_of(STEP, None, None, None, None)
    assert place == HostPlace(f"n03:{read(SLURM).port}", 2, 1)
    assert hosts_of(STEP, None, None, "etcd://e:1", None) == HostPlace("etcd://e:1", 2, 1)
    with pytest.raises(LaunchError, match=r"8 tasks on 2 hosts, and `lockstep run` is to be started once on each"):
        hosts_of(STEP | {"SLURM_STEP_NUM_TASKS": "8"}, None, None, None, None)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("2", None, "a:1", None), "give each host its number with --host-rank R"),
        (("2", 0, None, None), "give each host its number with --host-rank R"),
        (("2", 2, "a:1", None), "host ranks go from 0 to the number of hosts minus 1"),
        ((None, 1, None, None), "say how many with --hosts"),
        (("4:2", 0, "a:1", None), "how many hosts there are, as 4, or from 2 to 4 as 2:4"),
        (("2:4", 4, "a:1", None), "host ranks go from 0"),
        (("2", None, None, "a:1"), "--join says all"),
    ],
)
def test_what_does_not_say_where_a_host_belongs(asked, said):
    with pytest.raises(UsageError, match=said):
        hosts_of({}, *asked)


def test_the_secret_of_several_hosts(tmp_path):
    (tmp_path / "secret").write_text("s" * 32 + "\n")
    assert required_secret({}, str(tmp_path / "secret")) == "s" * 32
    assert required_secret({"LOCKSTEP_SECRET": "e" * 32}, None) == "e" * 32
    with pytest.raises(LaunchError, match=r"export LOCKSTEP_SECRET=\$\(openssl rand -hex 16\)"):
        required_secret({}, None)
    with pytest.raises(LaunchError, match="cannot be read"):
        required_secret({}, str(tmp_path / "none"))
    with pytest.raises(LaunchError, match="fewer than 32 can be guessed"):
        required_secret({"LOCKSTEP_SECRET": "short"}, None)
