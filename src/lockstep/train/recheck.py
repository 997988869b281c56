"""Finds the machine that computes wrongly: now and then all workers compute one and the same shard.

What a shard gives is a function of the weights, its samples and (seed, step, shard), whoever computes it. So the
gradients must be the same to the bit. A worker whose are not has a processor or memory that errs, and errs silently:
replicas stay equal, since all apply the same wrong sum (`Integrity` cannot see that). The pass counts for nothing:
neither gradients, buffers nor random numbers of the training change by it. It costs one shard of every worker, and one
batch to send.
"""

import hashlib
from collections import Counter

from lockstep import seeds
from lockstep.data import batch as batches
from lockstep.data.source import GlobalBatch
from lockstep.errors import ReplicaDiffers, WorkerLost
from lockstep.replica.data_parallel import DataParallel
from lockstep.replica.fingerprint import fingerprints
from lockstep.train.shards import Shards
from lockstep.train.strategy import ShardLoss, TrainerOptions


class Recheck:
    """One trainer's, on one worker."""

    def __init__(self, options: TrainerOptions, model: DataParallel, shards: Shards) -> None:
        self._options, self._model, self._shards = options, model, shards

    def check_if_due(self, batch: GlobalBatch, seed: int, step: int) -> None:
        """Compute one shard of this step's batch with all workers, if it is time; on every worker, before the step.

        Raises ReplicaDiffers on all of them where they differ. In an elastic run with a majority it is raised on the
        worker that errs, and WorkerLost on the others, which go on without it.
        """
        world, every = self._options.world, self._options.recheck_every
        if not every or world.size == 1 or (step + 1) % every or self._model._engine.gathers:
            return
        number = (step // every) % min(batch.total, self._options.tree.shards)
        mine = next((shard for shard in batch.shards if shard.number == number), None)
        shard = next(each for each in world.gather(mine) if each is not None)
        digests = world.gather_json(self._digest(shard.batch, shard.size, seeds.derive(seed, "step", step, number)))
        counts = Counter(digests)
        if len(counts) > 1:
            raise self._error(digests, counts, step, number)

    def _digest(self, batch: object, size: int, seed: int) -> str:
        """What a forward and a backward pass of a shard give here, as a number of few bytes."""
        options, model, reducer = self._options, self._model, self._model._engine.reducer
        seeds.seed_everything(seed)
        self._shards.begin()
        with options.determinism(), model.no_sync():
            moved = batches.move(batch, options.world.device, non_blocking=True)
            loss = ShardLoss.of(options.loss_fn(model, moved), size)
            loss.backward(size, None)
        found = [param.grad for param in model.module.parameters() if param.grad is not None]
        numbers = fingerprints([loss.value.detach(), *found])
        model.zero_grad()
        self._shards.buffers.put_back_all()
        if reducer is not None:
            reducer.forget()
        return hashlib.blake2b(repr(numbers).encode(), digest_size=16).hexdigest()

    def _error(self, digests: list[str], counts: Counter[str], step: int, shard: int) -> ReplicaDiffers | WorkerLost:
        world = self._options.world
        digest, count = counts.most_common(1)[0]
        what = f"computed the same shard ({shard} of step {step}) from the same weights, and came to other gradients"
        advice = "Its processor or memory errs: take that machine out of the run, and go back to a checkpoint before."
        if 2 * count <= world.size:
            names = ", ".join(str(peer) for peer in world.peers.all)
            return ReplicaDiffers(f"{names} {what}, each its own; which one is right cannot be told. {advice}")
        wrong = tuple(rank for rank, each in enumerate(digests) if each != digest)
        names = ", ".join(str(world.peers.all[rank]) for rank in wrong)
        text = f"worker {world.rank}: {names} {what} than the {count} others. {advice}"
        if world.generations is not None and world.rank not in wrong:
            return WorkerLost(text, wrong)
        return ReplicaDiffers(text, wrong)
