"""transformers' Trainer and Accelerate on Lockstep, with the real libraries: equal to one worker's training."""

import os
import signal
import subprocess
import sys
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
for each in ("transformers", "accelerate", "datasets"):
    pytest.importorskip(each, reason=f"needs the package {each}", exc_type=(ImportError, RuntimeError))

DOUBLE = 1e-9
WORDS = 40


def forget():
    """Accelerate keeps one world for a process, and the pool's workers have another with every test."""
    import accelerate
    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def sentences(count, seed=1):
    """Rows of which an uneven number of words is to be predicted."""
    import datasets

    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        words = torch.randint(0, WORDS, (10,), generator=generator)
        targets = words.clone()
        targets[: int(torch.randint(0, 9, (1,), generator=generator))] = -100
        rows.append({"input_ids": words.tolist(), "labels": targets.tolist()})
    return datasets.Dataset.from_list(rows).with_format("torch")


def gpt(**options):
    import transformers

    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**off, **sizes, **special, **options)
    return transformers.GPT2LMHeadModel(config).double()


def arguments(folder, workers, batch=4, **options):
    import transformers

    defaults = {
        "per_device_train_batch_size": batch // workers,
        "per_device_eval_batch_size": batch // workers,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "optim": "adamw_torch",
        "seed": 3,
        "train_sampling_strategy": "sequential",
    }
    return transformers.TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, **{**defaults, **options}
    )


def trained(world, folder, zero, options=None, resume=None, more=None):
    """Weights, losses, norms and evaluations; zero=None is transformers' own Trainer."""
    import transformers

    from lockstep.integrations.transformers import LockstepTrainer

    forget()
    model = gpt()
    args = arguments(folder, world.size, **(options or {}))
    kind = transformers.Trainer if zero is None else LockstepTrainer
    extra = {} if zero is None else {"zero": zero}
    trainer = kind(model=model, args=args, train_dataset=sentences(22), eval_dataset=sentences(7, 2), **extra)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    seen = [entry for entry in trainer.state.log_history if entry["step"] > (more or 0)]
    return weights_of(model), {
        name: np.array([float(entry[name]) for entry in seen if name in entry])
        for name in ("loss", "grad_norm", "eval_loss")
    }


@pytest.mark.parametrize("zero", some([0, 3], [0, 1, 2, 3]))
def test_trainer_equals_one_worker(pool, tmp_path, zero):
    """Weighted by tokens, with accumulation and clipping; batches do not divide, and no word is evaluated twice."""
    weights, seen = pool.run(1, trained, str(tmp_path), None)[0]
    for workers in some([2], [1, 2, 4]):
        for result, others in pool.run(workers, trained, str(tmp_path), zero):
            assert difference(result, weights) < DOUBLE
            assert seen["loss"].size and difference(others, seen) < 1e-5  # It logs in single precision.


