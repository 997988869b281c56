"""What `lockstep run` is told about devices, cores, output and lists of hosts: the parts that need no worker."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep import UsageError
from lockstep.cli.main import main
from lockstep.start import ssh
from lockstep.start.host import chosen_devices, gpu_nodes, near_cores, numa_nodes
from lockstep.start.process import _ENTER, _PYTHON

TWO_NODES = {0: frozenset({0, 1}), 1: frozenset({2, 3})}


@pytest.fixture
def machine(tmp_path):
    """The files in which Linux describes a host with two NUMA nodes and a GPU on each, and one that it cannot place."""
    for node, cores in (("0", "0-1,4"), ("1", "2-3"), ("2", "")):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    for place, node in (("0000:81:00.0", 1), ("0000:01:00.0", 0), ("0000:C1:00.0", -1)):
        (tmp_path / f"proc/driver/nvidia/gpus/{place}").mkdir(parents=True)
        folder = tmp_path / f"sys/bus/pci/devices/{place.lower()}"
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
    return tmp_path


def test_nodes_have_the_cores_that_are_allowed(machine):
    assert numa_nodes(machine, frozenset(range(8))) == {0: frozenset({0, 1, 4}), 1: frozenset({2, 3})}
    assert numa_nodes(machine, frozenset({3})) == {1: frozenset({3})}


def test_the_node_of_a_gpu(machine):
    assert gpu_nodes(machine, {}) == [0, 1, -1]
    assert gpu_nodes(machine, {"CUDA_VISIBLE_DEVICES": "2,1"}) == [-1, 1]
    assert gpu_nodes(machine, {"CUDA_VISIBLE_DEVICES": "GPU-5f,7"}) == [-1, -1]
    assert gpu_nodes(Path("/nowhere"), {"CUDA_VISIBLE_DEVICES": "0"}) == []


def test_cores_near_a_worker():
    assert [near_cores(rank, 4, TWO_NODES, []) for rank in range(4)] == [TWO_NODES[0]] * 2 + [TWO_NODES[1]] * 2
    assert near_cores(5, 4, TWO_NODES, []) == TWO_NODES[0]  # One more, in an elastic run.
    assert near_cores(0, 1, TWO_NODES, []) == frozenset(range(4))
    assert [near_cores(rank, 2, TWO_NODES, [1, 0]) for rank in (0, 1)] == [TWO_NODES[1], TWO_NODES[0]]
    assert near_cores(0, 1, TWO_NODES, [-1]) is None  # Its GPU is somewhere else.
    assert near_cores(0, 2, {0: frozenset({0, 1})}, []) is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs Linux")
def test_a_worker_takes_its_cores_before_it_begins():
    core = min(os.sched_getaffinity(0))
    read_fd, write_fd = os.pipe()
    show = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    command = [sys.executable, *_PYTHON, _ENTER, str(write_fd), *show]
    for cores, expected in ((str(core), {core}), ("100000", os.sched_getaffinity(0))):
        environ = {**os.environ, "LOCKSTEP_CORES": cores}
        said = subprocess.run(command, env=environ, pass_fds=[write_fd], capture_output=True, text=True, check=True)
        assert said.stdout.strip() == str(expected)
    os.close(read_fd)
    os.close(write_fd)


def test_devices_count_among_those_that_are_visible():
    assert chosen_devices("0,2", {}) == "0,2"
    assert chosen_devices("0, 2", {"CUDA_VISIBLE_DEVICES": "4,5,6"}) == "4,6"
    assert chosen_devices("GPU-1", {"CUDA_VISIBLE_DEVICES": "4,5"}) == "GPU-1"
    for asked, said in (("0,3", "leaves 3, counted from 0"), ("0,,1", "each once"), ("1,1", "each once")):
        with pytest.raises(UsageError, match=said):
            chosen_devices(asked, {"CUDA_VISIBLE_DEVICES": "4,5,6"})


def test_lists_of_hosts(tmp_path):
    named = [ssh.RemoteHost("a"), ssh.RemoteHost("me@b.c", 4)]
    assert ssh.parse_hosts("a,me@b.c:4") == named
    (tmp_path / "hosts").write_text("# ours\na\n\nme@b.c slots=4  # eight are broken\n")
    assert ssh.read_hostfile(str(tmp_path / "hosts")) == named
    for text, said in (("", "is empty"), ("a b", "no host"), ("-oProxyCommand=x", "no host"), ("a,a", "twice")):
        with pytest.raises(UsageError, match=said):
            ssh.parse_hosts(text)
    with pytest.raises(UsageError, match="cannot be read"):
        ssh.read_hostfile(str(tmp_path / "none"))


def test_a_dry_run_shows_what_would_be_started_and_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('started')")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = [
        "run",
        "-n",
        "2",
        "--devices",
        "0,2",
        "--env",
        "A=b c",
        "--threads",
        "3",
        "--dry-run",
        "train.py",
        "--lr",
        "1",
    ]
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and said[1].endswith("train.py --lr 1")
    for part in ("RANK=1", "WORLD_SIZE=2", "LOCAL_RANK=1", "OMP_NUM_THREADS=3", "CUDA_VISIBLE_DEVICES=0,2", "'A=b c'"):
        assert part in said[1]
    assert main(["run", "--hosts", "2", "--host-rank", "1", "--meet", "a:9", "-n", "1", "--dry-run", "train.py"]) == 0
    said = capsys.readouterr().out
    assert "this host is host 1 of 2, which meet at a:9" in said and not re.search(r"\bRANK=", said)


def test_a_dry_run_over_ssh_shows_no_secret(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_SECRET", "5" * 32)
    words = [
        "run",
        "--hosts",
        "a,b:4",
        "--meet",
        "a:9",
        "--ssh",
        "ssh -p 2222",
        "-n",
        "2",
        "--dry-run",
        "train.py",
        "-n",
        "1",
    ]
    assert main(words) == 0
    said = capsys.readouterr()
    first, second = said.out.splitlines()
    assert first.startswith("ssh -p 2222 -o BatchMode=yes ") and f"cd {tmp_path} &&" in first
    assert "--hosts=2 --host-rank=1 --meet=a:9 --secret-file=- --workers=4 train.py -n 1" in second
    assert "5555" not in said.out + said.err
    assert main(["run", "--hosts", "a,b", "--host-rank", "1", "train.py"]) == 2
    assert "leave out --host-rank" in capsys.readouterr().err
