"""Parameters that exist whole only while they are used: gathered before a block runs, released after it.

Every worker keeps its part of each block. A block's parameters are views of a flat tensor whose memory comes and goes:

    forward     before a block runs its flat tensor is gathered, and that of the next block is asked for;
                after it has run, it is released
    backward    when the gradient of a block's output is known the flat tensor is gathered again, and the block before
                it is asked for; when the gradients of all its parameters have arrived, it is released

The next block is the one that ran next in the last pass. What belongs to no block is gathered when the model is called
and stays until the backward pass has ended. The flat tensor keeps its storage object while the memory behind it goes,
since autograd saves views of it; the parameters themselves look at a single NaN in the meantime, so that whoever reads
them then sees it, and nobody reads memory that is gone.

Gathering needs every worker. So a worker whose backward pass fails half-way must still take part in what the others
gather in the rest of theirs, between the same reductions: it repeats what it has noted of the last whole pass.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.comm.backend import all_gather, moves_parts
from lockstep.comm.shm.work import waited_for
from lockstep.data import tree
from lockstep.errors import UsageError
from lockstep.replica.bucket import view_of
from lockstep.replica.layout import BucketPlan
from lockstep.replica.split import Span, are_equal
from lockstep.world import World

MODEL = -1
"""Stands for what belongs to no block."""
AHEAD = 2
"""How many blocks are held at a time: the one that runs, and the next one on its way."""
REDUCTION = -1
"""Stands, among the numbers of gathered buckets, for the reduction of a bucket of gradients."""


class Gathered:
    """The flat tensor of one bucket, and the part of it that stays."""

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup,
        plan: BucketPlan,
        params: Sequence[Tensor],
        dtype: torch.dtype,
        note: Callable[[], None],
    ) -> None:
        self._world, self._group = world, group
        self._note = note
        self._dtype = dtype
        self._plan, self._params = plan, params
        self.flat, self._views = self._new_flat()
        with torch.no_grad():
            for view, param in zip(self._views, params, strict=True):
                view.copy_(param)
        self._absent = [_absent(view) for view in self._views]
        self.own: Tensor = self.flat
        self._spans: Sequence[Span] = ()
        self._work: list[Any] = []
        self.is_asked = self.is_there = True
        self.has_frozen = any(not param.requires_grad for param in params)

    def _new_flat(self) -> tuple[Tensor, list[Tensor]]:
        plan = self._plan
        flat = torch.zeros(plan.tail_offset, dtype=self._dtype, device=plan.device)
        return flat, [view_of(flat, slot, param) for slot, param in zip(plan.slots, self._params, strict=True)]

    def keep(self, spans: Sequence[Span]) -> Tensor:
        """Keep the owned part, and release the rest."""
        own = spans[self._world.rank]
        self._spans = spans
        self.own = self.flat[own.begin : own.end].clone()
        self.release()
        return self.own

    def ask(self) -> None:
        """Start gathering, unless that has been done."""
        if self.is_asked:
            return
        self.is_asked = True
        self._note()
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())
        if moves_parts(self._group) and are_equal(self._spans):
            self._work = [all_gather(self.flat, self.own, self._group)]
            return
        own = self._spans[self._world.rank]
        self.flat[own.begin : own.end].copy_(self.own)
        self._work = [
            dist.broadcast(self.flat[span.begin : span.end], group=self._group, group_src=rank, async_op=True)
            for rank, span in enumerate(self._spans)
            if span.numel
        ]

    def gather(self) -> None:
        """Return when the parameters are there."""
        if self.is_there:
            return
        with waited_for():
            self.ask()
        for work in self._work:
            self._world.await_on_device(work, "gathering parameters")
        self._work = []
        self.is_there = True
        for param, view in zip(self._params, self._views, strict=True):
            param.data = view

    def release(self) -> None:
        """Give the memory back; what was asked for is waited for first."""
        if not self.is_asked:
            return
        self.gather()
        self.is_asked = self.is_there = False
        for param, absent in zip(self._params, self._absent, strict=True):
            param.data = absent
        if not self.flat.untyped_storage().resizable():  # Somebody has it as a numpy array: leave it to him.
            self.flat, self._views = self._new_flat()
        self.flat.untyped_storage().resize_(0)

    def let_go(self) -> None:
        """Let go of the group."""
        del self._group

    def write_back(self) -> None:
        """Keep what was changed in the gathered parameters."""
        own = self._spans[self._world.rank]
        self.own.copy_(self.flat[own.begin : own.end])


class GatheredParams:
    """The parameters of a model, block by block."""

    def __init__(
        self,
        world: World,
        group: dist.ProcessGroup,
        module: nn.Module,
        blocks: Sequence[nn.Module],
        block_of: Mapping[nn.Parameter, int],
    ) -> None:
        self._world, self._group = world, group
        self._block_of = block_of
        self._buckets: list[Gathered] = []
        self._of_block: dict[int, list[Gathered]] = {number: [] for number in range(MODEL, len(blocks))}
        self._order: list[int] = []
        """Blocks in the order in which they last ran."""
        self._running: list[int] = []
        self._has_callback = False
        self._sent: list[int] = []
        """What this pass has gathered and reduced so far, in order."""
        self._sent_last: list[int] = []
        """The same of the last whole pass."""
        self._is_abandoned = False
        module.register_forward_pre_hook(self._hook("_before_model"), prepend=True)
        module.register_forward_hook(self._hook("_after_model"), always_call=True)
        for number, block in enumerate(blocks):
            block.register_forward_pre_hook(self._hook("_before_block", number), prepend=True)
            block.register_forward_hook(self._hook("_after_block", number))

    def _hook(self, name: str, *args: Any) -> Any:
        """A method as a hook that does not keep this object alive: a module can be wrapped anew."""
        me = weakref.ref(self)

        def hook(module: nn.Module, *given: Any) -> None:
            alive = me()
            if alive is not None:
                getattr(alive, name)(*args, given[-1])

        return hook

    # As FlatParams

    def place(self, plan: BucketPlan, params: Sequence[Any], spans: Sequence[Span], dtype: torch.dtype) -> Tensor:
        """Move a block's parameters into a flat tensor, keep the owned part of it, and release the rest."""
        note = functools.partial(self._sent.append, len(self._buckets))
        gathered = Gathered(self._world, self._group, plan, params, dtype, note)
        self._buckets.append(gathered)
        self._of_block[self._block_of[params[0]]].append(gathered)
        return gathered.keep(spans)

    def before_step(self) -> None:
        """Nothing: others have their own copies."""

    def after_step(self) -> None:
        """What is still gathered is out of date."""
        self._release_all()

    def end(self) -> None:
        """This was a whole pass."""
        self._sent_last = list(self._sent)

    def abandon(self) -> None:
        """The pass has failed here, and nothing is gathered any more but for the others."""
        if self._sent != self._sent_last[: len(self._sent)]:
            raise UsageError(
                f"worker {self._world.rank}: a backward pass failed here before this worker had seen what a step of "
                "this model gathers (zero=3), so it cannot keep in step with the others. End this run; its first two "
                "steps must succeed."
            )
        self._is_abandoned = True

    def _repeat(self) -> None:
        """Gather what the others gather before their next reduction."""
        while len(self._sent) < len(self._sent_last) and (number := self._sent_last[len(self._sent)]) != REDUCTION:
            self._buckets[number].ask()
            self._buckets[number].release()

    def done(self, number: int | None) -> None:
        """All gradients of bucket `number` have arrived: nothing in this pass reads its parameters any more."""
        if self._is_abandoned:
            self._repeat()
        self._sent.append(REDUCTION)
        if number is None:
            if self._is_abandoned:
                self._is_abandoned = False
                self._release_all()
            return
        gathered = self._buckets[number]
        if gathered not in self._of_block[MODEL] and not gathered.has_frozen:
            gathered.release()

    def release(self) -> None:
        """Let go of the group."""
        del self._group
        for gathered in self._buckets:
            gathered.let_go()

    def whole(self) -> Iterator[None]:
        """Gather everything; at the end keep what was changed, and release it."""
        for gathered in self._buckets:
            gathered.ask()
        for gathered in self._buckets:
            gathered.gather()
        try:
            yield
        finally:
            for gathered in self._buckets:
                gathered.write_back()
            self._release_all()

    def _release_all(self) -> None:
        self._has_callback = False
        for gathered in self._buckets:
            gathered.release()

    # Forward

    def _before_model(self, _inputs: object) -> None:
        if not _in_backward():
            self._sent.clear()
        for gathered in self._of_block[MODEL]:
            gathered.ask()
        self._ask_for(self._order[0] if self._order else None)
        for gathered in self._of_block[MODEL]:
            gathered.gather()
        if not _in_backward():
            self._running = []

    def _after_model(self, output: object) -> None:
        if self._running:
            self._order = self._running
        if _in_backward():
            return
        if torch.is_grad_enabled() and self._watch(output, MODEL):
            return
        self._release_all()

    def _before_block(self, number: int, _inputs: object) -> None:
        for gathered in self._of_block[number]:
            gathered.gather()
        if not _in_backward():
            self._running.append(number)
            self._ask_for(self._after(number, self._order))

    def _after_block(self, number: int, output: object) -> None:
        if _in_backward():
            return  # Recomputed for the backward pass, which follows at once.
        needs_backward = torch.is_grad_enabled() and self._watch(output, number)
        # The last ones are needed again first; as many are held at any time of the backward pass.
        if not (needs_backward and number in self._order[-AHEAD:]):
            for gathered in self._of_block[number]:
                gathered.release()

    # Backward

    def _watch(self, output: object, number: int) -> bool:
        """Have the block gathered when the gradient of its output comes; whether there will be one."""
        found = False
        for leaf in tree.leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _grad, number=number: self._before_backward(number))
                found = True
        return found

    def _before_backward(self, number: int) -> None:
        if not self._has_callback:
            self._has_callback = True
            torch.autograd.Variable._execution_engine.queue_callback(self._release_all)
        for gathered in self._of_block[number]:
            gathered.gather()
        order = self._order[::-1]
        self._ask_for(order[0] if number == MODEL and order else self._after(number, order))

    def _ask_for(self, number: int | None) -> None:
        for gathered in self._of_block[number] if number is not None else ():
            gathered.ask()

    @staticmethod
    def _after(number: int, order: Sequence[int]) -> int | None:
        place = order.index(number) + 1 if number in order else len(order)
        return order[place] if place < len(order) else None


def _absent(param: Tensor) -> Tensor:
    """What a parameter looks at while it is elsewhere: its shape, a single NaN, and no memory."""
    value = torch.nan if param.is_floating_point() or param.is_complex() else 0
    return torch.full((1,), value, dtype=param.dtype, device=param.device).expand(param.shape)


def _in_backward() -> bool:
    """Whether this runs inside a backward pass, as a recomputed forward does."""
    return torch._C._current_graph_task_id() != -1
