"""What a step costs through Lightning and transformers: Lockstep, and the DDP that the library uses itself.

    lockstep run -n 2 bench/integrations.py --turns 6

gpt-10m of `lockstep bench`, on CPUs, each in its default setting: DDP over gloo, Lockstep over shared memory. The
library's own loop trains, with clipping and AdamW: a few steps of one variant, then of the other, in one process, so
that what else runs on the machine hits both. Shown is the ratio of the medians, below 1 where Lockstep is faster, and
those of the turns.
"""

import argparse
import json
import logging
import statistics
import time
import warnings

import torch
import torch.distributed as dist

import lockstep
from lockstep.bench import models

WARM_UP = 3
"""Steps at the beginning of each turn that do not count: wrapping, first buckets, first allocations."""


class Rows(torch.utils.data.Dataset):
    """Samples of a workload, as many as asked for."""

    def __init__(self, workload, count):
        self.rows = list(zip(*models.batches(workload, count, 0, torch.device("cpu"), 1)[0], strict=True))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        tokens, targets = self.rows[number]
        return {"tokens": tokens, "targets": targets}


def lightning_turn(world, given, strategy):
    """Seconds of each step of a fit."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = models.build(given.model)
            self.times = []

        def training_step(self, batch, number):
            return self.net(batch["tokens"], batch["targets"])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

        def on_train_batch_start(self, batch, number):
            self.begin = time.perf_counter()

        def on_train_batch_end(self, *_):
            self.times.append(time.perf_counter() - self.begin)

    torch.manual_seed(0)
    module = Module()
    is_ours = "Lockstep" in type(strategy).__name__
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=world.size, max_epochs=1, gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    samples = given.batch * (given.steps + WARM_UP) * world.size
    size = given.batch * world.size if is_ours else given.batch
    trainer.fit(module, torch.utils.data.DataLoader(Rows(given.model, samples), size))
    return module.times[WARM_UP:]


def transformers_turn(world, given, kind, extra):
    """Seconds of each step of a training."""
    import transformers

    class Clock(transformers.TrainerCallback):
        def __init__(self):
            self.times = []

        def on_step_begin(self, *_, **__):
            self.begin = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.times.append(time.perf_counter() - self.begin)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = models.build(given.model)

        def forward(self, tokens, targets):
            return {"loss": self.net(tokens, targets)}

    torch.manual_seed(0)
    clock = Clock()
    args = transformers.TrainingArguments(
        given.folder, use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=1e-4, optim="adamw_torch",
        save_strategy="no", max_steps=given.steps + WARM_UP, per_device_train_batch_size=given.batch,
        ddp_find_unused_parameters=False, remove_unused_columns=False, logging_steps=10_000,
    )  # fmt: skip
    samples = given.batch * (given.steps + WARM_UP) * world.size
    trainer = kind(model=Net(), args=args, train_dataset=Rows(given.model, samples), callbacks=[clock], **extra)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return clock.times[WARM_UP:]


def variants(world, given):
    """By library: what makes a turn of its own DDP, and of Lockstep."""
    # Accelerate knows one group of a process, so that is the peers', and Lockstep gets the one it would take by itself.
    shm = dist.new_group(backend="shm")
    found = {}
    if given.only != "transformers":
        import lightning

        from lockstep.integrations.lightning import LockstepStrategy

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        found["lightning"] = (
            lambda: lightning_turn(world, given, lightning.pytorch.strategies.DDPStrategy()),
            lambda: lightning_turn(world, given, LockstepStrategy(process_group=shm)),
        )
    if given.only != "lightning":
        import transformers

        from lockstep.integrations.transformers import LockstepTrainer

        ours = {"wrapping": {"process_group": shm}}
        found["transformers"] = (
            lambda: transformers_turn(world, given, transformers.Trainer, {}),
            lambda: transformers_turn(world, given, LockstepTrainer, ours),
        )
    return found


def main():
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="gpt-10m")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="steps that count in a turn")
    parser.add_argument("--batch", type=int, default=2, help="samples of a worker")
    parser.add_argument("--only", choices=["lightning", "transformers"])
    parser.add_argument("--folder", default="/tmp/lockstep-bench-integrations")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    with lockstep.join(seed=0, backend="gloo") as world:
        for library, (theirs, ours) in variants(world, given).items():
            times = {"ddp": [], "lockstep": []}
            ratios = []
            for turn in range(given.turns + 1):
                pair = {}
                for name, run in sorted((("ddp", theirs), ("lockstep", ours)), reverse=turn % 2 == 1):
                    pair[name] = run()
                if turn:  # The first one warms up.
                    ratios.append(statistics.median(pair["lockstep"]) / statistics.median(pair["ddp"]))
                    for name, found in pair.items():
                        times[name] += found
            if world.is_main:
                medians = {name: statistics.median(each) for name, each in times.items()}
                # On a machine that others use too, the quickest quarter says more.
                quick = {name: statistics.quantiles(each, n=4)[0] for name, each in times.items()}
                print(json.dumps({
                    "library": library, "model": given.model, "workers": world.size,
                    "ddp_ms": round(1e3 * medians["ddp"], 1), "lockstep_ms": round(1e3 * medians["lockstep"], 1),
                    "ratio": round(medians["lockstep"] / medians["ddp"], 3),
                    "ratio_of_quick_quarters": round(quick["lockstep"] / quick["ddp"], 3),
                    "ratios_of_turns": [round(each, 2) for each in sorted(ratios)],
                }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
