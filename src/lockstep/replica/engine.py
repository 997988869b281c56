"""What a wrapped model is made of besides its module: chosen and put together once, from what was asked for.

    alone       nothing travels; master weights, where there are any, are this worker's own
    equal       start equal, and send nothing afterwards
    together    how buckets are added, what is split, what is kept equal; then the reducer

Every worker assembles the same, in the same order, since the parts talk to their like while they are made.

`DataParallel` has one engine, as its one private handle for the trainer, checkpoints, watchers and verify.
"""

import contextlib
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.group import shares_memory
from lockstep.comm.memory import memory_of
from lockstep.errors import UsageError
from lockstep.replica import agreement, allocator, modules
from lockstep.replica.batch_norm import SyncBatchNorm
from lockstep.replica.bucket import Buckets
from lockstep.replica.buffers import Buffers
from lockstep.replica.embedding_rows import RowsReducer, find_tables
from lockstep.replica.granularity import LATE, UNCUT, Granularity, usual_granularity
from lockstep.replica.model_mesh import ModelMesh, all_reduce
from lockstep.replica.optimizer import SplitOptimizer
from lockstep.replica.params import Owned
from lockstep.replica.placement import Placement, SplitPlacement
from lockstep.replica.precision import Masters
from lockstep.replica.reducer import Reducer, SharedState
from lockstep.replica.reduction import (
    BucketReduction,
    CodedReduction,
    FastReduction,
    HybridReduction,
    Partials,
    TreeReduction,
)
from lockstep.replica.step_state import tail_numel
from lockstep.replica.wrapping import DataWorlds, WrapOptions
from lockstep.wire import Half
from lockstep.wire.auto import reduction_by
from lockstep.wire.reduction import WireReduction
from lockstep.world import World


class StepShards(Protocol):
    """The shards of a step that one worker runs, whose gradients and buffers are added along one tree."""

    partials: Partials
    """Gradients of the shards that are done."""
    dtype: torch.dtype | None
    """What they are rounded to before they are added, and every sum of them; None for their own."""
    group: dist.ProcessGroup | None
    """Of this replica alone, for its buckets; None on a lone worker, like `reduction`."""
    reduction: TreeReduction | None

    @property
    def buffers(self) -> Buffers:
        """What shards make of the buffers."""

    def release(self) -> None:
        """Let go of the group."""


class StrategyTensors(Protocol):
    """Tensors that a strategy keeps next to the replica, and that go with it into its checkpoints."""

    def common_tensors(self) -> dict[str, Tensor]:
        """Those that all workers have alike: written once, as `strategy/all/NAME`, for any number of workers."""

    def load_common_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `common_tensors` gave; nothing where the checkpoint has none."""

    def own_tensors(self) -> dict[str, Tensor]:
        """This worker's own, written as `strategy/RANK/NAME`."""

    def load_own_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from this worker's own; nothing where the checkpoint was written by another number of workers."""

    def release(self) -> None:
        """The world is left: let go of its groups."""


