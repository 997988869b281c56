"""`lockstep.Trainer`: training whose result has the same bits on any number of workers.

A global batch is cut into a fixed number of shards. What happens to a shard is a function of the weights, its samples
and (seed, step, shard), whoever runs it; what comes of the shards is added along one tree over them. So the number of
workers, the backend and what is split decide who computes what, and never what comes out. With a strategy, or a wire
other than Half, that is given up for less communication: each says what it does to exactness.

The trainer knows where the run is, in the data and in steps; a stepper makes the steps (see strategy.py).
"""

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from lockstep import seeds
from lockstep.comm.tree import ShardTree
from lockstep.data import batch as batches
from lockstep.data.order import cut
from lockstep.data.source import GlobalBatch, Shard
from lockstep.elastic.recovery import recovering
from lockstep.elastic.snapshots import Pieces
from lockstep.errors import CheckpointError, UsageError
from lockstep.keep import HostMemory, json_tree
from lockstep.keep.pieces import Piece
from lockstep.keep.save_load import Resumed, restore_from, restore_state, whole_state
from lockstep.keep.save_load import load as load_checkpoint
from lockstep.keep.save_load import save as save_checkpoint
from lockstep.keep.state import TrainingState, settings_of
from lockstep.keep.writing import Saving
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.optimizer import no_parameter
from lockstep.train.batches import BatchSource, FedBatch, Feed, LoaderOptions, MetricFn, Position, evaluate
from lockstep.train.step import Synchronous
from lockstep.train.strategy import Determinism, LossFn, StepResult, Strategy, TrainerOptions
from lockstep.watching.watcher import Watcher
from lockstep.watching.watcher import watch as watch_model
from lockstep.wire import Auto, Wire
from lockstep.world import World, join

Result = TypeVar("Result")

