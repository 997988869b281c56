"""`lockstep.Trainer`: training whose result has the same bits on any number of workers.

A global batch is cut into a fixed number of shards. What happens to a shard is a function of the weights, its samples
and (seed, step, shard), whoever runs it; what comes of the shards is added along one tree over them. So the number of
workers, the backend and what is split decide who computes what, and never what comes out. With a strategy or a wire
that is given up for less communication: each says what it does to exactness.

The trainer knows where the run is, in the data and in steps; a stepper makes the steps (see strategy.py).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from lockstep import seeds
from lockstep.comm.shard_tree import ShardTree
from lockstep.data import batch as batches
from lockstep.data.cut import cut
from lockstep.data.generators import Generators
from lockstep.data.shard_source import GlobalBatch, Shard
from lockstep.errors import CheckpointError
from lockstep.keep import HostMemory
from lockstep.keep.save import Saving
from lockstep.keep.state_dict import restore_state, whole_state
from lockstep.keep.training import Resumed
from lockstep.keep.training import load as load_checkpoint
from lockstep.keep.training import save as save_checkpoint
from lockstep.train.arguments import require, require_graph
from lockstep.train.deterministic import Determinism
from lockstep.train.evaluation import MetricFn, evaluate
from lockstep.train.feed import Loading, Position
from lockstep.train.result import StepResult
from lockstep.train.shard_loss import LossFn
from lockstep.train.strategy import Independent, Setting, Strategy, Walkable
from lockstep.train.synchronous import Synchronous
from lockstep.watching.watcher import Watcher
from lockstep.watching.watcher import watch as watch_model
from lockstep.wire import Auto, Wire
from lockstep.world import World, join


class Trainer:
    """Trains `module` with `optimizer`; every worker makes one, and calls its methods alike.

        trainer = lockstep.Trainer(net, optimizer, loss_fn, shards=8, clip=1.0)
        for batch in trainer.batches(dataset, batch_size=256, epochs=3):
            out = trainer.step(batch)

    loss_fn: `loss_fn(model, shard)` returns the mean loss of the shard, or `(loss, weight)` where it is the mean over
        something else than samples (tokens, say). It must call `model`, not `module`. `torch.autocast` goes in here.
    shards: into how many shards a global batch is cut; fixed for a run. From 1 to that many workers can run it, and
        all come to the same bits. More shards than workers is gradient accumulation.
    clip: the largest norm of the gradient.
    zero, blocks, bucket_cap_mb: as of DataParallel. They change no bit.
    wire: as of DataParallel. Gradients are added as the wire says then, and bits depend on the number of workers.
    strategy: `lockstep.LocalSGD`, `DiLoCo` or `Async`, instead of one common step at a time.
    scheduler: stepped after every step, and saved with the rest.
    scaler: a `torch.amp.GradScaler`, for float16.
    seed: for dropout, augmentation and the order of samples; the world's if not given.
    threads: compute threads of each worker on the CPU, where sums depend on their number. Runs that are to come to the
        same bits must have the same, so it does not follow from the number of cores.
    deterministic: on a GPU, run steps with torch's deterministic algorithms; False allows operations that have none,
        and gives up the promise.
    check_every: after so many steps the replicas are compared; 0 for never. `on_difference`: "stop" raises
        ReplicaDiffers, "repair" overwrites the odd one with what the majority has.
    cuda_graph: on a lone worker with a GPU, record forward, backward and update as CUDA graphs after a few steps, and
        replay them: for models whose kernels are shorter than their launches (see docs/trainer.md). Changes no bit
        between numbers of workers, but the learning rate is rounded to single precision.
    watch: whether to know where the time goes and who is slow, as `lockstep.watch` does; a folder, to have it recorded
        there. The watcher is `trainer.watcher`.

    Batch normalisation uses the statistics of the shard. Memory, besides what DataParallel needs: with several shards
    per worker, log2 of that many more sets of gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFn,
        *,
        shards: int,
        clip: float | None = None,
        zero: int = 0,
        blocks: Any = None,
        bucket_cap_mb: float | None = None,
        wire: Wire | Auto | Literal["auto"] | None = None,
        strategy: Strategy | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        seed: int | None = None,
        threads: int = 1,
        deterministic: bool = True,
        check_every: int = 50,
        on_difference: str = "stop",
        cuda_graph: bool = False,
        watch: bool | str | PathLike[str] = False,
        world: World | None = None,
    ) -> None:
        self.world = world if world is not None else join()
        require(module, optimizer, loss_fn, shards, clip, threads, self.world)
        require_graph(cuda_graph, strategy)
        self.optimizer = optimizer
        self.seed = self.world.seed if seed is None else int(seed)
        self.steps = 0
        """How many steps have been made."""
        self._scheduler, self._scaler = scheduler, scaler
        self._threads = threads
        self._tree = ShardTree(shards, self.world.size)
        self._position = Position()
        self._num_feeds = 0
        self._memory = HostMemory()
        if self.world.device.type == "cpu":
            torch.set_num_threads(threads)
        self._determinism = Determinism(self.world.device, threads, is_wanted=deterministic)
        setting = Setting(
            module,
            optimizer,
            loss_fn,
            self.world,
            self._tree,
            clip,
            zero,
            blocks,
            bucket_cap_mb,
            wire,
            scheduler,
            scaler,
            self._determinism,
            check_every,
            on_difference,
            cuda_graph,
        )
        self._stepper = Synchronous(setting) if strategy is None else strategy.open(setting)
        self._setting = setting
        self.model = self._stepper.model
        """The wrapped module, as `loss_fn` gets it."""
        self.watcher = None if watch is False else watch_model(self.model, None if watch is True else watch)
        """What watches the training, if anything does."""

    # The batches

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int = 1,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        sampler: Iterable[Any] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
    ) -> Iterator[GlobalBatch]:
        """Global batches of `batch_size` samples, epoch after epoch, from wherever the run is.

        dataset: map-style, or an iterable one (a stream): every worker reads all of that. One with `state_dict` and
            `load_state_dict` is resumed by them; of others, what was used before a stop is read again.
        sampler: gives the samples' order where `shuffle` (another one in each epoch) and the data set's own are not
            what is wanted; the same on all workers.
        The others are those of torch's DataLoader. `collate_fn` makes a shard of the samples of one shard.

        The order is a function of (seed, epoch) and of nothing else. A resumed run that makes the same calls goes on
        at the next batch.
        """
        pin = self.world.device.type == "cuda" if pin_memory is None else pin_memory
        loading = Loading(
            batch_size,
            shuffle,
            drop_last,
            sampler,
            collate_fn,
            num_workers,
            prefetch_factor,
            pin,
            worker_init_fn,
            multiprocessing_context,
        )
        number = self._num_feeds
        self._num_feeds += 1
        seed = seeds.derive(self.seed, "feed", number)
        return self._walk(self._stepper.feed(dataset, loading, seed), number, epochs)

    def _walk(self, feed: Walkable, number: int, epochs: int) -> Iterator[GlobalBatch]:
        here = self._position
        if number < here.feed:
            return
        if number > here.feed:
            here.feed, here.epoch, here.batches, here.stream = number, 0, 0, None
        while here.epoch < epochs:
            for batch in self.world.events.loading(feed.walk(here.epoch, here.batches, here.stream)):
                here.batches, here.stream = batch.number + 1, batch.stream
                yield batch
            here.epoch, here.batches, here.stream = here.epoch + 1, 0, None
        if isinstance(self._stepper, Independent):
            self._stepper.end_feed()
            self.steps = self._stepper.agreed_steps(self.steps)
        here.feed, here.epoch, here.batches, here.stream = number + 1, 0, 0, None

    # The step

    def step(self, batch: Any) -> StepResult:
        """One update from a global batch: one of `batches`, or one that all workers have alike, to be cut here.

        A worker whose shard fails raises its error, the others StepVoid: the step has happened nowhere then, and the
        next batch can be taken.
        """
        whole = batch if isinstance(batch, GlobalBatch) else self._cut(batch)
        if self.watcher is not None and not self.watcher.is_calibrated:
            self._calibrate(self.watcher, whole)
        result = self._stepper.step(whole, self.seed, self.steps)
        self.steps += 1
        self._stepper.check(self.steps)
        if self.world.watcher is not None:
            self.world.watcher.log(loss=result._loss, grad_norm=result._grad_norm, lr=result._lr)
        return result

    def _calibrate(self, watcher: Watcher, batch: GlobalBatch) -> None:
        """Let the watcher time the passes of a step without communication; they leave nothing behind."""
        stepper = self._stepper
        if not isinstance(stepper, Synchronous) or self._setting.wire is not None or self.model.gathers:
            return  # Passes that communicate, or buffers that cannot be put back.

        def run_passes() -> None:
            for _ in batch.shards:
                with self.model.no_sync():
                    stepper.passes.idle_pass(batch)
                self.model.zero_grad()

        with Generators(self.seed), torch.random.fork_rng():
            watcher.calibrate(run_passes)
        if self.model.reducer is not None:
            self.model.reducer.forget()

    def _cut(self, batch: Any) -> GlobalBatch:
        total = batches.length(batch)
        shards = []
        for number in range(*self._tree.runs[self.world.rank]):
            part = cut(total, self._tree.shards, number)
            shards.append(Shard(number, part.size, batches.own(batches.take(batch, part)) if part.size else None))
        spare = None if any(shard.size for shard in shards) else batches.take(batch, cut(total, total, 0))
        return GlobalBatch(0, self.steps, total, tuple(shards), spare)

    # Metrics

    def evaluate(
        self,
        dataset: Any,
        metric_fn: MetricFn,
        batch_size: int | None = None,
        *,
        collate_fn: Callable[[Any], Any] | None = None,
        num_workers: int = 0,
    ) -> float | dict[str, float]:
        """The mean over all samples of what `metric_fn(model, shard)` returns: a number, or a dict of numbers.

        It returns means over the shard, or `(means, weight)`. Nothing is padded or left out, and the result has the
        same bits on any number of workers. The model is in evaluation mode meanwhile, without gradients. `batch_size`
        is that of the global batch; 32 samples a shard if not given.
        """
        size = 32 * self._tree.shards if batch_size is None else batch_size
        loading = Loading(size, shuffle=False, collate_fn=collate_fn, num_workers=num_workers)
        feed = self._setting.feed(dataset, loading, seeds.derive(self.seed, "evaluate"))
        self._settle()
        with self._determinism():
            return evaluate(self.model, feed, metric_fn, self._tree.runs[0][1])

    # To go on later

    def save(
        self,
        path: str | PathLike[str],
        *,
        extra: Any = None,
        keep_last: int | None = None,
        wait: bool = True,
    ) -> Saving | Path:
        """Write a checkpoint of everything into the folder `path`, as `lockstep.save` does; every worker calls this."""
        self._settle()
        return save_checkpoint(
            path,
            self.model,
            self.optimizer,
            step=self.steps,
            extra={"trainer": self._progress(), "extra": extra},
            keep_last=keep_last,
            wait=wait,
            memory=self._memory,
        )

    def load(self, path: str | PathLike[str], *, fall_back: bool = False) -> Resumed:
        """Go on from the newest checkpoint in `path`; every worker calls this, before `batches`.

        The number of workers, the backend and `zero` may differ from those it was saved with: the run ends in the same
        bits. The number of shards and of threads may not.
        """
        found = load_checkpoint(path, self.model, self.optimizer, fall_back=fall_back, check=self._check)
        self._go_on_from(found.extra["trainer"])
        return dataclasses.replace(found, extra=found.extra["extra"])

    def state_dict(self) -> dict[str, Any]:
        """Everything, in memory: whole tensors by name and plain values. Every worker calls this, and gets it all."""
        self._settle()
        return {"trainer": self._progress(), **whole_state(self.model, self.optimizer)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, on however many workers; every worker calls this, before `batches`."""
        self._check("the state", {"trainer": state["trainer"]})
        restore_state(self.model, self.optimizer, state)
        self._go_on_from(state["trainer"])

    def _settle(self) -> None:
        """All workers are here: let their replicas be what is to be kept, and their numbers of steps be one."""
        self._stepper.before_save()
        if isinstance(self._stepper, Independent):
            self.steps = self._stepper.agreed_steps(self.steps)

    def _progress(self) -> dict[str, Any]:
        position = self._position.to_json()
        if isinstance(self._stepper, Independent):  # What has been used is the stepper's to know; this is about where.
            position = self.world.broadcast(position)
        return {
            "steps": self.steps,
            "shards": self._tree.shards,
            "seed": self.seed,
            "threads": self._threads if self.world.device.type == "cpu" else None,
            "position": position,
            "stepper": self._stepper.state_dict(),
            "scheduler": self._scheduler.state_dict() if self._scheduler is not None else None,
            "scaler": self._scaler.state_dict() if self._scaler is not None else None,
        }

    def _check(self, where: object, extra: Any) -> None:
        """Raise unless going on from there can end in the same bits."""
        stored = extra.get("trainer") if isinstance(extra, dict) else None
        if not isinstance(stored, dict):
            raise CheckpointError(f"{where} was not written by Trainer.save. Use lockstep.load for it.")
        if stored["shards"] != self._tree.shards:
            raise CheckpointError(
                f"{where} is of a run with {stored['shards']} shards and this trainer has {self._tree.shards}, so it "
                f"would come to other bits. Use Trainer(..., shards={stored['shards']})."
            )
        if stored["threads"] is not None and self.world.device.type == "cpu" and stored["threads"] != self._threads:
            raise CheckpointError(
                f"{where} is of a run with {stored['threads']} compute threads a worker and this trainer has "
                f"{self._threads}, so it would come to other bits. Use Trainer(..., threads={stored['threads']})."
            )

    def _go_on_from(self, stored: Mapping[str, Any]) -> None:
        self.steps, self.seed = int(stored["steps"]), int(stored["seed"])
        self._position = Position.from_json(stored["position"])
        self._num_feeds = 0
        if self._scheduler is not None and stored["scheduler"] is not None:
            self._scheduler.load_state_dict(stored["scheduler"])
        if self._scaler is not None and stored["scaler"] is not None:
            self._scaler.load_state_dict(stored["scaler"])
        self._stepper.load_state_dict(stored.get("stepper") or {})
        self._stepper.after_load()
