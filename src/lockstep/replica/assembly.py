"""What a wrapped model is made of: chosen and put together once, from what was asked for.

    alone       nothing travels; master weights, where there are any, are this worker's own
    equal       start equal, and send nothing afterwards
    together    how buckets are added, what is split, what is kept equal; then the reducer

Every worker assembles the same, in the same order, since the parts talk to their like while they are made.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm.backend import reduction_group
from lockstep.comm.memory import memory_of
from lockstep.comm.shm.group import ShmGroup
from lockstep.replica import allocator, wrapping
from lockstep.replica.buckets import Buckets
from lockstep.replica.buffers import Buffers
from lockstep.replica.choosing import coded_by
from lockstep.replica.coded import Coded, require_wire
from lockstep.replica.cores import are_all_computing
from lockstep.replica.elementwise import may_be_cut
from lockstep.replica.flat_update import FlatUpdate, is_worth_it
from lockstep.replica.holding import Holding, MasterHolding, PartHolding
from lockstep.replica.layout import LATE, UNCUT, Granularity
from lockstep.replica.lending import lend_to_layers
from lockstep.replica.meta import Materials, has_meta
from lockstep.replica.notes import tail_numel
from lockstep.replica.placement import Placement, Whole
from lockstep.replica.precision import Masters, Precision
from lockstep.replica.reducer import Reducer
from lockstep.replica.reduction import BucketReduction, Fast
from lockstep.replica.rows import Rows
from lockstep.replica.shards import Shards
from lockstep.replica.shared_state import SharedState
from lockstep.replica.stretch import Stretches
from lockstep.replica.zero import Zero, require_stage
from lockstep.wire import Auto, Wire
from lockstep.world import World


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asked for, as far as it decides what a wrapped model is made of: see DataParallel."""

    init_sync: bool
    """Whether all start from worker 0's weights."""
    starts_buffers_equal: bool
    """Whether all start from worker 0's buffers as well."""
    keeps_buffers_equal: bool
    """Whether buffers that some worker changed are sent after a step."""
    bucket_cap_mb: float | None
    """The size of a bucket."""
    bucket_cap_mb_list: Sequence[float] | None
    """The same; the last entry counts."""
    optimizer: torch.optim.Optimizer | None
    """What is re-pointed at this worker's part, or at master weights."""
    zero: int
    """How much is split, as a stage."""
    blocks: Sequence[str | type[nn.Module]] | None
    """What is gathered and released together."""
    precision: Precision | None
    """The dtypes of a step."""
    wire: Wire | Auto | Literal["auto"] | None
    """How gradients are encoded."""
    shards: Shards | None
    """What lets everything be added along one tree."""
    reduces: bool
    """Whether anything is sent after the start."""

    def check(self, module: nn.Module) -> None:
        """Raise UsageError unless `module` can be wrapped as asked."""
        wrapping.require_module(module)
        require_stage(self.zero, self.optimizer, self.precision)
        require_wire(self.wire)
        if not self.zero:
            wrapping.require_memory(module)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a wrapped model is made of besides its module."""

    reducer: Reducer | None = None
    """What sends gradients, if anything does."""
    coded: Coded | None = None
    """What the wire remembers, where there is one."""
    zero: Zero | None = None
    """The split side, where something is split."""
    holding: Holding = field(default_factory=Holding)
    """What the optimizer updates."""
    update: FlatUpdate | None = None
    """What has small parameters updated together, where nothing is split and the optimizer is known."""


@dataclass(frozen=True, slots=True)
class _Model:
    """What is found in the module."""

    module: nn.Module
    """Itself."""
    names: list[str]
    """Of its parameters."""
    params: list[nn.Parameter]
    """In the order of `names`."""
    owners: list[tuple[nn.Module, str]]
    """Where each buffer lives: its module, and its name there."""
    device: torch.device
    """Where it computes."""


def assemble(world: World, module: nn.Module, asked: Asked) -> Parts:
    """The parts of `module` wrapped; every worker of `world` calls this."""
    names, params, owners = wrapping.contents(module)
    device = next((param.device for param in params if not param.is_meta), world.device)
    model = _Model(module, names, params, owners, device)
    if device.type == "cpu":
        allocator.keep_freed_memory()
    if world.size == 1:
        return _alone(world, model, asked)
    if not asked.reduces:
        wrapping.start_equal(world, names, params, owners, with_buffers=True)
        return Parts()
    return _together(world, model, asked)


def _alone(world: World, model: _Model, asked: Asked) -> Parts:
    if has_meta(model.module):
        Materials(model.module, model.device, world.seed).make_rest()
    holding = Holding()
    if asked.precision is not None and asked.optimizer is not None:
        holding = MasterHolding(Masters(model.params, asked.optimizer, asked.precision))
    if asked.shards is not None:
        asked.shards.open(world, None, model.device, model.params, model.owners)
    return Parts(holding=holding)


def _together(world: World, model: _Model, asked: Asked) -> Parts:
    assert world.group is not None
    device = model.device
    group = reduction_group(world.group, device)
    reduction, coded = _reduction(world, group, model, asked)
    zero = _zero(world, group, model, asked, reduction)
    if asked.init_sync:
        wrapping.start_equal(world, model.names, model.params, model.owners, with_buffers=asked.starts_buffers_equal)
    shared = _shared_state(world, model, asked, zero)
    grain = _grain(world, group, device, asked)
    placement: Placement = zero.placement if zero else Whole(reduction, memory_of(group, device), device)
    partials = asked.shards.partials if asked.shards is not None else None
    buckets = _buckets(shared, placement, grain)
    reducer = Reducer(world, shared, buckets, placement, group=group, partials=partials)
    if zero is not None:
        zero.take_over(model.params)
        if shared.rows is not None:
            shared.rows.split(zero.placement.parts)
    if partials is None:
        lend_to_layers(model.module, model.params, reducer.lender)
    shared.buffers.see()
    holding = PartHolding(zero) if zero is not None else Holding()
    return Parts(reducer, coded, zero, holding, _flat_update(model, asked, buckets))


def _grain(world: World, group: dist.ProcessGroup, device: torch.device, asked: Asked) -> Granularity:
    """How finely gradients are cut into buckets: no more than memory asks for where nothing can be hidden anyway."""
    cap_mb = asked.bucket_cap_mb_list[-1] if asked.bucket_cap_mb_list else asked.bucket_cap_mb
    is_shared = isinstance(group, ShmGroup) and device.type == "cpu"
    if is_shared and cap_mb is None and asked.wire is None and are_all_computing(world):
        return UNCUT if asked.zero < 2 else LATE
    return wrapping.granularity(world, device, cap_mb, wire=asked.wire, zero=asked.zero)


def _flat_update(model: _Model, asked: Asked, buckets: Buckets) -> FlatUpdate | None:
    """Where parameters are split, this is `Zero`'s."""
    if asked.zero or asked.optimizer is None or not is_worth_it(model.params):
        return None
    if not may_be_cut(asked.optimizer, model.device):
        return None
    stretches = Stretches(buckets.all)
    update = FlatUpdate(asked.optimizer, stretches)
    holders = weakref.ref(update), weakref.ref(stretches)

    def forget() -> None:
        for holder in holders:
            alive = holder()
            if alive is not None:
                alive.forget()

    buckets.before_renewal = forget
    return update


