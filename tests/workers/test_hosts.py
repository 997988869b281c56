"""`lockstep run` on several hosts, which are network namespaces: the same bits as on one, whatever dies.

What takes more than a few seconds of workers that import torch needs FULL=1.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import netns
import pytest

pytestmark = [pytest.mark.timeout(240), pytest.mark.skipif(bool(netns.missing()), reason=netns.missing() or "-")]
full = pytest.mark.skipif("FULL" not in os.environ, reason="needs FULL=1: real workers on several hosts")
needs_etcd = pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd (Debian: etcd-server)")

DEADLINE_S = 150
TRAIN = """
import hashlib, os, time, torch, lockstep
from torch import nn
world = lockstep.join(timeout=60)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
made = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(torch.randn(400, 16, generator=made), torch.randint(0, 4, (400,), generator=made))
loss = lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
trainer = lockstep.Trainer(net, optimizer, loss, shards=4, clip=1.0, seed=3)
for batch in trainer.batches(data, batch_size=40, epochs=int(os.environ["EPOCHS"])):
    out = trainer.step(batch)
    time.sleep(float(os.environ.get("PAUSE", "0")))
    print("step", out.step, "of", world.size, flush=True)
digest = hashlib.sha256()
state = trainer.state_dict()
for name in sorted(state["tensors"]):
    digest.update(state["tensors"][name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
place = os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
print("HASH", digest.hexdigest(), "rank", world.rank, "of", world.size, "local", *place, flush=True)
"""


class Run:
    """The launchers of one run, each on a host of its own."""

    def __init__(self, folder: Path, hosts: list[netns.Host], script: str, **environ: str) -> None:
        self.folder, self.hosts = folder, hosts
        (folder / "train.py").write_text(script)
        self.environ = {"LOCKSTEP_SECRET": secrets.token_hex(16), "EPOCHS": "3", **environ}
        self.launchers: list[subprocess.Popen[bytes]] = []

    def start(self, *options: str, workers: int = 2, where: tuple[str, ...] = (), hosts: int = 2) -> "Run":
        for rank in range(hosts):
            self.launch(
                rank,
                *(where or self.meet),
                "--hosts",
                str(hosts),
                "--host-rank",
                str(rank),
                "-n",
                str(workers),
                *options,
            )
        return self

    @property
    def meet(self) -> tuple[str, str]:
        return "--meet", f"{self.hosts[0].address}:29400"

    def launch(self, rank: int, *options: str, **environ: str) -> subprocess.Popen[bytes]:
        command = [*netns.LOCKSTEP, "run", *options, "train.py"]
        launcher = self.hosts[rank].start(command, self.folder, f"host{rank}", **{**self.environ, **environ})
        self.launchers.append(launcher)
        return launcher

    def said(self, rank: int) -> str:
        return (self.folder / f"host{rank}").read_text()

    def wait_for(self, rank: int, text: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while text not in self.said(rank):
            assert time.monotonic() < until, f"no {text!r} on host {rank}:\n{self.said(rank)}"
            time.sleep(0.05)

    def codes(self) -> list[int]:
        return [launcher.wait(DEADLINE_S) for launcher in self.launchers]

    def hashes(self, rank: int) -> set[str]:
        found = set(re.findall(r"HASH (\w+)", self.said(rank)))
        assert found, self.said(rank)
        return found


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with contextlib.ExitStack() as stack:

        def make(script: str = TRAIN, hosts: int = 2, **environ: str) -> Run:
            return Run(tmp_path, stack.enter_context(netns.hosts(hosts)), script, **environ)

        yield make


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The hash of the same training on one worker."""
    known: dict[str, str] = {}

    def train(epochs: str) -> str:
        if epochs not in known:
            environ = {**os.environ, "EPOCHS": epochs, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            command = [sys.executable, "-c", TRAIN]
            said = subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=100).stdout
            known[epochs] = re.findall(r"HASH (\w+)", said)[0]
        return known[epochs]

    return train


def test_two_hosts_train_as_one(run, undisturbed):
    job = run().start()
    assert job.codes() == [0, 0], job.said(0) + job.said(1)
    assert job.hashes(0) == job.hashes(1) == {undisturbed("3")}
    for host in (0, 1):
        places = re.findall(r"^\[(\d)\] HASH .* rank (\d) of 4 local (\d) 2$", job.said(host), re.MULTILINE)
        assert sorted(places) == [(str(2 * host + local), str(2 * host + local), str(local)) for local in (0, 1)]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=full)])