class Engine:
    """The parts of a wrapped model; every worker of the world makes one, at the same time.

    `reducer`, `split` and the rest are None where there is nothing for them to do.
    """

    def __init__(self, data: DataWorlds, module: nn.Module, options: WrapOptions, shards: StepShards | None) -> None:
        self._data, self._world, self._options = data, data.all, options
        world = data.all
        self._names, self._params, owners = modules.contents(module)
        self.mesh = ModelMesh.find(world, self._names, self._params)
        """The workers that hold the other parts of the model, where its parameters are DTensors."""
        if self.mesh is not None:
            _require_plain(options, shards)
        if data.num_in_mesh > world.size:
            _require_own_statistics(module)
        self._are_copies_unknown = True
        self.is_sent_by_call = False
        """Whether gradients were sent by a call and not by a pass, as those of a pipeline's stage are."""
        self.device = next((param.device for param in self._params if not param.is_meta), world.device)
        """Where the parameters are."""
        self.reducer: Reducer | None = None
        """What sends gradients, if anything does."""
        self.wire: WireReduction | None = None
        """What the wires remember and count."""
        self.split: SplitPlacement | None = None
        """This worker's part of what is split."""
        self._shards = shards
        self._masters: Masters | None = None
        self.split_optimizer: SplitOptimizer | None = None
        self._formats = [(param.shape, param.stride(), param.dtype) for param in self._params]
        """Of the parameters as they were given."""
        self.strategy: StrategyTensors | None = None
        """What a strategy keeps with this replica."""
        if shards is not None:
            modules.close_gaps(self._params)
        if self.device.type == "cpu":
            allocator.keep_freed_memory()
        try:
            if self.mesh is not None and options.init_sync:
                self.mesh.start_equal(self._names, self._params, owners)
            if world.size == 1:
                self._assemble_alone(module, shards)
            elif options.reduces:
                self._assemble(module, owners, shards)
            else:
                agreement.start_equal(world, self._names, self._params, owners, with_buffers=True)
        except BaseException:
            if world.generations is not None:  # The module is to be wrapped again, in another world.
                self._dismantle()
            raise
        self.number = world.replicas.next_number()
        """Which of the world's wrapped models this is."""
        self.own_numbers: Any = world.own_stream("model", self.number, torch_only=True, device=world.device)
        """What the module draws in its forward pass comes from here. torch.compile does not see it."""
        self.is_driven = False
        """Whether the trainer seeds the generators before every pass, and weighs the losses."""

    # Assembly

    def _assemble_alone(self, module: nn.Module, shards: StepShards | None) -> None:
        optimizer, precision = self._options.optimizer, self._options.precision
        if modules.has_meta(module):
            modules.MetaParams(module, self.device, self._world.seed).make_rest()
        if precision is not None and optimizer is not None:
            self._masters = Masters(self._params, optimizer, precision)
        if shards is not None:
            shards.buffers.see()

    def _assemble(self, module: nn.Module, owners: Sequence[tuple[nn.Module, str]], shards: StepShards | None) -> None:
        world, options, device, names, params = self._world, self._options, self.device, self._names, self._params
        own = shards.group if shards is not None else None
        group = own or self._own_group(world)
        taken = [group]
        reduction: BucketReduction = FastReduction(group)
        if options.wire is not None:
            self.wire = reduction_by(options.wire, world, group, device)
            reduction = CodedReduction(self.wire, names, group, keeps_units=options.keeps_units)
        elif shards is not None and shards.reduction is not None:
            reduction = shards.reduction
        placement = Placement(reduction, memory_of(group, device), device, self.rounded_to)
        if options.zero:
            split, part, others = self._data.split, group, self._data.replicas
            if others is not None:
                part, among_others = self._own_group(split), self._own_group(others)
                reduction = _hybrid(reduction, group, part, among_others)
                taken += [part, among_others]
            self.split = placement = SplitPlacement(
                split, part, reduction, module, params, device, options, self.mesh, self.rounded_to
            )
        for each in taken:
            world.own_groups.free_after(placement, each)
        if options.init_sync:
            agreement.start_equal(world, names, params, owners, with_buffers=options.starts_buffers_equal)
        kept = [owner for owner in owners if options.keeps_buffers_equal and not modules.is_equal_anyway(*owner)]
        # Where parameters have fixed places, or are added along a tree, all of them are expected, and as dense ones.
        all_trained = options.zero > 0 or shards is not None
        shared = SharedState(
            names,
            params,
            sparse_params=frozenset() if all_trained else modules.sparse_params(module, params),
            buffers=shards.buffers if shards is not None else Buffers(world, kept),
        )
        tables = find_tables(module, params, world) if self._may_send_rows(shards) else {}
        trained = range(len(params)) if all_trained else _trained_anywhere(world, params)
        buckets = Buckets(
            params,
            # In the reverse order of registration, which is a guess: the first step shows the right one.
            [index for index in reversed(trained) if index not in shared.sparse_params],
            placement.rules,
            placement.memory,
            grain=self._granularity(group),
            tail_numel=tail_numel(len(params), len(shared.buffers)),
            alone=frozenset(tables) if placement.rules.is_fixed else frozenset(),
        )
        partials = shards.partials if shards is not None else None
        first_end = weakref.WeakMethod(self._compare_copies) if self.mesh is not None else None
        more: dict[str, Any] = {"group": group, "partials": partials, "first_end": first_end}
        more["skips_unused"] = options.skips_unused and not options.zero
        if tables:
            self.reducer = RowsReducer(tables, world, shared, buckets, placement, **more)
        else:
            self.reducer = Reducer(world, shared, buckets, placement, **more)
        if self.split is not None and options.optimizer is not None:
            self.split_optimizer = SplitOptimizer(options.optimizer)
            self.split_optimizer.point_at(params, self.split.parts)
            self.split_optimizer.around_step(self.split.before_update, self.split.after_update)
            allocator.trim()
        shared.buffers.see()

    def _own_group(self, world: World) -> dist.ProcessGroup:
        """A group of these workers, for this model alone."""
        assert world.group is not None
        return world.own_groups.take(world.group, self.device, world.timeout, world.gather_json)

    def _may_send_rows(self, shards: StepShards | None) -> bool:
        """Whether embeddings may travel apart from buckets.

        Not where a wire is to see all, nor on a GPU, whose host cannot know the rows; nor where parameters are gathered
        by block, since a table then comes and goes with its block.
        """
        is_plain = self._options.wire is None and shards is None and self._options.precision is None
        return is_plain and self.device.type == "cpu" and not self.gathers

    def _granularity(self, group: dist.ProcessGroup) -> Granularity:
        """The usual, or no more buckets than memory asks for where nothing can be hidden anyway."""
        cap_mb, wire, zero = self._options.bucket_cap_mb, self._options.wire, self._options.zero
        is_shared = shares_memory(group, self.device)
        if is_shared and cap_mb is None and wire is None and are_all_computing(self._world):
            return UNCUT if zero < 2 else LATE
        return granularity(self._world, self.device, cap_mb, wire=wire, zero=zero)

    # What the trainer, checkpoints and watchers need

    def drive(self) -> None:
        """The caller seeds the generators before every pass from now on, and weighs the losses."""
        self.is_driven = True
        if self.reducer is not None:
            self.reducer.trust_inputs()
        self.own_numbers = contextlib.nullcontext()

    def counted_grads(self) -> list[Tensor]:
        """What this worker adds to the norm of the gradients; all that hold a part of the model ask at one time."""
        if self.reducer is None:
            self._compare_copies()
        counted = [self.mesh is None or self.mesh.counts(param) for param in self._params]
        return [grad for index, grad in self._own_grads() if counted[index]]

    def _own_grads(self) -> list[tuple[int, Tensor]]:
        """What this worker has of the gradients, by the number of the parameter; all of a mesh ask at the same time."""
        if self.split is not None:
            return self.split.own_grads()
        grads = [param.grad for param in self._params]
        return [(index, grad) for index, grad in enumerate(grads) if grad is not None]

    def _compare_copies(self) -> None:
        """After the first step: raise if workers of a mesh have different gradients of what they have alike."""
        if self.mesh is None or not self._are_copies_unknown:
            return
        self._are_copies_unknown = False
        squares = torch.zeros(len(self._params), dtype=torch.float64)
        for index, grad in self._own_grads():
            squares[index] += float(grad.double().square().sum())
        if self.split is not None:
            all_reduce(squares, dist.ReduceOp.SUM, self._data.split, "comparing copies of gradients")
        self.mesh.require_same_grads(self._names, self._params, squares.sqrt().tolist())

    @property
    def rounded_to(self) -> torch.dtype | None:
        """What gradients are rounded to along the tree of the shards, if at all."""
        return self._shards.dtype if self._shards is not None else None

    @property
    def clipped(self) -> Sequence[nn.Parameter]:
        """What has this worker's gradients, whose own they are to be scaled."""
        return self.split.owned_params() if self.split is not None else self._params

    def speaks_for(self, param: Tensor) -> bool:
        """Whether what this worker has of a parameter is what counts, of all copies of it; see ModelMesh.counts."""
        return not self.is_copy and (self.mesh is None or self.mesh.counts(param))

    @property
    def is_copy(self) -> bool:
        """Whether all of this worker's part of what is split is that of another one, of an earlier replica."""
        return self.split is not None and self._data.replicas is not None and self._data.replicas.rank > 0

    @property
    def split_world(self) -> World:
        """The workers over which what is split is split."""
        return self._data.split

    @property
    def is_stage(self) -> bool:
        """Whether other workers of the mesh have other stages of a pipeline, as far as can be told."""
        return self.is_sent_by_call and self._data.num_in_mesh > self.holders.size

    @property
    def holders(self) -> World:
        """All workers that hold a part of the model."""
        return self.mesh.holders if self.mesh is not None else self._world

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered when they are used, so that a pass needs all workers."""
        return self.split is not None and self.split.gathered is not None

    def expect_overflows(self) -> None:
        """A gradient scaler will decide by the gradients whether to step: let all workers see the same overflows."""
        if self.split is not None:
            self.split.expect_overflows()

    def finish_without_pass(self) -> None:
        """End a step without a backward pass on this worker; nothing to do on a lone one."""
        if self.reducer is not None:
            self.reducer.finish_without_pass()

    def abandon(self) -> None:
        """Make the step in flight void on all workers, since this one's pass has failed."""
        if self.reducer is not None:
            self.reducer.abandon()

    @property
    def parts(self) -> list[Owned] | None:
        """What this worker's optimizer updates where something is split, or has masters; else None."""
        if self.split is not None:
            return self.split.owned(self._params)
        return self._masters.owned() if self._masters is not None else None

    def before_load(self) -> None:
        """What the optimizer updates is about to be overwritten; every worker calls this."""
        if self.split is not None:
            self.split.before_update()

    def after_load(self) -> None:
        """What the optimizer updates has been overwritten; every worker calls this."""
        if self.split is not None:
            self.split.after_update()
        if self._masters is not None:
            self._masters.publish()

    @contextlib.contextmanager
    def whole_params(self, call: str) -> Iterator[None]:
        """A block in which all parameters are there, to be read and changed; `call` is what the user called."""
        if self.split is not None:
            with self.split.whole_params(call):
                yield
            return
        yield
        if self._masters is not None:
            self._masters.take_back()

    def unsplit(self) -> None:
        """Give module and optimizer whole parameters again, of zeros: to be wrapped anew, and restored."""
        if self.split_optimizer is None:
            return
        self.split_optimizer.point_back()
        self.split_optimizer = None
        self._make_whole()

    def _make_whole(self) -> None:
        for param, (shape, strides, dtype) in zip(self._params, self._formats, strict=True):
            param.grad = None
            param.data = torch.zeros(shape, dtype=dtype, device=param.device).as_strided(shape, strides)

    def _dismantle(self) -> None:
        """A peer was lost while this was being made: leave nothing of it on module and optimizer."""
        if self.reducer is not None:
            self.reducer.release()
        elif self.split is not None:
            self.split.release()
        if self.split_optimizer is not None:
            self.split_optimizer.point_back()
        if self.split is not None:
            self._make_whole()

    def release(self) -> None:
        """Let go of everything that belongs to the world."""
        if self.reducer is not None:
            self.reducer.release()
        if self._shards is not None:
            self._shards.release()
        if self.strategy is not None:
            self.strategy.release()
        for inner in (self._data.split, self._data.replicas, self.mesh.world if self.mesh is not None else None):
            if inner is not None and inner is not self._world:
                inner.release()


