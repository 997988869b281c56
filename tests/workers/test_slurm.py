"""Under a real Slurm, which the test starts and ends: slurmctld and two slurmd on this machine."""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import netns
import pytest
from processes import wait_until
from test_hosts import TRAIN, undisturbed  # noqa: F401 (a fixture)

PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
DOCS = Path(__file__).parents[2] / "docs"
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(shutil.which("slurmctld", path=PATH) is None, reason="needs Slurm (Debian: slurm-wlm)"),
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="slurmd needs root"),
]
full = pytest.mark.skipif("FULL" not in os.environ, reason="needs FULL=1: real workers, and a job that is requeued")

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=6
CredType=cred/none
SlurmctldPort={ports[0]}
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/linear
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
ReturnToService=2
JobRequeue=1
KillWait=5
KillOnBadExit=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs={cores}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs={cores}
PartitionName=low Nodes=n[1-2] Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=n[1-2] PriorityTier=2 PreemptMode=OFF
"""


class Cluster:
    """A controller and two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
            ports = [probe.getsockname()[1] for probe in probes]
        for name in ("state", "spool.n1", "spool.n2"):
            (folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        conf = CONF.format(host=host, ports=ports, folder=folder, cores=os.cpu_count())
        (folder / "slurm.conf").write_text(conf)
        self.environ = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        # Where the nodes' names lead nowhere, since they are not hosts.
        self.environ |= {"MASTER_ADDR": "127.0.0.1", "LOCKSTEP_SECRET": "5" * 32, "EPOCHS": "3"}
        self.processes = [self._start("slurmctld", "-D", "-c")]
        self.processes += [self._start("slurmd", "-D", "-N", node) for node in ("n1", "n2")]

    def _start(self, *command: str) -> "subprocess.Popen[bytes]":
        with (self.folder / "daemons.log").open("ab") as log:
            return subprocess.Popen(command, env=self.environ, cwd=self.folder, stdout=log, stderr=log)

    @property
    def is_up(self) -> bool:
        return self.said("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "2"

    def missing(self) -> str:
        """Why it does not run here; empty if it does."""
        try:
            wait_until(lambda: self.is_up or any(each.poll() is not None for each in self.processes), "Slurm to be up")
        except AssertionError as error:
            return str(error)
        if any(each.poll() is not None for each in self.processes):
            return f"Slurm's daemons do not run here: {(self.folder / 'daemons.log').read_text()[-300:]}"
        return ""

    def said(self, *command: str, **environ: str) -> str:
        found = subprocess.run(
            command, env={**self.environ, **environ}, cwd=self.folder, capture_output=True, text=True, timeout=200
        )
        return found.stdout + found.stderr

    def close(self) -> None:
        try:
            if all(process.poll() is None for process in self.processes):
                self.said("scancel", "-u", "root")
                wait_until(lambda: not self.said("squeue", "-h").strip(), "jobs to end")
        finally:
            for process in reversed(self.processes):
                process.terminate()
            for process in self.processes:
                process.wait(20)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    if missing := cluster.missing():
        cluster.close()
        pytest.skip(missing)
    yield cluster
    cluster.close()


def test_a_launcher_on_each_node_needs_no_flags(slurm):
    script = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')))"
    (slurm.folder / "shows.py").write_text(script)
    said = slurm.said("srun", "-N2", "-n2", *netns.LOCKSTEP, "run", "-n", "2", "shows.py")
    shown = sorted(line for line in said.splitlines() if line.startswith("["))
    assert shown == [f"[{rank}] {rank} 4 {rank % 2} 2" for rank in range(4)], said
    said = slurm.said("srun", "-N2", "-n4", *netns.LOCKSTEP, "run", "-n", "2", "shows.py")
    assert "srun has started 4 tasks on 2 hosts" in said


@full
@pytest.mark.parametrize("how", ["launchers", "workers"])
def test_a_job_over_two_nodes_trains_as_one(slurm, undisturbed, how):  # noqa: F811
    (slurm.folder / "train.py").write_text(TRAIN)
    if how == "launchers":
        said = slurm.said("srun", "-N2", "-n2", *netns.LOCKSTEP, "run", "-n", "1", "--elastic", "train.py")
    else:
        place = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # The script prints them.
        said = slurm.said("srun", "-N2", "-n2", sys.executable, "-u", "train.py", **place)
    assert set(re.findall(r"HASH (\w+)", said)) == {undisturbed("3")}, said


LOADS = """
trainer.load("checkpoints/", missing="ok")
print("begins after", trainer.steps, flush=True)
for batch in trainer.batches"""


@full
def test_a_preempted_job_is_requeued_and_ends_with_the_same_bits(slurm, undisturbed):  # noqa: F811
    script = TRAIN.replace("\nfor batch in trainer.batches", LOADS)
    script = script.replace("    time.sleep", "    if out.step % 10 == 0: trainer.save('checkpoints/')\n    time.sleep")
    (slurm.folder / "train.py").write_text(script)
    batch = re.findall(r"```\n(#!/bin/bash\n.*?)```", (DOCS / "elastic.md").read_text().partition("## Slurm")[2], re.S)
    job = batch[0].replace("lockstep run -n 8", " ".join([*netns.LOCKSTEP, "run", "-n", "2"]))
    assert job != batch[0]
    (slurm.folder / "job.sh").write_text(job)
    output = slurm.folder / "job.out"
    said = slurm.said("sbatch", "-p", "low", "-N1", f"--output={output}", "job.sh", EPOCHS="20", PAUSE="0.05")
    number = re.findall(r"Submitted batch job (\d+)", said)[0]

    def has(text: str) -> bool:
        return output.exists() and text in output.read_text()

    wait_until(lambda: has("step 30 "), "the job to train", lambda: output.read_text() if output.exists() else said)
    slurm.said("srun", "-p", "high", "-N2", "-n2", "true")
    until = time.monotonic() + 150
    while "JobState=COMPLETED" not in (state := slurm.said("scontrol", "show", "job", number)):
        assert time.monotonic() < until, output.read_text() + state
        time.sleep(0.2)
    assert re.search(r"begins after [1-9]\d*", output.read_text()), output.read_text()
    assert "Restarts=1" in slurm.said("scontrol", "show", "job", number)
    assert "ended by SIGTERM; no worker is left" in output.read_text()
    assert set(re.findall(r"HASH (\w+)", output.read_text())) == {undisturbed("20")}