def test_a_death_on_another_host_costs_no_step(run, undisturbed, workers):
    last = 2 * workers - 1
    job = run(LOCKSTEP_FAULT=f"worker {last}: die at vote of step 7").start("--elastic", "--watch", workers=workers)
    assert job.codes() == [0, 0], job.said(0) + job.said(1)
    lost = [json.loads(line)["lost"] for line in (job.folder / "run/generations.jsonl").read_text().splitlines()]
    assert lost[0] == [] and [last] in lost
    assert job.hashes(0) == {undisturbed("3")}
    assert workers == 1 or job.hashes(1) == job.hashes(0)  # A replacement may come too late to have any.
    assert "on host 1) has ended: killed by SIGKILL" in job.said(0)


FAILS = """
import os, sys, time
if os.environ["RANK"] == "3":
    time.sleep(0.5)
    sys.exit("worker 3 has had enough")
time.sleep(100)
"""


def test_a_failure_on_one_host_ends_all_and_is_named_on_each(run):
    job = run(FAILS).start("--notice", "0.2")
    assert job.codes() == [1, 1]
    for host in (0, 1):
        assert "lockstep run: worker 3 on host 1 failed first (exit code 1)" in job.said(host)
        assert job.said(host).rstrip().endswith("worker 3 has had enough")


def test_a_launcher_that_is_ended_ends_all(run):
    job = run("import time; print('here', flush=True); time.sleep(100)").start("--notice", "0.2")
    for host in (0, 1):
        job.wait_for(host, "here")
    os.kill(job.launchers[1].pid, signal.SIGTERM)
    assert job.codes() == [1, 143]
    assert "lockstep run: host 1 was ended by SIGTERM." in job.said(0)


def test_who_has_another_secret_or_none_stays_outside(run):
    job = run("print('never')")
    first = job.launch(0, *job.meet, "--hosts", "2", "--host-rank", "0", "--meet-timeout", "3")
    second = job.launch(
        1, *job.meet, "--hosts", "2", "--host-rank", "1", "--meet-timeout", "1", LOCKSTEP_SECRET="x" * 32
    )
    assert (first.wait(60), second.wait(60)) != (0, 0)
    assert "does not know the secret of this run" in job.said(1)
    assert "host 0 waited 0:00:03 for 2 hosts" in job.said(0)
    assert "missing: 1." in job.said(0)
    third = job.launch(1, *job.meet, "--hosts", "2", "--host-rank", "1", LOCKSTEP_SECRET="")
    assert third.wait(60) != 0
    assert "export LOCKSTEP_SECRET=$(openssl rand -hex 16)" in job.said(1)


def test_what_the_hosts_were_asked_for_differs(run):
    job = run("print('never')")
    job.launch(0, *job.meet, "--hosts", "2", "--host-rank", "0", "--meet-timeout", "5")
    job.launch(1, *job.meet, "--hosts", "2", "--host-rank", "1", "--elastic", "--meet-timeout", "5")
    assert 0 not in job.codes()
    assert "give all hosts the same" in job.said(0) + job.said(1)


@full
def test_a_plain_torch_script_meets(run):
    script = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * dist.get_rank()