def test_trainer_goes_on_on_another_number_of_workers(pool, tmp_path):
    """Saved by 2 workers with zero=3 in mid-epoch, gone on with by one with none, and the other way round."""
    options = {"save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}
    whole, _ = pool.run(1, trained, str(tmp_path / "one"), 0, options)[0]
    pool.run(2, trained, str(tmp_path / "two"), 3, options)
    back, _ = pool.run(1, trained, str(tmp_path / "one"), 0, options, str(tmp_path / "two" / "checkpoint-4"))[0]
    assert difference(back, whole) < DOUBLE
    for result, _ in pool.run(2, trained, str(tmp_path / "two"), 1, options, str(tmp_path / "one" / "checkpoint-2")):
        assert difference(result, whole) < DOUBLE


def classified(world, folder, zero):
    """A model that averages over samples, and metrics over predictions, on fewer samples than the workers can share."""
    import datasets
    import transformers

    from lockstep.integrations.transformers import LockstepTrainer

    forget()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()

        def forward(self, x, labels):
            out = self.body(x)
            return {"loss": F.cross_entropy(out, labels), "logits": out}

    def rows(count, seed):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 8, generator=generator, dtype=torch.double)
        y = torch.randint(0, 3, (count,), generator=generator)
        made = [{"x": a.numpy(), "labels": int(b)} for a, b in zip(x, y, strict=True)]
        return datasets.Dataset.from_list(made).with_format("torch", dtype=None)

    torch.manual_seed(0)
    model = Net()
    args = arguments(folder, world.size, batch=6, remove_unused_columns=False)
    kind = transformers.Trainer if zero is None else LockstepTrainer
    trainer = kind(
        model=model,
        args=args,
        train_dataset=rows(23, 1),
        eval_dataset=rows(7, 2),
        compute_metrics=lambda p: {
            "count": len(p.predictions),
            "right": (p.predictions.argmax(1) == p.label_ids).sum(),
        },
        data_collator=lambda batch: {
            "x": torch.stack([each["x"].double() for each in batch]),
            "labels": torch.stack([each["labels"] for each in batch]),
        },
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    last = [entry for entry in trainer.state.log_history if "eval_loss" in entry][-1]
    return weights_of(model), {name: last[f"eval_{name}"] for name in ("loss", "count", "right")}


def test_losses_over_samples_and_metrics(pool, tmp_path):
    weights, seen = pool.run(1, classified, str(tmp_path), None)[0]
    assert seen["count"] == 7
    for result, others in pool.run(3, classified, str(tmp_path), 0):
        assert difference(result, weights) < DOUBLE
        assert (others["count"], others["right"]) == (7, seen["right"])
        assert others["loss"] == pytest.approx(seen["loss"], abs=1e-5)


def lora(world, folder, zero):
    """Adapters of peft on a frozen model, whose activations are computed anew, and its checkpoint."""
    import peft
    import transformers

    from lockstep.integrations.transformers import LockstepTrainer

    forget()
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    model = peft.get_peft_model(gpt(), config).double()
    more = {"gradient_checkpointing": True, "save_strategy": "epoch"}
    args = arguments(folder, world.size, **more)
    kind = transformers.Trainer if zero is None else LockstepTrainer
    extra = {} if zero is None else {"zero": zero}
    trainer = kind(model=model, args=args, train_dataset=sentences(22), eval_dataset=sentences(7, 2), **extra)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return weights_of(model), sorted(path.name for path in Path(folder, "checkpoint-6").glob("adapter*"))


@pytest.mark.parametrize("zero", some([2], [0, 1, 2, 3]))
def test_lora_with_recomputed_activations(pool, tmp_path, zero):
    pytest.importorskip("peft", reason="needs the package peft", exc_type=(ImportError, RuntimeError))
    weights, files = pool.run(1, lora, str(tmp_path / "one"), None)[0]
    for result, others in pool.run(2, lora, str(tmp_path / "two"), zero):
        assert difference(result, weights) < DOUBLE and others == files


def streamed(world, folder, kind):
    """A Trainer on a data set that is read as a stream: whole, or split by node before."""
    import datasets
    import transformers
    from datasets.distributed import split_dataset_by_node

    from lockstep.integrations.transformers import LockstepTrainer

    forget()
    stream = sentences(24).to_iterable_dataset(num_shards=4)
    if kind == "split":
        stream = split_dataset_by_node(stream, rank=world.rank, world_size=world.size)
    assert isinstance(stream, datasets.IterableDataset)
    model = gpt()
    args = arguments(folder, world.size, max_steps=3, eval_strategy="no")
    trainer = LockstepTrainer(model=model, args=args, train_dataset=stream)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return weights_of(model)


def test_streams(pool, tmp_path):
    """A stream is shared out; one that was split by node gives each worker what it gives: all weights stay alike."""
    whole = pool.run(1, streamed, str(tmp_path), "whole")[0]
    assert all(difference(each, whole) < DOUBLE for each in pool.run(2, streamed, str(tmp_path), "whole"))
    split = pool.run(2, streamed, str(tmp_path), "split")
    assert difference(split[0], split[1]) == 0 and difference(split[0], whole) > DOUBLE


def accelerated(world, folder, zero, stop=None, resume=False):
    """A loop of one's own with accumulation, clipping and torchmetrics, saved in the middle."""
    import accelerate
    import torchmetrics

    from lockstep.integrations.accelerate import LockstepAccelerator

    forget()
    torch.manual_seed(0)
    options = {"gradient_accumulation_steps": 2, "cpu": True}
    accelerator = accelerate.Accelerator(**options) if zero is None else LockstepAccelerator(zero=zero, **options)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(46, 8, generator=generator, dtype=torch.double)
    rows = TensorDataset(x, torch.randint(0, 3, (46,), generator=generator))
    loader = DataLoader(rows, 6 // world.size, shuffle=False)
    test_loader = DataLoader(TensorDataset(*rows[:13]), 6 // world.size)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    model, optimizer, loader, test_loader = accelerator.prepare(net, optimizer, loader, test_loader)
    begin = 0
    if resume:
        accelerator.load_state(f"{folder}/state")
        begin = stop
    for epoch in range(begin, 3):
        if epoch == stop and not resume:
            accelerator.save_state(f"{folder}/state")
            break
        for a, b in loader:
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(a), b))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
    model.eval()
    metric, seen = torchmetrics.Accuracy("multiclass", num_classes=3), []
    for a, b in test_loader:
        out, target = accelerator.gather_for_metrics((model(a).detach(), b))
        metric.sync_on_compute = False
        metric.update(out, target)
        seen.extend(target.tolist())
    return weights_of(accelerator.unwrap_model(model)), (metric.compute().item(), sorted(seen))


@pytest.mark.parametrize("zero", some([0, 2], [0, 1, 2, 3]))
def test_a_loop_with_accelerate_equals_one_worker(pool, tmp_path, zero):
    weights, seen = pool.run(1, accelerated, str(tmp_path), None)[0]
    for workers in some([2], [1, 2, 3]):
        for result, others in pool.run(workers, accelerated, str(tmp_path), zero):
            assert difference(result, weights) < DOUBLE and others == seen


def test_accelerate_goes_on_on_another_number_of_workers(pool, tmp_path):
    whole, _ = pool.run(1, accelerated, str(tmp_path), None)[0]
    pool.run(2, accelerated, str(tmp_path), 3, 1)
    for result, _ in pool.run(3, accelerated, str(tmp_path), 1, 1, True):
        assert difference(result, whole) < DOUBLE


SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import lockstep
world = lockstep.join()
import test_transformers as cases, transformers
from lockstep.integrations.transformers import LockstepTrainer

class Dies(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if world.rank == 1 and state.global_step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

cases.forget()
LockstepTrainer(model=cases.gpt(), args=cases.arguments(sys.argv[1], 2, eval_strategy="no"),
                train_dataset=cases.sentences(22), callbacks=[Dies()]).train()
"""


@pytest.mark.timeout(240)
def test_a_killed_worker_ends_a_trainer_with_a_message(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "lockstep", "run", "-n", "2", str(script), str(tmp_path)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 128 + signal.SIGKILL, ended.stderr
    assert "worker 1 was killed" in ended.stderr or "WorkerLost" in ended.stderr, ended.stderr


def test_a_model_without_its_optimizer_is_not_split(pool):
    assert "accelerator.prepare(model, optimizer" in pool.run(2, unsplit, expect_failure=True)[0][1]


def unsplit(world):
    from lockstep.integrations.accelerate import LockstepAccelerator

    forget()
    LockstepAccelerator(zero=1, cpu=True).prepare(nn.Linear(2, 2))


def test_extras_are_imported_by_who_uses_them_only():
    code = (
        "import sys, lockstep, lockstep.integrations; lockstep.DataParallel; lockstep.Trainer; lockstep.watch; "
        "print([each for each in ('lightning', 'transformers', 'accelerate', 'ray', 'mlflow', 'wandb', 'tensorboard') "
        "if each in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "[]", ended.stdout + ended.stderr


assert lockstep  # The workers' functions above are pickled by name, and find it here.
