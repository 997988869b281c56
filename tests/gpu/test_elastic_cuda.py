"""Workers over NCCL that are killed one after the other: the undisturbed bits."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORKERS, KILLS, STEPS = 4, 10, 400
DEADLINE_S = 280
SCRIPT = """\
import hashlib, os, pathlib, sys, time
os.environ.update(NCCL_HOSTID=str(os.getpid()), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")  # They share a GPU.
import torch
from torch import nn
import torch.nn.functional as F
import lockstep
from lockstep.demo.gpt import SHAPES, ByteGPT

folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
world = lockstep.join(timeout=60)
torch.manual_seed(3)
net = nn.Sequential(ByteGPT(SHAPES["tiny"]), nn.Dropout(0.1)).to(world.device)
tokens = torch.randint(0, 256, (160, 33), generator=torch.Generator().manual_seed(1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def loss_fn(model, shard):
    logits = model(shard[0][:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), shard[0][:, 1:].flatten())


trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=8, clip=0.5, scheduler=scheduler, seed=7)
dataset = torch.utils.data.TensorDataset(tokens)
mine = folder / f"{os.getpid()}.step"
for batch in trainer.batches(dataset, batch_size=40, epochs=10_000):
    if trainer.steps == steps:
        break
    mine.write_text(str(trainer.steps))
    trainer.step(batch)
    mine.write_text(f"{trainer.steps} {time.monotonic()}")
    time.sleep(0 if (folder / "hurry").exists() else 0.1)
sha = hashlib.sha256()
for name, tensor in sorted(trainer.state_dict()["tensors"].items()):
    sha.update(name.encode() + tensor.cpu().numpy().tobytes())
if world.is_main:
    (folder / "hash").write_text(sha.hexdigest())
"""


def start(folder, workers, *options):
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "lockstep", "run", "-n", str(workers), *options, str(folder / "train.py")]
    with open(folder / "log", "w") as log:
        return subprocess.Popen([*command, str(folder), str(STEPS)], stdout=log, stderr=log)


def members(folder):
    """Of the workers that live: process id, steps made, and when the last one ended."""
    found = {}
    for path in folder.glob("*.step"):
        numbers = path.read_text().split()
        if Path("/proc", path.stem).exists() and len(numbers) == 2:
            found[int(path.stem)] = (int(numbers[0]), float(numbers[1]))
    return found


def kill_some(run, folder, chance):
    """Kill workers, one when all are there again; how long the others took to make a step each time."""
    took, give_up = [], time.monotonic() + DEADLINE_S
    while len(took) < KILLS and run.poll() is None and time.monotonic() < give_up:
        present = members(folder)
        if len(present) < WORKERS or min(step for step, _ in present.values()) < 3:
            time.sleep(0.02)
            continue
        victim = chance.choice(sorted(present))
        killed = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        latest = 0.0
        while latest < killed and run.poll() is None and time.monotonic() < give_up:
            time.sleep(0.005)
            latest = max((at for pid, (_, at) in members(folder).items() if pid != victim), default=0.0)
        (folder / f"{victim}.step").unlink(missing_ok=True)
        took.append(latest - killed)
    return took


@pytest.mark.timeout(DEADLINE_S + 100)
def test_kills_leave_no_trace_in_the_weights(tmp_path):
    storm = start(tmp_path / "storm", WORKERS, "--elastic", "--max-restarts", "50")
    took = kill_some(storm, tmp_path / "storm", random.Random(0))
    (tmp_path / "storm" / "hurry").touch()
    calm = start(tmp_path / "calm", 1)
    (tmp_path / "calm" / "hurry").touch()
    codes = [run.wait(DEADLINE_S) for run in (storm, calm)]
    print(f"seconds from a kill to the others' next step: {[round(each, 2) for each in took]}")
    log = (tmp_path / "storm" / "log").read_text()
    assert codes == [0, 0], log[-5000:]
    assert len(took) == KILLS, log[-5000:]
    assert (tmp_path / "storm" / "hash").read_text() == (tmp_path / "calm" / "hash").read_text()