RECHECK_STEPS = 500
"""How many steps of an elastic run lie between two in which all workers compute the same shard."""


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
    wire: as of DataParallel. With `wire.Half` gradients and sums of them are rounded to 16 bits wherever shards are
        added: half the bytes, and still the same bits on any number of workers. Other wires encode what a worker
        sends, so that bits depend on the number of workers.
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
    recheck_every: after so many steps all workers compute one and the same shard, which finds a machine that computes
        wrongly; 0 for never, as without `--elastic` if not given. See train/recheck.py.
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
        recheck_every: int | None = None,
        cuda_graph: bool = False,
        watch: bool | str | PathLike[str] = False,
        world: World | None = None,
    ) -> None:
        self.world = world if world is not None else join()
        _require(module, optimizer, loss_fn, shards, clip, threads, recheck_every, self.world)
        _require_graph(cuda_graph, strategy)
        if self.world.generations is not None and strategy is not None:
            raise UsageError(
                f"strategy={type(strategy).__name__} in an elastic run: between their meetings its workers have "
                "different weights, and what a lost one has learnt is nowhere else. Leave out strategy, or --elastic."
            )
        self.optimizer = optimizer
        self.seed = self.world.agree_on_seed() if seed is None else seeds.checked(seed)
        self.steps = 0
        """How many steps have been made."""
        self._threads = threads
        self._position = Position()
        self._feed_in_use: Callable[[], Feed | None] = lambda: None
        """Where the batches come from that are in use. Weak: the loop over them holds it, and its loader processes."""
        self._plain: dict[str, Any] = {}
        """The optimizer's plain values, as they were when its tensors were last copied for others."""
        self._wire_state: dict[str, torch.Tensor] = {}
        """What this worker's wire remembered when its world ended."""
        self._num_sources = 0
        self._is_wrapped = True
        """Whether the stepper is of this world: not between two."""
        self._recovery = recovering(self.world, self, shards)
        self._memory = HostMemory()
        if self.world.device.type == "cpu":
            torch.set_num_threads(threads)
        self._options = TrainerOptions(
            module,
            optimizer,
            loss_fn,
            self.world,
            ShardTree(shards, self.world.size),
            clip,
            zero,
            blocks,
            bucket_cap_mb,
            wire,
            scheduler,
            scaler,
            Determinism(self.world.device, threads, is_wanted=deterministic),
            check_every,
            on_difference,
            cuda_graph,
            (RECHECK_STEPS if self.world.generations is not None else 0) if recheck_every is None else recheck_every,
            self._wants_change,
        )
        if self.world.generations is not None and not self._options.keeps_bits and self.world.is_main:
            warnings.warn(
                "an elastic run with wire=...: what a wire makes of gradients depends on how many workers there are, "
                "so the bits of the result depend on who is lost when; and what a lost worker had kept back for later "
                "steps (error feedback) is gone with it. Without a wire, and with lockstep.wire.Half, neither is so.",
                stacklevel=2,
            )
        self._stepper = Synchronous(self._options) if strategy is None else strategy.open(self._options)
        self.model = self._stepper.model
        """The wrapped module, as `loss_fn` gets it."""
        self._watch = watch
        self.watcher: Watcher | None = None
        """What watches the training, if anything does."""
        self._open_watcher()

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
        loading = LoaderOptions(
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
        self._stepper.check_data(dataset, loading)
        number = self._num_sources
        self._num_sources += 1
        seed = seeds.derive(self.seed, "feed", number)
        return self._walk(lambda: self._stepper.batches(dataset, loading, seed), number, epochs)

    def _walk(self, open_source: Callable[[], BatchSource], number: int, epochs: int) -> Iterator[GlobalBatch]:
        if self._recovery is not None and not self._recovery.begin_source(number):
            return
        here = self._position
        if number < here.source:
            return
        if number > here.source:
            here.begin(number)
        feed = Feed(open_source, here, self.world.events)
        self._feed_in_use = weakref.ref(feed)
        while here.epoch < epochs:
            batch = feed.next()
            if batch is not None:
                yield batch
        self.steps = self._stepper.end_batches(self.steps)
        here.begin(number + 1)

    # The step

    def step(self, batch: Any) -> StepResult:
        """One update from a global batch: one of `batches`, or one that all workers have alike, to be cut here.

        A worker whose shard fails raises its error, the others StepVoid: the step has happened nowhere then, and the
        next batch can be taken.
        """
        if self._recovery is not None and not self._recovery.is_calling:
            result = self._recovery.run("step", lambda: self.step(batch), batch)
            if self._options.check_every and self.steps % self._options.check_every == 0:
                # A call of its own: the step has taken effect, and must not be made again for a loss that is met here.
                self._recovery.run("check", lambda: self._stepper.check(self.steps))
            return result
        whole = self._own(batch) if isinstance(batch, GlobalBatch) else self._cut(batch)
        result = self._stepper.step(whole, self.seed, self.steps)
        self.steps += 1
        if self._recovery is not None:
            self._recovery.see(self._stepper.shard_times, is_change_due=self._stepper.is_change_due)
        else:
            self._stepper.check(self.steps)
        if isinstance(self.world.watcher, Watcher):
            result.log_to(self.world.watcher)
        return result

    def _own(self, batch: GlobalBatch) -> GlobalBatch:
        """`batch` with the shards that are this worker's now, which may not be those that it was loaded with."""
        is_own = [shard.number for shard in batch.shards] == list(range(*self._options.shard_range))
        feed = self._feed_in_use()
        return batch if is_own or self._recovery is None or feed is None else feed.again(batch)

    def _cut(self, batch: Any) -> GlobalBatch:
        total = batches.length(batch)
        if not total:
            raise UsageError("trainer.step: the batch has no samples. A global batch needs at least one: leave it out.")
        shards = []
        for number in range(*self._options.shard_range):
            part = cut(total, self._options.tree.shards, number)
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

        def attempt() -> float | dict[str, float]:
            return self._evaluate(dataset, metric_fn, batch_size, collate_fn, num_workers)

        return self._call("evaluate", attempt)

    def _evaluate(
        self,
        dataset: Any,
        metric_fn: MetricFn,
        batch_size: int | None,
        collate_fn: Callable[[Any], Any] | None,
        num_workers: int,
    ) -> float | dict[str, float]:
        options, shards = self._options, self._options.tree.shards
        size = 32 * shards if batch_size is None else batch_size
        loading = LoaderOptions(size, shuffle=False, collate_fn=collate_fn, num_workers=num_workers)
        seed = seeds.derive(self.seed, "evaluate")
        source = BatchSource(dataset, loading, run=options.shard_range, shards=shards, seed=seed)
        self.steps = self._stepper.before_save(self.steps)
        with options.determinism():
            return evaluate(self.model, source, metric_fn)

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
        if self.world.is_waiting:
            return Path(path)  # What it has is no state of the run.

        def attempt() -> Saving | Path:
            self.steps = self._stepper.before_save(self.steps)
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

        return self._call("save", attempt)

    def load(
        self, path: str | PathLike[str], *, fall_back: bool = False, missing: Literal["raise", "ok"] = "raise"
    ) -> Resumed:
        """Go on from the newest checkpoint in `path`; every worker calls this, before `batches`.

        missing: "ok" for a script that is started first and resumed later: where there is no checkpoint yet, nothing
            changes, and what is returned is false.

        The number of workers, the backend and `zero` may differ from those it was saved with: the run ends in the same
        bits. The number of shards and of threads may not.
        """
        found = load_checkpoint(
            path, self.model, self.optimizer, fall_back=fall_back, missing=missing, check=self._check
        )
        if not found:
            return found
        self._go_on_from(found.extra["trainer"])
        return dataclasses.replace(found, extra=found.extra["extra"])

    def state_dict(self) -> dict[str, Any]:
        """Everything, in memory: whole tensors by name and plain values. Every worker calls this, and gets it all."""

        def attempt() -> dict[str, Any]:
            self.steps = self._stepper.before_save(self.steps)
            return {"trainer": self._progress(), **whole_state(self.model, self.optimizer)}

        return self._call("state_dict", attempt)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, on however many workers; every worker calls this, before `batches`."""
        self._check("the state", {"trainer": state["trainer"]})
        restore_state(self.model, self.optimizer, state)
        self._go_on_from(state["trainer"])

    # What recovery asks of a trainer, where workers may come and go

    def _call(self, name: str, attempt: Callable[[], Result]) -> Result:
        return attempt() if self._recovery is None else self._recovery.run(name, attempt)

    def _wants_change(self) -> bool:
        return self._recovery is not None and self._recovery.wants_change

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self._options.module

    @property
    def is_split(self) -> bool:
        """Whether a worker has what no other has."""
        return self._options.zero > 0

    def pieces(self) -> list[Piece]:
        """What this worker has of the tensors of the run, where they are split."""
        state = TrainingState(self.model, self.optimizer, self.world)
        self._plain = state.optimizer_values()
        return state.pieces()

    def wanted(self, name: str, shape: tuple[int, ...]) -> tuple[int, int]:
        """Which elements of a tensor this worker needs, where they are split."""
        return TrainingState(self.model, self.optimizer, self.world).wanted(name, shape)

    def restore(self, pieces: Pieces, progress: Mapping[str, Any]) -> None:
        """Set all tensors, where they are split, to what has been dealt."""
        restore_from(pieces, self.model, self.optimizer, progress["optimizer"])

    def reference(self, batch: Any) -> Any:
        """What `replay` needs to make a step from `batch` again, on whichever shards are this worker's then."""
        feed = self._feed_in_use()
        if not isinstance(batch, GlobalBatch) or feed is None:
            return batch
        return FedBatch(feed, batch.epoch, batch.number, feed.before.stream)

    def replay(self, reference: Any) -> StepResult:
        """Make a step again that was made before."""
        return self.step(reference.fetch() if isinstance(reference, FedBatch) else reference)

    def whole_progress(self) -> dict[str, Any]:
        """All but tensors, as it was before the call under way."""
        feed = self._feed_in_use()
        before = feed.before if feed is not None else self._position
        plain = {**self._plain, "groups": settings_of(self.optimizer)}
        return {**self._progress(), "position": before.to_json(), "optimizer": plain}

    def go_on_from_progress(self, progress: Mapping[str, Any], *, is_new: bool) -> None:
        """Take what `whole_progress` gave; a newcomer takes the position in the data too."""
        self._take_progress(progress)
        if is_new:
            self._position = Position.from_json(progress["position"])

    def let_go(self) -> None:
        """The world has ended: drop what belongs to it."""
        if not self._is_wrapped:  # Another was lost before the model was wrapped anew.
            return
        self._is_wrapped = False
        wire = self._stepper.model._engine.wire
        self._wire_state = wire.state_dict() if wire is not None else self._wire_state
        self._stepper.release()
        self._stepper.model._engine.unsplit()

    def reopen(self, counts: Sequence[int]) -> None:
        """The world is another one: cut the shards anew, so many for each worker, and wrap the model anew."""
        tree = ShardTree(self._options.tree.shards, self.world.size, counts)
        self._options = dataclasses.replace(self._options, tree=tree)
        self._stepper = Synchronous(self._options, starts_equal=True)
        self._is_wrapped = True
        self.model = self._stepper.model
        if self._wire_state and self.model._engine.wire is not None:
            self.model._engine.wire.load_state_dict(self._wire_state)
        feed = self._feed_in_use()
        if feed is not None:
            feed.reopen()
        self._open_watcher()

    def _open_watcher(self) -> None:
        if self._watch is not False and not self.world.is_waiting:
            self.watcher = watch_model(self.model, None if self._watch is True else self._watch)

    def _progress(self) -> dict[str, Any]:
        position = self._position.to_json()
        if self._stepper.is_independent:  # What has been used of a source the stepper knows; this says which it is.
            position = self.world.gather_json(position)[0]
        return {
            "steps": self.steps,
            "shards": self._options.tree.shards,
            "seed": self.seed,
            "threads": self._threads if self.world.device.type == "cpu" else None,
            "position": position,
            "stepper": self._stepper.state_dict(),
            "scheduler": self._options.scheduler.state_dict() if self._options.scheduler is not None else None,
            "scaler": self._options.scaler.state_dict() if self._options.scaler is not None else None,
        }

    def _check(self, where: object, extra: Any) -> None:
        """Raise unless going on from there can end in the same bits."""
        stored = extra.get("trainer") if isinstance(extra, dict) else None
        if not isinstance(stored, dict):
            raise CheckpointError(f"{where} was not written by Trainer.save. Use lockstep.load for it.")
        json_tree.check_like(stored.get("seed"), self.seed, f"{where}: seed", finite=True)
        for name in ("steps", "shards"):
            json_tree.field(stored, name, (int,), where)
        json_tree.field(stored, "threads", (int, type(None)), where)
        json_tree.field({"stepper": {}, **stored}, "stepper", (dict, type(None)), where)
        position = json_tree.field(stored, "position", (dict,), where)
        for name in ("feed", "epoch", "batches"):
            json_tree.field(position, name, (int,), f"{where}: position")
        for name, live in (("scheduler", self._options.scheduler), ("scaler", self._options.scaler)):
            if live is not None and json_tree.field(stored, name, (dict, type(None)), where) is not None:
                json_tree.check_like(stored[name], live.state_dict(), f"{where}: {name}")
        shards = self._options.tree.shards
        if stored["shards"] != shards:
            raise CheckpointError(
                f"{where} is of a run with {stored['shards']} shards and this trainer has {shards}, so it "
                f"would come to other bits. Use Trainer(..., shards={stored['shards']})."
            )
        if stored["threads"] is not None and self.world.device.type == "cpu" and stored["threads"] != self._threads:
            raise CheckpointError(
                f"{where} is of a run with {stored['threads']} compute threads a worker and this trainer has "
                f"{self._threads}, so it would come to other bits. Use Trainer(..., threads={stored['threads']})."
            )

    def _go_on_from(self, stored: Mapping[str, Any]) -> None:
        if self._recovery is not None:
            self._recovery.forget_state()
        self._take_progress(stored)
        self._position = Position.from_json(stored["position"])
        self._num_sources = 0

    def _take_progress(self, stored: Mapping[str, Any]) -> None:
        self.steps, self.seed = int(stored["steps"]), int(stored["seed"])
        if self._options.scheduler is not None and stored["scheduler"] is not None:
            self._options.scheduler.load_state_dict(stored["scheduler"])
        if self._options.scaler is not None and stored["scaler"] is not None:
            self._options.scaler.load_state_dict(stored["scaler"])
        self._stepper.load_state_dict(stored.get("stepper") or {})
        self._stepper.after_load()


def _require(
    module: object,
    optimizer: object,
    loss_fn: object,
    shards: object,
    clip: object,
    threads: object,
    recheck_every: object,
    world: World,
) -> None:
    """Raise UsageError for arguments that cannot be right."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"Trainer takes a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if not callable(loss_fn):
        raise UsageError(f"loss_fn must be a function of (model, shard), got {type(loss_fn).__name__}.")
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
        raise UsageError(f"shards={shards!r}: a global batch is cut into one or more shards.")
    if shards < world.size:
        raise UsageError(
            f"shards={shards} on {world.size} workers: each worker needs at least one. Start at most {shards} workers, "
            "or use more shards from the beginning of the run."
        )
    if recheck_every is not None and (not isinstance(recheck_every, int) or recheck_every < 0):
        raise UsageError(f"recheck_every={recheck_every!r}: a number of steps, or 0 for never.")
    if clip is not None and (not isinstance(clip, int | float) or not clip > 0):
        raise UsageError(f"clip={clip!r}: the largest norm of the gradient, above 0, or None.")
    if not isinstance(threads, int) or threads < 1:
        raise UsageError(f"threads={threads!r}: a worker computes with at least one.")
    if isinstance(module, nn.Module):
        for name, part in module.named_modules():
            if isinstance(part, SyncBatchNorm | nn.SyncBatchNorm):
                raise UsageError(
                    f"{name!r} is a {type(part).__name__}, whose forward pass needs all workers at once. Trainer uses "
                    "the statistics of each shard: give it the model as it was before conversion."
                )
        _require_optimizer_of(module, optimizer)


def _require_optimizer_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError if the optimizer has what the model does not: no gradients of that would be added up."""
    own = {id(param) for param in module.parameters()}
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if id(param) not in own:
            raise UsageError(
                f"{no_parameter(param)}, so its gradient would not be the one of all workers. Give Trainer the model "
                "that holds all that is trained, and an optimizer made from that model's parameters."
            )


def _require_graph(cuda_graph: object, strategy: object) -> None:
    """Raise UsageError for a step that cannot be recorded."""
    if not isinstance(cuda_graph, bool):
        raise UsageError(f"cuda_graph={cuda_graph!r}: whether to record steps as CUDA graphs, True or False.")
    if cuda_graph and strategy is not None:
        raise UsageError(
            f"cuda_graph=True with strategy={strategy!r}: recorded are steps that all workers make together. Leave one "
            "of the two out."
        )