def _hybrid(
    reduction: BucketReduction, group: dist.ProcessGroup, split: dist.ProcessGroup, replicas: dist.ProcessGroup
) -> HybridReduction:
    """What adds over those that split and over the others; UsageError where gradients do not travel as they are."""
    if not isinstance(reduction, FastReduction):
        raise UsageError(
            "wire=... goes with a device_mesh of one dimension: over two, parts are reduced in two steps, and only as "
            "they are. Leave out wire, or give mesh['dp']."
        )
    return HybridReduction(group, split, replicas)


def _require_plain(options: WrapOptions, shards: StepShards | None) -> None:
    """Raise UsageError for what goes with whole parameters only."""
    if shards is not None or not options.reduces:
        raise UsageError(
            "the model has parameters that are DTensors (tensor parallelism), and Trainer and its strategies take "
            "whole ones. Wrap it in lockstep.DataParallel(net, device_mesh=mesh['dp']), with a loop of your own."
        )
    if options.wire is not None and not isinstance(options.wire, Half):
        raise UsageError(
            "the model has parameters that are DTensors (tensor parallelism), and wire=... rounds each worker's "
            "copies of what they have whole by its neighbours in a bucket, so that copies would drift apart. Leave it "
            "out, or use lockstep.wire.Half."
        )


