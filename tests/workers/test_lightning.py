"""Lightning and Fabric on Lockstep, with the real library: equal to the same training on one worker."""

import itertools
import logging
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from amount import some
from models import difference, weights_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from vision import mend_torchvision

import lockstep

mend_torchvision()  # Which these libraries import where it is installed.
pytest.importorskip("lightning", reason="needs the package lightning", exc_type=(ImportError, RuntimeError))

DOUBLE = 1e-10


def data(samples, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 8, generator=generator, dtype=torch.double)
    return TensorDataset(x, torch.randint(0, 3, (samples,), generator=generator))


def quiet():
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def module_class():
    """A LightningModule; made here, since only the workers import Lightning."""
    import lightning
    import torchmetrics

    class Module(lightning.LightningModule):
        def __init__(self, batch_norm=True):
            super().__init__()
            self.net = nn.Sequential(
                nn.Linear(8, 16), nn.BatchNorm1d(16) if batch_norm else nn.Tanh(), nn.Linear(16, 3)
            )
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
            self.double()

        def training_step(self, batch, number):
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train", loss, sync_dist=True, on_step=True, on_epoch=True)
            return loss

        def validation_step(self, batch, number):
            x, y = batch
            out = self.net(x)
            self.accuracy(out, y)
            self.log("val", F.cross_entropy(out, y), sync_dist=True)
            self.log("accuracy", self.accuracy)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    return Module


def trainer_of(strategy, folder, **options):
    import lightning

    import lockstep.integrations.lightning  # noqa: F401  # Makes the name known.

    quiet()
    return lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **{"enable_checkpointing": False, "max_epochs": 2, **options},
    )


def strategy_of(zero, **options):
    from lockstep.integrations.lightning import LockstepStrategy

    return LockstepStrategy(zero=zero, **options)


def fit(world, folder, zero=None, batch_norm=True, **options):
    """Weights and metrics of a fit on batches that do not divide; zero=None is plain Lightning on one device."""
    torch.manual_seed(0)
    module = module_class()(batch_norm)
    strategy = "auto" if zero is None else "lockstep" if zero == 0 else strategy_of(zero)
    trainer = trainer_of(strategy, folder, sync_batchnorm=zero is not None and batch_norm, **options)
    trainer.fit(module, DataLoader(data(45), 8), DataLoader(data(9), 4))
    metrics = {name: np.array(value.item()) for name, value in trainer.callback_metrics.items()}
    return weights_of(module), metrics


@pytest.mark.parametrize("zero", some([0, 3], [0, 1, 2, 3]))
def test_a_fit_equals_one_worker(pool, tmp_path, zero):
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    weights, metrics = pool.run(1, fit_with, str(tmp_path), None, options)[0]
    for workers in some([2], [1, 2, 3]):
        for result, seen in pool.run(workers, fit_with, str(tmp_path), zero, options):
            assert difference(result, weights) < DOUBLE
            assert seen.keys() == metrics.keys()
            # Lightning adds up what is logged in single precision.
            assert difference(seen, metrics) < 1e-5


def fit_with(world, folder, zero, options):
    return fit(world, folder, zero, **options)


def shuffled(world, folder, zero):
    """A fit on a shuffled loader with AdamW."""
    torch.manual_seed(0)
    module = module_class()(batch_norm=False)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.01)
    trainer_of(strategy_of(zero, seed=5), folder).fit(module, DataLoader(data(45), 8, shuffle=True))
    return weights_of(module)


def test_shuffling_does_not_depend_on_the_number_of_workers(pool, tmp_path):
    expected = pool.run(1, shuffled, str(tmp_path), 0)[0]
    assert all(difference(each, expected) < DOUBLE for each in pool.run(some([2], [3])[0], shuffled, str(tmp_path), 2))


