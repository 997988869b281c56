"""Elastic runs for tests: a launcher in a fork of the server that has torch imported, and workers that are its forks.

Starting a worker takes milliseconds so, and a replacement comes while a training of a few dozen steps goes on.
"""

import ctypes
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from models import CNN, GPT, MLP
from processes import FromServer, is_alive
from torch import nn

import lockstep
from lockstep.start.elastic import ElasticWorkers

SHARDS = 8
STEPS = 16
_SUBREAPER = 36


class Dropped(nn.Module):
    """A model with dropout after each of its activations, and batch norm where it has none."""

    def __init__(self, kind):
        super().__init__()
        self.net = kind()
        for module in list(self.net.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.GELU | nn.ReLU):
                    setattr(module, name, nn.Sequential(child, nn.Dropout(0.2)))

    def forward(self, x):
        return self.net(x)


KINDS = {"mlp": MLP, "cnn": CNN, "gpt": GPT}


def samples(kind, count=150):
    return torch.utils.data.TensorDataset(*KINDS[kind].batch(count, torch.Generator().manual_seed(1), torch.float))


def loss_fn(model, shard):
    x, y = shard
    return F.cross_entropy(model(x), y)


def make(kind="mlp", zero=0, steps=STEPS, **options):
    torch.manual_seed(3)
    net = Dropped(KINDS[kind])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return lockstep.Trainer(
        net, optimizer, loss_fn, shards=SHARDS, clip=0.5, zero=zero, scheduler=scheduler, seed=7, bucket_cap_mb=0.01,
        **options,
    )  # fmt: skip


def digest(trainer):
    sha = hashlib.sha256()
    for name, tensor in sorted(trainer.state_dict()["tensors"].items()):
        sha.update(name.encode() + tensor.numpy().tobytes())
    return sha.hexdigest()


def show_step(folder, step):
    """Leave a note that this worker has come to a step: a file of its own, so that nothing is torn."""
    if folder is not None:
        Path(folder, f"{os.getpid()}.step").write_text(f"{step}")


def train(folder, backend=None, timeout=60, kind="mlp", zero=0, steps=STEPS, pause_s=0.0):
    """What every worker does: the hash at the end, and the steps."""
    lockstep.join(timeout=timeout, backend=backend)
    trainer = make(kind, zero, steps)
    for batch in trainer.batches(samples(kind), batch_size=40, epochs=100):
        if trainer.steps == steps:
            break
        show_step(folder, trainer.steps)
        trainer.step(batch)
        time.sleep(pause_s)
    return digest(trainer), trainer.steps


def train_on(folder, backend=None, kind="gpt", zero=0, steps=STEPS, pause_s=0.0):
    """As `train`, from a checkpoint if there is one: all may die at once."""
    lockstep.join(timeout=8, backend=backend)
    trainer = make(kind, zero, steps)
    path = Path(folder, "checkpoint")
    trainer.load(path, missing="ok")
    for batch in trainer.batches(samples(kind), batch_size=40, epochs=1000):
        if trainer.steps == steps:
            break
        show_step(folder, trainer.steps)
        trainer.step(batch)
        time.sleep(0 if Path(folder, "hurry").exists() else pause_s)
        if trainer.steps % 20 == 0:
            trainer.save(path, keep_last=2)
    return digest(trainer), trainer.steps


def heeding(folder):
    """Have the launcher of this process resize its run whenever the file `wanted` says so, as its signals would."""
    wait, path = ElasticWorkers.wait, Path(folder, "wanted")

    def wait_and_heed(workers, *args):
        wait(workers, *args)
        if path.exists():
            wanted = int(path.read_text())
            path.unlink()
            workers.resize(wanted)

    ElasticWorkers.wait = wait_and_heed


def in_launcher(folder, function, workers, options, elastic, faults, limit_s):
    """The launcher's process: results of the last members, what was left behind, and how long it took."""
    os.environ["LOCKSTEP_FAULT"] = faults
    os.environ["TMPDIR"] = tempfile.tempdir = str(Path(folder, "tmp"))
    os.mkdir(tempfile.tempdir)
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)  # What workers leave behind becomes this process's child.
    heeding(folder)
    limits = lockstep.Elastic(**elastic)
    files = set(os.listdir("/proc/self/fd"))
    begun = time.monotonic()
    said = {}
    try:
        # A lambda cannot be found by its name, so the workers are forks.
        said["results"] = lockstep.launch(lambda: function(folder, **options), workers, elastic=limits, timeout=limit_s)
    except Exception as error:
        said["error"] = f"{type(error).__name__}: {error}"
    said["took_s"] = time.monotonic() - begun
    said["files"] = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in set(os.listdir("/proc/self/fd")) - files
        if os.path.exists(f"/proc/self/fd/{fd}")
    ]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    said["processes"] = [pid for pid in children if is_alive(int(pid))]
    said["temporary"] = os.listdir(tempfile.tempdir)
    print("SAID " + json.dumps(said), flush=True)
    return 0


class ElasticRun:
    """One run, under way."""

    def __init__(self, folder, function=train, workers=3, elastic=None, faults="", limit_s=100, **options):
        self.folder = folder
        self._limit_s = limit_s
        self._server = FromServer(
            folder, in_launcher, str(folder), function, workers, options, elastic or {}, faults, limit_s
        )
        self.pid = self._server.pid

    def finish(self):
        """What the launcher said, its stderr among it; nothing is left behind."""
        ended = self._server.wait(self._limit_s + 30)
        lines = [line for line in ended.out.splitlines() if line.startswith("SAID ")]
        assert ended.code == 0 and lines, f"exit code {ended.code}\n{ended.out}\n{ended.err}"
        said = json.loads(lines[0].removeprefix("SAID "))
        said["err"], said["out"] = ended.err, ended.out
        assert (said["files"], said["processes"], said["temporary"]) == ([], [], []), said
        return said


def run(folder, *args, **options):
    return ElasticRun(folder, *args, **options).finish()


def hashes(said, steps=STEPS):
    """Those of the workers that were there at the end, who all had come to the last step."""
    assert "results" in said, said["error"] + "\n" + said["err"]
    assert {result[1] for result in said["results"]} == {steps}, said
    return {result[0] for result in said["results"]}