dist.all_reduce(x)
print("sum", x.item())
"""
    job = run(script).start()
    assert job.codes() == [0, 0], job.said(0) + job.said(1)
    assert job.said(0).count("sum 6.0") == job.said(1).count("sum 6.0") == 2


@full
@pytest.mark.parametrize("what", ["kill", "cut", "freeze"])
def test_a_host_is_gone(run, undisturbed, what):
    job = run(EPOCHS="20", PAUSE="0.1").start("--elastic")
    job.wait_for(0, "step 8 ")
    launcher = job.launchers[1]
    {"kill": job.hosts[1].kill, "cut": job.hosts[1].cut, "freeze": lambda: launcher.send_signal(signal.SIGSTOP)}[what]()
    job.wait_for(0, "without 2, 3")
    launcher.send_signal(signal.SIGCONT)
    assert job.codes() == [0, -9 if what == "kill" else 1]
    assert job.hashes(0) == {undisturbed("20")}
    if what != "kill":
        assert "so its workers were ended" in job.said(1)
        assert "HASH" not in job.said(1)


@full
def test_the_others_end_themselves_when_the_first_host_is_gone(run):
    job = run(EPOCHS="1000", PAUSE="0.1").start("--elastic", workers=1)
    job.wait_for(1, "step 8 ")
    job.hosts[0].kill()
    assert job.codes() == [-9, 1]
    assert f"host 1 could not reach {job.hosts[0].address}:29400 for 6 s" in job.said(1)


@full
def test_a_plain_run_ends_when_a_host_is_gone(run):
    job = run(EPOCHS="1000", PAUSE="0.1").start(workers=1)
    job.wait_for(1, "step 8 ")
    job.hosts[1].kill()
    assert job.codes() == [1, -9]
    assert "was not heard of for 10 s" in job.said(0)


@full
def test_an_error_of_the_script_is_shown_on_all_hosts(run):
    script = TRAIN.replace("loss = lambda", "unused = lambda")
    script = script.replace("trainer = ", "def loss(model, batch):\n    raise ValueError('bad sample')\n\ntrainer = ")
    job = run(script).start("--elastic", workers=1)
    assert job.codes() == [1, 1], job.said(0)
    last = [job.said(host).partition("lockstep run: ")[2] for host in (0, 1)]
    assert last[0] == last[1]
    assert "the same step has failed on two workers" in last[0]
    assert last[0].rstrip().endswith("ValueError: bad sample")


@full
def test_a_host_joins_a_run_under_way(run, undisturbed):
    job = run(hosts=3, EPOCHS="20", PAUSE="0.1").start("--elastic", workers=1)
    job.wait_for(0, "step 8 ")
    job.launch(2, "--join", job.meet[1], "--elastic", "-n", "2")
    assert job.codes() == [0, 0, 0], job.said(2)
    assert "4 workers, with newcomer" in job.said(0)  # Both at one boundary, or one after the other.
    assert job.hashes(0) == job.hashes(1) == job.hashes(2) == {undisturbed("20")}


@full
def test_a_host_that_was_killed_comes_back(run, undisturbed):
    job = run(EPOCHS="30", PAUSE="0.1").start("--elastic", workers=1)
    job.wait_for(0, "step 8 ")
    job.hosts[1].kill()
    job.hosts[1].mend()
    job.launch(1, *job.meet, "--hosts", "2", "--host-rank", "1", "-n", "1", "--elastic")
    assert job.codes() == [0, -9, 0], job.said(0) + job.said(1)
    assert "2 workers, with newcomer 2" in job.said(0)
    assert job.hashes(0) == job.hashes(1) == {undisturbed("30")}


@full
def test_a_host_that_is_told_to_go_hands_over(run, undisturbed):
    job = run(EPOCHS="10", PAUSE="0.1").start("--elastic", workers=1)
    job.wait_for(1, "step 8 ")
    os.kill(job.launchers[1].pid, signal.SIGTERM)
    assert job.codes() == [0, 143]
    assert job.hashes(0) == {undisturbed("10")}


@full
@needs_etcd
@pytest.mark.parametrize("what", ["nothing", "first host", "leader", "both"])
def test_etcd_and_any_host_may_die(run, undisturbed, what):
    job = run(hosts=5, EPOCHS="20", PAUSE="0.1")
    cluster = netns.Etcd(job.hosts[2:], job.folder)
    job.start("--elastic", where=("--store", cluster.where))
    job.wait_for(1, "step 8 ")
    if what in ("leader", "both"):
        cluster.kill_leader()
    if what in ("first host", "both"):
        job.hosts[0].kill()
        job.wait_for(1, "without 0, 1")
    assert job.codes() == [-9 if what in ("first host", "both") else 0, 0], job.said(1)
    assert job.hashes(1) == {undisturbed("20")}
    assert not cluster.keys()


@full
@needs_etcd
def test_a_plain_run_in_etcd_and_what_an_earlier_one_has_left(run, undisturbed):
    job = run(hosts=5)
    cluster = netns.Etcd(job.hosts[2:], job.folder)
    job.start(where=("--store", cluster.where))
    job.wait_for(0, "step 3 ")
    for host in job.hosts[:2]:
        host.kill()
        host.mend()
    job.launchers.clear()
    job.start(where=("--store", cluster.where))
    assert job.codes() == [0, 0], job.said(0)
    assert job.hashes(0) == job.hashes(1) == {undisturbed("3")}