def interrupted(world, folder, zero, sharded, resume, stop, every=None):
    """A fit of so many steps or epochs that begins anew or goes on; the loader shuffles. It saves by a callback.

    That does it after `every` steps, or at the end of each epoch, when it has validated.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    torch.manual_seed(0 if not resume else 7)
    module = module_class()(batch_norm=False)
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), lr=0.01)
    strategy = strategy_of(zero, seed=5, sharded_checkpoints=sharded)
    saves = ModelCheckpoint(folder, "saved", enable_version_counter=False, every_n_train_steps=every)
    stop = {"max_epochs": -1, **stop}
    trainer = trainer_of(strategy, folder, enable_checkpointing=True, callbacks=[saves], **stop)
    loaders = DataLoader(data(45), 8, shuffle=True), DataLoader(data(9), 4)
    path = f"{folder}/saved.ckpt" if resume else None
    trainer.fit(module, *loaders, ckpt_path=path, weights_only=False)
    return weights_of(module)


STOPS = {
    "steps": [({"max_steps": 4}, 4), ({"max_steps": 9}, 9), ({"max_steps": 14}, None)],
    "epochs": [({"max_epochs": 1}, 4), ({"max_epochs": 2}, None), ({"max_epochs": 3}, None)],
}
"""Of three fits, and after how many steps they save; an epoch has 6."""


@pytest.mark.parametrize(
    "sharded, unit", some([(False, "epochs"), (True, "steps")], itertools.product([False, True], STOPS))
)
def test_a_checkpoint_is_gone_on_with_on_another_number_of_workers(pool, tmp_path, sharded, unit):
    """Saved by 2 workers with zero=3 in mid-epoch, gone on with by 3 with zero=1, and then by 1 with none."""
    first, second, last = STOPS[unit]
    whole = pool.run(1, interrupted, str(tmp_path / "whole"), 0, False, False, *last)[0]
    folder = str(tmp_path / "cut")
    pool.run(2, interrupted, folder, 3, sharded, False, *first)
    pool.run(3, interrupted, folder, 1, sharded, True, *second)
    assert difference(pool.run(1, interrupted, folder, 0, sharded, True, *last)[0], whole) < DOUBLE


def manual(world, folder, zero):
    """Two optimizers by hand, as in a GAN, with accumulation."""
    import lightning

    class Adversaries(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.made, self.judge = nn.Linear(8, 8), nn.Linear(8, 1)
            self.double()

        def training_step(self, batch, number):
            first, second = self.optimizers()
            judged = self.judge(self.made(batch[0]).detach()).square().mean() + self.judge(batch[0]).mean()
            second.zero_grad()
            self.manual_backward(judged)
            second.step()
            self.manual_backward(self.judge(self.made(batch[0])).mean())
            if number % 2:
                first.step()
                first.zero_grad()

        def configure_optimizers(self):
            return [torch.optim.SGD(each.parameters(), lr=0.05) for each in (self.made, self.judge)]

    torch.manual_seed(0)
    module = Adversaries()
    trainer_of(strategy_of(zero) if zero is not None else "auto", folder).fit(module, DataLoader(data(44), 8))
    return weights_of(module)


def test_manual_optimization(pool, tmp_path):
    expected = pool.run(1, manual, str(tmp_path), None)[0]
    assert all(difference(each, expected) < DOUBLE for each in pool.run(2, manual, str(tmp_path), 0))


@pytest.mark.parametrize("precision", some(["bf16-mixed"], ["bf16-mixed", "16-mixed", "bf16-true"]))
def test_precision_plugins(pool, tmp_path, precision):
    options = {"precision": precision, "batch_norm": False}
    expected, _ = pool.run(1, fit_single, str(tmp_path), None, options)[0]
    results = pool.run(2, fit_single, str(tmp_path), 0, options)
    assert all(difference(each, expected) < 0.05 for each, _ in results)
    assert difference(results[0][0], results[1][0]) == 0


def fit_single(world, folder, zero, options):
    torch.set_default_dtype(torch.float32)
    return fit(world, folder, zero, **options)


def with_fabric(world, folder, zero):
    """Fabric's loop, with accumulation, clipping, and a checkpoint in the middle."""
    import lightning

    from lockstep.integrations.lightning import LockstepFabricStrategy

    quiet()
    torch.manual_seed(0)
    strategy = LockstepFabricStrategy(zero=zero) if zero is not None else "auto"
    fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=1)
    fabric.launch()
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    loader = fabric.setup_dataloaders(DataLoader(data(45), 8))
    losses = []
    for epoch in range(3):
        for number, (x, y) in enumerate(loader):
            is_last = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not is_last):
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss / 2)
            if is_last:
                fabric.clip_gradients(model, optimizer, max_norm=0.05)
                optimizer.step()
                optimizer.zero_grad()
        optimizer.zero_grad()
        state = {"model": model, "optimizer": optimizer, "epoch": epoch}
        if epoch == 0:
            fabric.save(f"{folder}/fabric.ckpt", state)
        if epoch == 1:  # Back to where it was after the first one.
            fabric.load(f"{folder}/fabric.ckpt", state)
            assert state["epoch"] == 0
        losses.append(fabric.all_reduce(loss.detach()).item())
    return weights_of(net)


