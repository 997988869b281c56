"""TensorBoard, Weights & Biases and MLflow get what is watched, with the real libraries and files."""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.integrations.trackers import TensorBoard
from lockstep.watching.live import Tracked

NAMES = {"training/loss", "training/grad_norm", "training/lr", "speed/samples_per_s", "speed/wall_ms"}


class Notes:
    """A tracker of one's own."""

    def __init__(self, path):
        self.path, self.steps = path, None

    def open(self):
        self.steps = []

    def log(self, step, numbers):
        self.steps.append((step, sorted(numbers)))

    def tell(self, step, verdict):
        self.steps.append((step, verdict))

    def close(self):
        Path(self.path).write_text(json.dumps(self.steps))


def train(world, trackers, steps=6):
    """A training with Trainer that is watched; nothing is logged by hand."""
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def loss_fn(model, shard):
        return model(shard[0]).square().mean()

    trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=4, watch=True)
    watcher = lockstep.watch(trainer.model, trackers=trackers)
    rows = torch.utils.data.TensorDataset(torch.randn(64, 4))
    for number, batch in enumerate(trainer.batches(rows, batch_size=8)):
        if number == steps:
            break
        trainer.step(batch)
    return watcher


def own(world, path):
    train(world, [Notes(path)]).close()


def test_a_tracker_of_ones_own_gets_all_steps(pool, tmp_path):
    path = tmp_path / "notes.json"
    pool.run(2, own, str(path))
    steps = [entry for entry in json.loads(path.read_text()) if isinstance(entry[1], list)]
    assert len(steps) >= 5 and set(steps[-1][1]) >= NAMES - {"training/grad_norm"}
    assert any("training/grad_norm" in names for _, names in steps)


def board(world, folder):
    train(world, [TensorBoard(folder)]).close()


def test_tensorboard(pool, tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    pool.run(2, board, str(tmp_path))
    found = EventAccumulator(str(tmp_path)).Reload()
    assert set(found.Tags()["scalars"]) >= NAMES
    assert all(math.isfinite(each.value) for each in found.Scalars("training/loss"))


SCRIPT = """
import os, sys
sys.path.insert(0, {tests!r})
import lockstep, test_trackers
from lockstep.integrations.trackers import MLflow, WandB

test_trackers.train(lockstep.join(), [{tracker}])  # Both end by themselves at exit.
"""


def run_alone(tmp_path, tracker, **variables):
    """Train in a process of its own: these libraries take long to import, and one starts a service."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent), tracker=tracker))
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables}
    ended = subprocess.run([sys.executable, script], env=environ, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0 and "took no numbers" not in ended.stderr, ended.stderr


@pytest.mark.timeout(240)
def test_mlflow_in_local_files(tmp_path, monkeypatch):
    if importlib.util.find_spec("mlflow") is None:
        pytest.skip("needs mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # It wants a database by default.
    uri = (tmp_path / "runs").as_uri()
    run_alone(tmp_path, f"MLflow('mine', uri={uri!r})")
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert set(run.data.metrics) >= NAMES - {"training/grad_norm"} and run.info.status == "FINISHED"
    assert len(client.get_metric_history(run.info.run_id, "training/loss")) >= 5


@pytest.mark.timeout(240)
def test_wandb_offline(tmp_path):
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("needs wandb")
    run_alone(tmp_path, f"WandB(project='mine', mode='offline', dir={str(tmp_path)!r})")
    (log,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    content = log.read_bytes()
    assert all(name.encode() in content for name in NAMES - {"training/grad_norm"})


class Fails:
    def open(self):
        pass

    def log(self, step, numbers):
        raise OSError("disk full")

    def tell(self, step, verdict):
        raise AssertionError("it has failed before")

    def close(self):
        raise AssertionError("it has failed before")


def test_a_tracker_that_fails_is_let_go_of_and_the_run_goes_on():
    view = Tracked(Fails())
    with pytest.warns(UserWarning, match="Fails took no numbers.*disk full"):
        view.show({"step": 1, "loss": 1.0})
    view.show({"step": 2, "loss": 1.0, "verdict": "worker 1 is slow"})
    view.close()


def test_verdicts_are_told_when_they_change(tmp_path):
    notes = Notes(tmp_path / "notes")
    view = Tracked(notes)
    for step, verdict in enumerate(["", "worker 1 is slow", "worker 1 is slow", ""]):
        view.show({"step": step, "loss": 1.0, "verdict": verdict})
    assert [entry for entry in notes.steps if isinstance(entry[1], str)] == [(1, "worker 1 is slow"), (3, "")]