def _trained_anywhere(world: World, params: Sequence[nn.Parameter]) -> list[int]:
    """Parameters that need a gradient on some worker: all workers must lay out the same buckets."""
    mine = [index for index, param in enumerate(params) if param.requires_grad]
    return sorted(set().union(*world.gather_json(mine)))


def granularity(
    world: World, device: torch.device, cap_mb: float | None, *, wire: object = None, zero: int = 0
) -> Granularity:
    """How finely gradients are cut into buckets, by the way that they travel; the user's cap counts if given."""
    is_coded = wire is not None and device.type == "cuda"
    if cap_mb is None and is_coded:
        cap_mb = getattr(wire, "bucket_mb", None)
    return usual_granularity(
        is_on_one_host=world.peers.are_on_one_host,
        is_on_gpu=device.type == "cuda",
        cap_mb=cap_mb,
        is_coded=is_coded,
        zero=zero,
    )


def are_all_computing(world: World) -> bool:
    """Whether the backward passes of a host's workers, one thread each, take all cores that they may use.

    Then what runs beside them only takes turns with them, and leaves their caches cold. Workers of several threads
    leave cores idle between two products. Every worker of one host calls this.
    """
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    workers = world.gather_json([sorted(cores), torch.get_num_threads()])
    usable = set().union(*(usable for usable, _ in workers))
    return all(num_threads == 1 for _, num_threads in workers) and len(usable) <= len(workers)


def _require_own_statistics(module: nn.Module) -> None:
    """Raise UsageError for batch norms that would count workers with other parts of the model, or the same data."""
    for name, each in module.named_modules():
        if isinstance(each, SyncBatchNorm | nn.SyncBatchNorm) and each.process_group is None:
            raise UsageError(
                f"{name!r} averages its statistics over all workers, and only some dimensions of the mesh have data of "
                "their own. Convert it for those: lockstep.SyncBatchNorm.convert(net, mesh['dp'].get_group())."
            )