@pytest.mark.parametrize("zero", some([2], [0, 1, 2, 3]))
def test_fabric_equals_one_worker(pool, tmp_path, zero):
    expected = pool.run(1, with_fabric, str(tmp_path), None)[0]
    assert all(difference(each, expected) < DOUBLE for each in pool.run(2, with_fabric, str(tmp_path), zero))


def evaluated(world, folder, zero):
    """What test and predict say, with fewer samples in the last batch than workers."""
    torch.manual_seed(0)
    Module = module_class()
    module = Module(batch_norm=False)
    module.test_step = module.validation_step
    module.predict_step = lambda batch: module.net(batch[0])
    trainer = trainer_of(strategy_of(zero) if zero is not None else "auto", folder)
    loader = DataLoader(data(13), 4)
    metrics = trainer.test(module, loader, verbose=False)[0]
    predicted = torch.cat(trainer.predict(module, DataLoader(data(12), 4)))
    return metrics, predicted.tolist()


def test_every_sample_is_evaluated_once(pool, tmp_path):
    metrics, predicted = pool.run(1, evaluated, str(tmp_path), None)[0]
    results = pool.run(3, evaluated, str(tmp_path), 0)
    assert all(each["accuracy"] == pytest.approx(metrics["accuracy"], abs=1e-6) for each, _ in results)
    assert all(each["val"] == pytest.approx(metrics["val"], abs=1e-5) for each, _ in results)
    rows = [row for _, rows in results for row in rows]
    assert len(rows) == 12 and np.allclose(sorted(rows), sorted(predicted), atol=1e-12)


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import test_lightning as cases
import lightning, torch
from torch.utils.data import DataLoader
import lockstep.integrations.lightning
cases.quiet()

class Dies(lightning.Callback):
    def on_train_batch_end(self, trainer, *rest):
        if trainer.global_rank == 1 and trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
trainer = lightning.Trainer(strategy="lockstep", accelerator="cpu", devices=2, max_epochs=1, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False, callbacks=[Dies()])
print("workers:", trainer.world_size, flush=True)
trainer.fit(cases.module_class()(False), DataLoader(cases.data(64), 8))
"""


@pytest.mark.timeout(240)
def test_lightning_starts_the_workers_and_one_that_is_killed_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).format(tests=str(Path(__file__).parent)))
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent), environ.get("PYTHONPATH", "")]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    ended = subprocess.run([sys.executable, str(script)], env=environ, capture_output=True, text=True, timeout=200)
    assert ended.stdout.count("workers: 2") == 2, ended.stdout + ended.stderr
    assert ended.returncode not in (0, -signal.SIGKILL)
    assert "WorkerLost" in ended.stderr and "worker 1" in ended.stderr, ended.stderr


def test_a_world_of_another_size_is_refused(tmp_path):
    with lockstep.join(), pytest.raises(lockstep.UsageError, match="Lightning was asked for 2"):
        from lockstep.integrations.lightning import LockstepFabricStrategy

        strategy = LockstepFabricStrategy()
        strategy.parallel_devices = [torch.device("cpu")] * 2

        class Two:
            creates_processes_externally = True
            main_address, main_port = "127.0.0.1", 0

            def world_size(self):
                return 2

            def local_rank(self):
                return 0

        strategy.cluster_environment = Two()
        strategy._join()
