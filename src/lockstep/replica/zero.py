"""ZeRO: what of a model every worker keeps whole, and what is split, as one of four stages.

    0   everything whole
    1   optimizer state split: each worker updates its part of the parameters
    2   gradients split as well: beyond its part a worker keeps none
    3   parameters split as well

On one host over shared memory parameters exist once for all workers from stage 1 on, so stage 3 is stage 2 there: what
it would gather and release is never there twice.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.memory import Memory, TurnsMemory, memory_of
from lockstep.comm.shm.group import ShmGroup
from lockstep.comm.shm.work import waited_for
from lockstep.errors import UsageError
from lockstep.replica import allocator
from lockstep.replica.blocks import assign, find_blocks
from lockstep.replica.elementwise import Grain, grain_of
from lockstep.replica.flat_params import CommonParams, FlatParams, KeptParams
from lockstep.replica.flat_update import FlatUpdate, is_worth_it
from lockstep.replica.gathered_params import GatheredParams
from lockstep.replica.meta import Materials
from lockstep.replica.placement import Split
from lockstep.replica.precision import Precision
from lockstep.replica.reduction import BucketReduction, Fast
from lockstep.replica.split_optimizer import SplitOptimizer
from lockstep.replica.stretch import of_part
from lockstep.world import World

STAGES = (0, 1, 2, 3)
TAIL_CAP_BYTES = 4 << 20
"""Through shared memory a last bucket up to here is all-reduced with the notes in it, not scattered before them:
a message costs more than its bytes."""


def require_stage(zero: object, optimizer: object, precision: object) -> None:
    """Raise UsageError unless `zero` is a stage and the rest what that stage needs."""
    if precision is not None and not isinstance(precision, Precision):
        raise UsageError(f"precision must be a lockstep.Precision, got {type(precision).__name__}.")
    if precision is not None and not zero:
        raise UsageError("precision keeps master weights with the optimizer: give DataParallel zero=1, 2 or 3 as well.")
    if zero not in STAGES or isinstance(zero, bool):
        raise UsageError(f"zero={zero!r}: the stages are 0 (nothing split), 1, 2 and 3.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if zero and optimizer is None:
        raise UsageError(f"zero={zero} splits the optimizer over the workers: DataParallel(net, optimizer=optimizer).")


class Zero:
    """The split side of one replica: its placement, its optimizer, and what happens around a step."""

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup,
        module: nn.Module,
        params: Sequence[nn.Parameter],
        device: torch.device,
        optimizer: torch.optim.Optimizer,
        stage: int,
        blocks: Sequence[str | type[nn.Module]] | None,
        precision: Precision | None,
        reduction: BucketReduction,
    ) -> None:
        self._world, self._group = world, group
        numbers: list[int] = []
        self._flat_params: FlatParams
        self._shares_memory = isinstance(group, ShmGroup)
        if self._shares_memory:
            self._flat_params = CommonParams(world, group)
        elif stage < 3:
            self._flat_params = KeptParams(world, group)
        else:
            found = find_blocks(module, blocks)
            numbers = assign(module, params, found)
            self._flat_params = GatheredParams(world, group, module, found, dict(zip(params, numbers, strict=True)))
        self._materials = Materials(module, device, world.seed)
        self._grain = grain_of(optimizer, device)
        memory: Memory = memory_of(group, device)
        self.placement = Split(
            world,
            group,
            reduction,
            TurnsMemory(memory) if stage >= 2 else memory,
            self._flat_params,
            self._grain,
            keeps_buckets=stage < 2,
            tail_cap_bytes=TAIL_CAP_BYTES if self._shares_memory and isinstance(reduction, Fast) else 0,
            blocks=numbers,
            precision=precision,
            materials=self._materials,
            device=device,
        )
        self._has_masters = precision is not None
        self._optimizer = SplitOptimizer(optimizer)
        self._update: FlatUpdate | None = None
        self._params: Sequence[nn.Parameter] = ()

    def take_over(self, params: Sequence[nn.Parameter]) -> None:
        """Point the optimizer at this worker's part, once the parameters have their places."""
        self._params = params
        self._materials.make_rest()
        self._optimizer.point_at(params, self.placement.parts)
        self._optimizer.around_step(self.before_step, self.after_step)
        self._update_together()
        allocator.trim()
        if self._world.device.type == "cpu" and not self._shares_memory:
            allocator.give_back_large_blocks()

    def _update_together(self) -> None:
        """Have small fragments updated by few calls, where the optimizer treats every element by itself."""
        if self._grain is Grain.ELEMENT and not self._has_masters and is_worth_it(self.owned):
            stretches = [of_part(part) for part in self.placement.parts]
            self._update = FlatUpdate(self._optimizer.optimizer, lambda: stretches)

    def see_forward(self) -> None:
        """A forward pass begins; under float16 a gradient scaler may decide by the gradients whether to step."""
        kind = self._world.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
            self.placement.agrees_on_overflow = True

    def before_step(self) -> None:
        """The owned parts are about to change."""
        self._flat_params.before_step()

    def after_step(self) -> None:
        """The owned parts have changed."""
        self.placement.publish()
        self._flat_params.after_step()

    def holdings(self) -> list[tuple[nn.Parameter, nn.Parameter, int]]:
        """Parameter, fragment, and number of its first element, for everything that this worker owns."""
        return [
            (self._params[fragment.index], own, fragment.offset)
            for part in self.placement.parts
            for fragment, own in zip(part.fragments, part.params, strict=True)
        ]

    def release(self) -> None:
        """Let go of the group."""
        del self._group
        self._flat_params.release()
        if self._update is not None:
            self._update.release()

    def _reduce(self, value: Tensor, op: Any) -> None:
        with waited_for():
            work = dist.all_reduce(value, op, group=self._group, async_op=True)
        self._world.await_on_device(work, "computing the norm of the gradients")

    @property
    def gathers(self) -> bool:
        """Whether parameters are whole only while they are used."""
        return isinstance(self._flat_params, GatheredParams)

    @property
    def keeps_whole_params(self) -> bool:
        """Whether every worker has a copy of all parameters between the steps."""
        return isinstance(self._flat_params, KeptParams)

    def whole_params(self) -> Iterator[None]:
        """See DataParallel."""
        try:
            yield from self._flat_params.whole()
        finally:
            with torch.no_grad():
                for part in self.placement.parts:
                    part.take_back()

    @property
    def owned(self) -> list[nn.Parameter]:
        """The fragments of this worker."""
        return [param for part in self.placement.parts for param in part.params]

    def total_norm(self, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """The norm of the gradients of the whole model, the same on all workers."""
        grads = [param.grad for param in self.owned if param.grad is not None]
        mine = nn.utils.get_total_norm(grads, norm_type) if grads else torch.zeros((), device=self._world.device)
        if math.isinf(norm_type):
            self._reduce(mine, dist.ReduceOp.MAX)
            total = mine
        else:
            powers = mine.double().pow(norm_type)
            self._reduce(powers, dist.ReduceOp.SUM)
            total = powers.pow(1 / norm_type).to(mine.dtype)
        if error_if_nonfinite and not torch.isfinite(total):
            raise UsageError(f"the gradients' norm is {total.item()}; pass error_if_nonfinite=False to scale anyway.")
        return total