def _reduction(
    world: World, group: dist.ProcessGroup, model: _Model, asked: Asked
) -> tuple[BucketReduction, Coded | None]:
    """How buckets are added, and the wire among it."""
    coded = None
    if asked.wire is not None:
        coded = coded_by(asked.wire, world, group, model.device, model.names)
    tree = None
    if asked.shards is not None:
        tree = asked.shards.open(world, group, model.device, model.params, model.owners)
    return tree or coded or Fast(group), coded


def _zero(
    world: World, group: dist.ProcessGroup, model: _Model, asked: Asked, reduction: BucketReduction
) -> Zero | None:
    if not asked.zero or asked.optimizer is None:
        return None
    return Zero(
        world,
        group,
        model.module,
        model.params,
        model.device,
        asked.optimizer,
        asked.zero,
        asked.blocks,
        asked.precision,
        reduction,
    )


def _shared_state(world: World, model: _Model, asked: Asked, zero: Zero | None) -> SharedState:
    owners = model.owners if asked.keeps_buffers_equal else []
    kept = [owner for owner in owners if not wrapping.is_equal_anyway(*owner)]
    buffers = asked.shards.buffers if asked.shards is not None else Buffers(world, kept)
    # Where parameters have fixed places, or are added along a tree, all of them are expected, and as dense ones.
    all_trained = asked.zero > 0 or asked.shards is not None
    return SharedState(
        model.names,
        model.params,
        trained=range(len(model.params)) if all_trained else wrapping.trained_anywhere(world, model.params),
        sparse_params=frozenset() if all_trained else wrapping.sparse_params(model.module, model.params),
        rows=Rows(model.module, model.params, world) if _has_rows(model, asked, zero) else None,
        buffers=buffers,
    )


def _has_rows(model: _Model, asked: Asked, zero: Zero | None) -> bool:
    """Whether embeddings may travel apart from buckets: a wire is to see all, and a GPU's host cannot know the rows.

    Nor where parameters are gathered by block, since a table then comes and goes with its block.
    """
    is_plain = asked.wire is None and asked.shards is None and asked.precision is None
    return is_plain and model.device.type == "cpu" and (zero is None or not zero.gathers)


def _buckets(shared: SharedState, placement: Placement, grain: Granularity) -> Buckets:
    # In the reverse order of registration, which is a guess: the first step shows the right one.
    order = [index for index in reversed(shared.trained) if index not in shared.sparse_params]
    return Buckets(
        shared.params,
        order,
        placement,
        grain=grain,
        tail_numel=tail_numel(len(shared.params), len(shared.buffers)),
        alone=shared.rows.tables if placement.is_fixed and shared.rows is not None else frozenset(),
    )
